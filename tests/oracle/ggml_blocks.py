"""Raw GGML blocks: random and extreme ones to test with, and what they mean, in plain integers.

Written from the format alone; shares nothing with the native code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FORMATS = ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
COLUMNS = {"q8_0": 32, "q5_0": 32, "q4_0": 32, "q4_k": 256, "q5_k": 256, "q6_k": 256}
BYTES = {"q8_0": 34, "q5_0": 22, "q4_0": 18, "q4_k": 144, "q5_k": 176, "q6_k": 210}
SCALES_AT = {"q8_0": (0,), "q5_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Where the binary16 scales of a block lie: d, then dmin."""

Bytes = npt.NDArray[np.uint8]


def random_blocks(
    weight_format: str, count: int, rng: np.random.Generator, scales: str = "ordinary", codes: str = "any"
) -> Bytes:
    """Return [count, bytes] blocks.

    Args:
        scales: "ordinary" (both signs, about 1/100), "subnormal" halves, "largest" halves, or "zero".
        codes: "any", "lowest" or "highest" of everything that is an integer.
    """
    size = BYTES[weight_format]
    if codes == "any":
        blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
    else:
        blocks = np.full((count, size), 0x00 if codes == "lowest" else 0xFF, np.uint8)
        if weight_format == "q8_0":
            blocks[:] = 0x80 if codes == "lowest" else 0x7F
        if weight_format == "q6_k":
            blocks[:, 192:208] = 0x80 if rng.integers(2) else 0x7F
    for at in SCALES_AT[weight_format]:
        if scales == "ordinary":
            half = (rng.standard_normal(count) * 0.01).astype(np.float16).view(np.uint16)
        elif scales == "subnormal":
            half = rng.integers(1, 0x400, count).astype(np.uint16) | rng.choice([0, 0x8000], count).astype(
                np.uint16
            )
        elif scales == "largest":
            half = np.full(count, 0x7BFF, np.uint16)
        else:
            half = rng.choice([0, 0x8000], count).astype(np.uint16)
        blocks[:, at : at + 2] = half.astype("<u2").view(np.uint8).reshape(count, 2)
    return blocks


@dataclass(frozen=True)
class Block:
    """Weight i is d * scales[sub] * codes[i] - dmin * mins[sub]; formats of 32 have one scale of 1."""

    d: int
    """Bits of a binary16."""
    dmin: int
    scales: tuple[int, ...]
    mins: tuple[int, ...]
    codes: tuple[int, ...]
    """Signed: the format's offset is taken off."""


def parse_block(weight_format: str, raw: bytes) -> Block:
    """Spell out one block."""
    return _PARSERS[weight_format](raw)


def _half(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 2], "little")


def _q8_0(raw: bytes) -> Block:
    return Block(_half(raw, 0), 0, (1,), (0,), tuple(b - 256 if b > 127 else b for b in raw[2:]))


def _q5_0(raw: bytes) -> Block:
    fifth = int.from_bytes(raw[2:6], "little")
    nibbles = [b & 15 for b in raw[6:]] + [b >> 4 for b in raw[6:]]
    codes = (n + 16 * (fifth >> i & 1) - 16 for i, n in enumerate(nibbles))
    return Block(_half(raw, 0), 0, (1,), (0,), tuple(codes))


def _q4_0(raw: bytes) -> Block:
    nibbles = [b & 15 for b in raw[2:]] + [b >> 4 for b in raw[2:]]
    return Block(_half(raw, 0), 0, (1,), (0,), tuple(n - 8 for n in nibbles))


def _six_bits(s: bytes) -> tuple[tuple[int, ...], tuple[int, ...]]:
    scales = [b & 63 for b in s[0:4]] + [(s[8 + j] & 15) + (s[j] >> 6) * 16 for j in range(4)]
    mins = [b & 63 for b in s[4:8]] + [(s[8 + j] >> 4) + (s[4 + j] >> 6) * 16 for j in range(4)]
    return tuple(scales), tuple(mins)


def _runs_of_nibbles(raw: bytes) -> list[int]:
    # 32 bytes at a time: their low nibbles, then their high ones.
    codes: list[int] = []
    for at in range(0, len(raw), 32):
        codes += [b & 15 for b in raw[at : at + 32]] + [b >> 4 for b in raw[at : at + 32]]
    return codes


def _q4_k(raw: bytes) -> Block:
    scales, mins = _six_bits(raw[4:16])
    return Block(_half(raw, 0), _half(raw, 2), scales, mins, tuple(_runs_of_nibbles(raw[16:144])))


def _q5_k(raw: bytes) -> Block:
    scales, mins = _six_bits(raw[4:16])
    fifth = raw[16:48]
    codes = (n + 16 * (fifth[i % 32] >> (i // 32) & 1) for i, n in enumerate(_runs_of_nibbles(raw[48:176])))
    return Block(_half(raw, 0), _half(raw, 2), scales, mins, tuple(codes))


def _q6_k(raw: bytes) -> Block:
    codes: list[int] = []
    for half in range(2):
        low, high = raw[64 * half : 64 * half + 64], raw[128 + 32 * half : 160 + 32 * half]
        nibbles = [b & 15 for b in low] + [b >> 4 for b in low]
        codes += [n + 16 * (high[i % 32] >> (2 * (i // 32)) & 3) - 32 for i, n in enumerate(nibbles)]
    scales = tuple(b - 256 if b > 127 else b for b in raw[192:208])
    return Block(_half(raw, 208), 0, scales, (0,) * 16, tuple(codes))


_PARSERS = {"q8_0": _q8_0, "q5_0": _q5_0, "q4_0": _q4_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
