"""Rotary constants and their sines, against mpmath, plain float64, and pinned bits."""

import ast
import hashlib
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mens_core.fixedpoint
import mens_core.rotary
from mens_core.rotary import attention_factor, cos_sin, frequencies, table
from mens_core.rotary_blocks import make_angles
from vox_plugin_api.families.rope import Rope, Yarn

PINNED = {
    (10_000, 256): "732707313f850e1d1e22d2e3629fe1de4b6618a5bc9a4196e78ac324db3f0170",
    (1_000_000, 256): "786e767cbb2e6befb62e2e3e8e09290a56ce6466262944f41a7b2d55c0ca104f",
    (1_000_000, 128): "baebad2c4019398bf458c4c1f97e9fbe1011ccaa71c89d0ca3b652e1005273c8",
}
ONE = 1 << 128


def rope(theta=1_000_000, head_dim=128, scaling=None):
    return Rope(theta=Fraction(theta), head_dim=head_dim, scaling=scaling)


def floats(bits):
    return np.array(bits, np.uint32).view(np.float32)


@pytest.mark.parametrize(("theta", "head_dim"), PINNED)
def test_a_block_of_positions_has_the_pinned_bits(theta, head_dim):
    cos, sin = table(frequencies(rope(theta, head_dim)), None, range(256, 384))
    assert hashlib.sha256(cos.tobytes() + sin.tobytes()).hexdigest() == PINNED[theta, head_dim]


@pytest.mark.parametrize(("theta", "head_dim"), [(10_000, 256), (1_000_000, 128), (500_000, 64), (3, 10)])
def test_frequencies_are_the_floor_of_the_real_number(theta, head_dim):
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(400):
        for i, found in enumerate(frequencies(rope(theta, head_dim))):
            turns = mpmath.power(theta, mpmath.mpf(-2 * i) / head_dim) / (2 * mpmath.pi)
            assert found == int(mpmath.floor(turns * ONE)), i


def test_two_pi_is_the_constant_in_the_text():
    found = mens_core.fixedpoint.floor_to_bits(lambda p: 2 * mens_core.fixedpoint.pi(p), 125)
    assert found == mens_core.rotary.TWO_PI_Q125 == 0xC90FDAA22168C234C4C6628B80DC1CD1


def test_cosine_and_sine_are_the_correctly_rounded_ones():
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(7)
    freqs = frequencies(rope(10_000, 256))
    with mpmath.workprec(300):
        for _ in range(2000):
            f, position = freqs[rng.integers(128)], int(rng.integers(2**31))
            angle = 2 * mpmath.pi * f * position / ONE
            # float64 first is safe here: a float64 on a float32 boundary would be one in 2^29.
            expected = [np.float32(float(mpmath.cos(angle))), np.float32(float(mpmath.sin(angle)))]
            assert floats(cos_sin(f, position)).tolist() == expected, (f, position)


def test_sine_and_cosine_are_good_to_124_bits_before_they_are_rounded():
    """float32 results would not show a missing term; the definition has them all."""
    assert (len(mens_core.rotary.SINE_TERMS), mens_core.rotary.SINE_TERMS[-1]) == (15, 0xA1A6)
    assert (len(mens_core.rotary.COSINE_TERMS), mens_core.rotary.COSINE_TERMS[-1]) == (16, 0x50D)
    mpmath = pytest.importorskip("mpmath")
    rng = np.random.default_rng(9)
    rests = [1 << 125, (1 << 125) - 1, *(int(x) << 64 for x in rng.integers(0, 1 << 61, 100))]
    with mpmath.workprec(300):
        for rest in rests:
            angle = 2 * mpmath.pi * rest / ONE
            sine, cosine = mens_core.rotary._reduced_sine_cosine(rest)
            assert abs(sine - mpmath.sin(angle) * ONE) < 2**4, hex(rest)
            assert abs(cosine - mpmath.cos(angle) * ONE) < 2**4, hex(rest)


