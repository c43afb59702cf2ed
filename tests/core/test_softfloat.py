"""The integer binary32 of the oracles against numpy's, the C library's fma, and exact fractions."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle import softfloat as soft
from oracle.quantised_integers import BetweenLanesError as OtherBetweenLanesError
from oracle.quantised_integers import fma as fraction_fma
from oracle.quantised_integers import from_bits

EDGES = [
    0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x00800001, 0x00FFFFFF, 0x3F7FFFFF, 0x3F800000,
    0x3F800001, 0x3FFFFFFF, 0x40000000, 0x4B7FFFFF, 0x4B800000, 0x7EFFFFFF, 0x7F000000, 0x7F7FFFFF,
]  # fmt: skip
EDGES += [bits | 0x80000000 for bits in EDGES]
SPECIAL = [soft.INFINITY, soft.INFINITY | 0x80000000, soft.NAN]
finite_bits = st.one_of(
    st.sampled_from(EDGES),
    st.integers(0, 2**32 - 1).filter(lambda bits: bits & soft.INFINITY != soft.INFINITY),
    st.integers(0x3E000000, 0x40FFFFFF),
)
many = settings(max_examples=800, deadline=None, derandomize=True)


def flushed(bits: int) -> np.float32:
    """The float, a subnormal as zero of its sign."""
    return np.uint32(bits if bits & soft.INFINITY else bits & 0x80000000).view(np.float32)


def same(found: int, expected: np.float32) -> bool:
    if np.isnan(expected):
        return found == soft.NAN
    bits = int(expected.view(np.uint32))
    return found == (bits if bits & soft.INFINITY else bits & 0x80000000)


BINARY = {
    soft.add: operator.add,
    soft.subtract: operator.sub,
    soft.multiply: operator.mul,
    soft.divide: operator.truediv,
}


def check_binary(mine, theirs, a: int, b: int) -> None:
    with np.errstate(all="ignore"):
        expected = theirs(flushed(a), flushed(b))
    try:
        found = mine(a, b)
    except soft.BetweenLanesError:
        # numpy kept a subnormal here, or rounded to the smallest normal number.
        assert abs(expected) >= np.float32(2**-126 - 2**-149)
        assert abs(expected) <= np.float32(2**-126)
        return
    if abs(expected) == np.float32(2**-126) and found & 0x7FFFFFFF == 0:
        # numpy rounds at 2^-149 here, not to 24 bits; the exact fractions below judge these.
        return
    assert same(found, expected), (hex(a), hex(b), hex(found), expected)


@pytest.mark.parametrize("mine", BINARY, ids=lambda f: f.__name__)
@many
@given(a=finite_bits, b=finite_bits)
def test_an_operation_is_numpys_with_subnormals_flushed(mine, a, b):
    check_binary(mine, BINARY[mine], a, b)


@pytest.mark.parametrize("mine", BINARY, ids=lambda f: f.__name__)
def test_edges_and_special_values_are_numpys(mine):
    for a in EDGES + SPECIAL:
        for b in EDGES + SPECIAL:
            check_binary(mine, BINARY[mine], a, b)


def test_roots_are_numpys():
    rng = np.random.default_rng(0)
    for a in [*EDGES, *SPECIAL, *rng.integers(0, 2**32, 5000).tolist()]:
        if a & 0x7FFFFFFF > soft.INFINITY:
            continue
        with np.errstate(all="ignore"):
            assert same(soft.root(a), np.sqrt(flushed(a))), hex(a)


@many
@given(a=finite_bits, b=finite_bits, c=finite_bits)
def test_fma_is_that_of_exact_fractions(a, b, c):
    try:
        expected = fraction_fma(from_bits(a), from_bits(b), from_bits(c)).bits()
    except OverflowError:
        assert soft.fma(a, b, c) & 0x7FFFFFFF == soft.INFINITY
        return
    except OtherBetweenLanesError:
        with pytest.raises(soft.BetweenLanesError):
            soft.fma(a, b, c)
        return
    assert soft.fma(a, b, c) == expected


@pytest.fixture(scope="module")
def fmaf():
    name = ctypes.util.find_library("m")
    if name is None:
        pytest.skip("needs the C library's fmaf")
    function = ctypes.CDLL(name).fmaf
    function.argtypes, function.restype = [ctypes.c_float] * 3, ctypes.c_float
    return function


def test_fma_is_the_c_librarys_where_addends_meet(fmaf):
    """Operands near each other's size, where rounding twice would show; special values too."""
    rng = np.random.default_rng(1)
    triples = rng.integers(0x3E000000, 0x41000000, (20000, 3)) | (rng.integers(0, 2, (20000, 3)) << 31)
    corners = itertools.product(SPECIAL + EDGES[8:12], SPECIAL + EDGES[-8:], SPECIAL + EDGES)
    for a, b, c in [*triples.tolist(), *corners]:
        expected = np.float32(fmaf(*(float(flushed(bits)) for bits in (a, b, c))))
        assert same(soft.fma(a, b, c), expected), (hex(a), hex(b), hex(c))


@many
@given(a=finite_bits, b=finite_bits)
def test_comparison_is_numpys(a, b):
    assert soft.is_less(a, b) == bool(flushed(a) < flushed(b))
    assert not soft.is_less(a, soft.NAN)
    assert not soft.is_less(soft.NAN, a)


@given(n=st.integers(-(2**40), 2**40))
def test_integers_go_in_rounded_and_come_out_floored(n):
    bits = soft.from_int(n)
    assert same(bits, np.float32(n))
    assert soft.to_int(bits) == int(np.float32(n))
    assert soft.to_int(soft.divide(bits, soft.from_int(8))) == int(np.floor(np.float32(n) / np.float32(8)))


def test_the_excluded_interval_is_refused_and_nothing_beside_it():
    half = 0x20000000  # 2^-63
    assert soft.multiply(half, half) == 0x00800000  # 2^-126
    below = half - 1  # 2^-63 (1 - 2^-24)
    assert soft.multiply(half, below) == 0  # 2^-126 (1 - 2^-24), a float that is flushed
    just_inside = (half + 0x400, half - 0x800)  # 1 + 2^-13 and 1 - 2^-13: the product is 1 - 2^-26
    with pytest.raises(soft.BetweenLanesError):
        soft.multiply(*just_inside)
    # Its lower end, 2^-126 (1 - 2^-25), is inside: 2^-126 - 2^-151.
    with pytest.raises(soft.BetweenLanesError):
        soft.fma(0x80000000 | half - (12 << 23), half - (13 << 23), 0x00800000)
    # A hair below it is not: 2^-126 - 2^-151 - 2^-174.
    assert soft.fma(0x80000000 | half - (12 << 23) + 1, half - (13 << 23), 0x00800000) == 0
