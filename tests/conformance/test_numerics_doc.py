"""The constants printed in docs/numerics.md are those of the scalar reference and of mens_core."""

from __future__ import annotations

import hashlib
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from mens_core import philox, rotary
from mens_core.numerics import NUMERICS_VERSION
from mens_core.rotary import cos_sin, frequencies, table
from vox_plugin_api.families.rope import Rope

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
REFERENCE = "".join(
    (ROOT / "plugins/mens-cpu-ref/native" / name).read_text(encoding="utf-8")
    for name in ("reference_math.h", "reference.cpp", "backward_reference.cpp", "update_reference.cpp")
)
SIGN = 0x80000000
ONE = 0x3F800000


def section(number: str) -> str:
    """The text below a numbered heading, to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(number)}\.? .*?$(.*?)(?=^#+ |\Z)", TEXT, re.M | re.S)
    assert found, f"docs/numerics.md has no section {number}"
    return found[1]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in re.findall(r"`([0-9A-F]{8})`", text)]


def in_function(name: str) -> list[int]:
    """The constants of a function of the reference, in order; 1.0f is written as its bits on the page."""
    body = re.search(rf"^inline float {name}\(float x\) \{{(.*?)^\}}", REFERENCE, re.M | re.S)
    assert body, f"the reference has no {name}"
    return [
        int(bits, 16) if bits else ONE
        for bits in re.findall(r"from_bits\(0x([0-9A-F]{8})\)|fmaf\(p, r, 1\.0f\)", body[1])
    ]


def documented(name: str) -> list[int]:
    part = re.search(rf"^\*\*{name}\(x\)\*\*(.*?)(?=^\*\*|^The polynomials)", section("3"), re.M | re.S)
    assert part, f"section 3 has no {name}"
    return words(part[1])


def test_the_page_names_the_version_that_the_code_has() -> None:
    assert TEXT.startswith(f"# Numerics v{NUMERICS_VERSION}\n")


def test_exp_has_the_constants_of_the_reference() -> None:
    log2e, magic, magic_again, high, low, *polynomial = documented("exp")
    assert magic == magic_again
    # The page prints the negated halves of ln 2, which the reference negates in its products.
    assert [log2e, magic, high ^ SIGN, low ^ SIGN, *polynomial] == in_function("ref_exp")


@pytest.mark.parametrize("name", ["gelu_tanh", "tanh"])
def test_a_function_has_the_constants_of_the_reference(name: str) -> None:
    assert documented(name) == in_function("ref_gelu" if name == "gelu_tanh" else "ref_tanh")


def test_log_has_the_constants_of_the_reference() -> None:
    boundary, *rest = documented("log")
    assert f"bits - 0x{boundary:08X}" in REFERENCE
    assert rest == in_function("ref_log")


def test_the_derivative_of_gelu_has_the_constants_of_the_reference() -> None:
    bound, *line = words(section("12.3"))
    # The reference writes 2^7 as a decimal.
    assert np.uint32(bound).view(np.float32) == 128
    found = re.search(r"^Activation gelu\(float x\) \{(.*?)^\}", REFERENCE, re.M | re.S)
    assert found
    constants = [int(bits, 16) for bits in re.findall(r"from_bits\(0x([0-9A-F]{8})\)", found[1])]
    assert constants == documented("gelu_tanh") + line
    assert "z < 128.0f ? z : 128.0f" in found[1]


def test_the_rotary_terms_are_those_of_the_code() -> None:
    text = section("7.2")
    two_pi = re.search(r"T = floor\(2 pi \* 2\^125\) = `([0-9a-f]+)`", text)
    sine, cosine = (
        tuple(int(term, 16) for term in re.findall(r"`([0-9a-f]+)`", part))
        for part in re.findall(r"[sc]_1\.\.[sc]_1[56] =\n(.*?)[;.]\n", text, re.S)
    )
    assert two_pi is not None
    assert int(two_pi[1], 16) == rotary.TWO_PI_Q125
    assert f"0x{two_pi[1][:16]}u, 0x{two_pi[1][16:]}u" in REFERENCE
    assert sine == rotary.SINE_TERMS
    assert cosine == rotary.COSINE_TERMS


def test_the_checked_angles_come_out() -> None:
    text = section("7.2")
    freqs = frequencies(Rope(theta=Fraction(10**6), head_dim=256))
    rows = re.findall(r"^\| (\d+), (\d+) \| `(\w+)` \| `(\w+)` \| `(\w+)` \|$", text, re.M)
    assert len(rows) == 3
    for pair, position, frequency, cosine, sine in rows:
        assert freqs[int(pair)] == int(frequency, 16)
        assert cos_sin(freqs[int(pair)], int(position)) == (int(cosine, 16), int(sine, 16))
    edges = re.findall(r"^\| any, p \* F = 2\^(\d+)( - 1)? \| \| `(\w+)` \| `(\w+)` \|$", text, re.M)
    assert len(edges) == 3
    for power, less, cosine, sine in edges:
        turns = (1 << int(power)) - bool(less)
        assert cos_sin(turns, 1) == (int(cosine, 16), int(sine, 16))


def test_the_rotary_blocks_have_the_digests_on_the_page() -> None:
    rows = re.findall(r"^theta 10\^(\d), d (\d+) `(\w{64})`", section("7.2"), re.M)
    assert len(rows) == 3
    for power, width, digest in rows:
        freqs = frequencies(Rope(theta=Fraction(10 ** int(power)), head_dim=int(width)))
        blocks = table(freqs, None, range(256, 384))
        data = b"".join(np.ascontiguousarray(part, "<f4").tobytes() for part in blocks)
        assert hashlib.sha256(data).hexdigest() == digest


def test_philox_has_the_constants_of_the_code() -> None:
    found = re.findall(r"(?:= |\+= )([0-9A-F]{8})\b", section("11.1"))
    assert [int(word, 16) for word in found] == [
        philox._MULTIPLIER_0,
        philox._MULTIPLIER_1,
        philox._WEYL_0,
        philox._WEYL_1,
    ]


def test_the_streams_of_random_words_are_those_of_the_code() -> None:
    found = {name: int(number) for number, name in re.findall(r"\b(\d) ([a-z ]+?)[,.]", section("13.5"))}
    assert found == {
        "sampling": philox.STREAM_SAMPLING,
        "first values": philox.STREAM_LORA,
        "conformance vectors": philox.STREAM_VECTORS,
        "dropout": philox.STREAM_DROPOUT,
    }
    native = (ROOT / "plugins/mens-cpu-ref/native/update_abi.cpp").read_text(encoding="utf-8")
    assert f"kDropoutStream = {philox.STREAM_DROPOUT};" in native