@pytest.mark.parametrize(
    ("numerator", "shift", "expected"),
    [
        (2**24 + 1, 0, 2.0**24),  # a tie goes to the even neighbour: down
        (2**24 + 3, 0, 2.0**24 + 4),  # and up
        (2**25 + 2**0 + 2, 0, 2.0**25 + 4),  # more than half: up
        (2**25 - 1, 0, 2.0**25),  # rounding carries into the next power of two
        (5, 0, 5.0),
        (2**24 - 1, -150, (2**24 - 1) * 2.0**-150),  # just below 2^-126: flushed
        (2**25 - 1, -151, 2.0**-126),  # rounds up to 2^-126: kept
        (1, -126, 2.0**-126),
        (0, 0, 0.0),
    ],
)
def test_rounding_is_to_nearest_even_and_flushes_what_is_below_normal(numerator, shift, expected):
    bits = mens_core.rotary._round(numerator << (192 + shift), False)
    wanted = np.float32(0 if expected < 2.0**-126 else expected)
    assert floats(bits) == wanted
    negative = mens_core.rotary._round(numerator << (192 + shift), True)
    assert negative == (0 if bits == 0 else bits | 1 << 31)


@pytest.mark.parametrize(
    ("angle", "cosine", "sine"),
    [
        (0, 0x3F800000, 0),
        (1 << 125, 0x3F3504F3, 0x3F3504F3),
        (1 << 126, 0, 0x3F800000),
        (3 << 125, 0xBF3504F3, 0x3F3504F3),
        (1 << 127, 0xBF800000, 0),
        (5 << 125, 0xBF3504F3, 0xBF3504F3),
        (3 << 126, 0, 0xBF800000),
        (7 << 125, 0x3F3504F3, 0xBF3504F3),
        (ONE - 1, 0x3F800000, 0x80C00000),
        (1, 0x3F800000, 0x00C00000),
    ],
)
def test_axes_and_diagonals_have_exact_bits(angle, cosine, sine):
    assert cos_sin(angle, 1) == (cosine, sine)


@given(angle=st.integers(0, ONE - 1), turns=st.integers(0, 2**31 - 1))
def test_any_angle_agrees_with_float64(angle, turns):
    assert cos_sin(angle, 1) == cos_sin(angle + turns * ONE, 1), "whole turns change nothing"
    radians = 2 * math.pi * (angle / ONE)
    found = floats(cos_sin(angle, 1)).astype(np.float64)
    assert np.abs(found - [math.cos(radians), math.sin(radians)]).max() < 2.0**-24 + 1e-15


def test_far_positions_lose_nothing_where_float32_angles_would():
    f = frequencies(rope())[0]
    found = floats(cos_sin(f, 2**31 - 1))
    assert abs(float(found[0]) - math.cos(2**31 - 1)) < 2.0**-24
    assert abs(math.cos(float(np.float32(2**31 - 1))) - math.cos(2**31 - 1)) > 0.1


def yarn_in_float64(head_dim, theta, y):
    """The published formulas, in float64."""

    def bound(n):
        return head_dim * math.log(y.original_context / (n * 2 * math.pi)) / (2 * math.log(theta))

    low, high = bound(float(y.beta_fast)), bound(float(y.beta_slow))
    if y.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return plain * (ramp / float(y.factor) + 1 - ramp)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "theta", "original", "factor"),
    [(128, 1_000_000, 32768, 4), (32, 1_000_000, 128, 4), (64, 10_000, 2048, 32), (64, 150_000, 4096, 1.5)],
)
def test_yarn_follows_the_published_formulas(head_dim, theta, original, factor, truncate):
    y = Yarn(factor=Fraction(factor), original_context=original, truncate=truncate)
    found = np.array([f / ONE * 2 * math.pi for f in frequencies(rope(theta, head_dim, y))])
    np.testing.assert_allclose(found, yarn_in_float64(head_dim, theta, y), rtol=1e-13)
    assert (found[-1] / theta ** -((head_dim - 2) / head_dim)) == pytest.approx(1 / factor)


