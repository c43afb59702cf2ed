"""Random numbers: Philox4x32-10, a counter-based generator in pure integers.

A number is a function of a key (the seed) and a counter, and of nothing else: no state is
carried from one draw to the next, so the order of requests, steps and batches can't move a
draw. Which counter belongs to which use is fixed by the `STREAM_*` tags.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = [
    "STREAM_DROPOUT",
    "STREAM_LORA",
    "STREAM_SAMPLING",
    "STREAM_VECTORS",
    "philox",
    "philox_blocks",
    "philox_words",
    "uniform_u64",
]

STREAM_SAMPLING = 1
"""Draws of tokens: counter (position, sample, 1, 0)."""
STREAM_LORA = 2
"""First values of adapters."""
STREAM_VECTORS = 3
"""Inputs of the conformance vectors."""
STREAM_DROPOUT = 4
"""Dropout in training; the other half of its word is the number of the adapted matrix."""

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = tuple[int, int, int, int]


def philox(seed: int, counter: Words) -> Words:
    """Return the four 32-bit words of one counter.

    Args:
        seed: 64 bits; the low half is the first word of the key.
        counter: four 32-bit words.

    Raises:
        ValueError: a number does not fit its bits.
    """
    if not 0 <= seed < 1 << 64 or not all(0 <= word <= _MASK for word in counter):
        raise ValueError(f"seed {seed} is not 64-bit or counter {counter} is not four 32-bit words")
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def uniform_u64(seed: int, counter: Words) -> int:
    """Return 64 random bits: word 1 is the high half, word 0 the low one."""
    low, high, _, _ = philox(seed, counter)
    return high << 32 | low


def philox_words(seed: int, stream: int, sample: int, count: int) -> npt.NDArray[np.uint32]:
    """Return `count` words of the counters (0, sample, stream, 0), (1, sample, stream, 0), ... in order."""
    blocks = philox_blocks(seed, np.arange(-(-count // 4), dtype=np.uint64), (sample, stream, 0))
    return blocks.reshape(-1)[:count]


def philox_blocks(
    seed: int, first: npt.NDArray[np.uint64], others: tuple[int, int, int]
) -> npt.NDArray[np.uint32]:
    """Return the four words [n, 4] of each counter (first[i], *others)."""
    mask, half = np.uint64(_MASK), np.uint64(32)
    c0 = first
    c1, c2, c3 = (np.full(len(first), word, np.uint64) for word in others)
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(_ROUNDS):
        # 32-bit times 32-bit fits 64 bits, so the products are exact.
        p0, p1 = np.uint64(_MULTIPLIER_0) * c0, np.uint64(_MULTIPLIER_1) * c2
        c0, c1 = (p1 >> half) ^ c1 ^ np.uint64(k0), p1 & mask
        c2, c3 = (p0 >> half) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)