def test_linear_scaling_divides_every_frequency():
    plain, scaled = frequencies(rope()), frequencies(rope(scaling=Fraction(8)))
    assert all(p // 8 == s for p, s in zip(plain, scaled, strict=True))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": Fraction(5, 4)}, 1.25),
        (
            {"mscale": Fraction(2), "mscale_all_dim": Fraction(1)},
            (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        ({"mscale": Fraction(1), "mscale_all_dim": Fraction(1)}, None),
        ({"mscale": Fraction(3)}, 0.1 * math.log(4) + 1),
        ({"factor": Fraction(1)}, None),
    ],
)
def test_the_attention_factor_is_an_exact_fraction(given, expected):
    y = Yarn(**{"factor": Fraction(4), "original_context": 128, **given})
    found = attention_factor(rope(scaling=y))
    if expected is None:
        assert found is None
    else:
        assert found[1] == 1 << 64
        assert found[0] / found[1] == pytest.approx(expected, rel=1e-15)


def test_the_attention_factor_multiplies_before_the_one_rounding():
    f, factor = frequencies(rope())[3], (25_000_000_000_000_000_001, 1 << 64)
    for position in range(200):
        radians = 2 * math.pi * (f * position % ONE / ONE)
        expected = np.array([math.cos(radians), math.sin(radians)]) * (factor[0] / factor[1])
        assert floats(cos_sin(f, position, factor)).tolist() == expected.astype(np.float32).tolist()


def test_without_scaling_there_is_no_factor():
    assert attention_factor(rope()) is None
    assert attention_factor(rope(scaling=Fraction(8))) is None


@pytest.mark.parametrize("module", [mens_core.rotary, mens_core.fixedpoint])
def test_no_float_and_no_float_function_takes_part(module):
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.Constant) and isinstance(node.value, float)), ast.dump(node)
        assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)) or is_fraction(node)
        if isinstance(node, ast.ImportFrom) and node.module == "math":
            assert {alias.name for alias in node.names} <= {"factorial"}


def is_fraction(node):
    """The three true divisions there are are of Fractions."""
    return ast.unparse(node) in {
        "(mantissa - 1) / (mantissa + 1)",
        "value / Fraction(2) ** exponent",
        "yarn.original_context / rotations",
    }


# --- blocks by numpy's integers ---------------------------------------------------------------------


def halves(freqs):
    return np.array([[f & (1 << 64) - 1, f >> 64] for f in freqs], np.uint64)


@pytest.mark.parametrize(("theta", "head_dim"), PINNED)
def test_a_block_made_by_numpy_has_the_pinned_bits(theta, head_dim):
    block = make_angles(halves(frequencies(rope(theta, head_dim))), 1 << 64, 256)
    digest = hashlib.sha256(block[:, 0].tobytes() + block[:, 1].tobytes()).hexdigest()
    assert digest == PINNED[theta, head_dim]


@pytest.mark.parametrize("first", [0, 128, (1 << 31) - 128])
@pytest.mark.parametrize(
    "factor",
    # The last two are ties where the cosine is 1: between an odd and an even number, either way.
    [1 << 64, 1, 3, 1 << 20, (1 << 64) + 12345, (1 << 67) - 1, 0x1000003 << 39, 0x1000001 << 39],
)
def test_a_block_made_by_numpy_is_the_reference_s(factor, first):
    """Axes, octants and their neighbours, magnitudes that flush, a 129th bit, and whatever is drawn."""
    drawn = np.random.default_rng(factor % 997).integers(0, 1 << 32, (6, 4), np.uint64)
    freqs = [sum(int(word) << 32 * i for i, word in enumerate(words)) for words in drawn]
    edges = [0, 1, 1 << 60, (1 << 125) - 1, 1 << 125, (1 << 125) + 1, 3 << 125, 1 << 126, 1 << 127, ONE - 1]
    block = make_angles(halves(freqs + edges), factor, first)
    cos, sin = table(freqs + edges, (factor, 1 << 64), range(first, first + 128))
    assert block[:, 0].tobytes() == cos.tobytes()
    assert block[:, 1].tobytes() == sin.tobytes()
