"""Attention of whole sequences by kernels/pairs.h: products over pairs, of some heads at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mens_core.grid_device import constants
from mens_core.ops import AttentionSpec, Batch, Ints

__all__ = [
    "Piece",
    "are_whole",
    "channel_groups",
    "key_groups",
    "longest_of",
    "pair_bytes",
    "pair_constants",
    "pair_tiles",
    "pieces",
    "stride_of",
]

MOST_BYTES = 1 << 30
"""Of P and dS at once."""
_HIGH, _WIDE = 64, 64
"""Rows of a group, and its keys or channels; whole groups make a block of positions."""
_QUAD = 4


class Piece(NamedTuple):
    """Heads whose P and dS are there together: query head `number` of so many key/value heads."""

    first: int
    together: int
    number: int
    is_last: bool


def are_whole(batch: Batch) -> bool:
    """Whether every sequence's rows are its positions from 0 on."""
    lengths = np.diff(batch.starts)
    return np.array_equal(
        batch.positions, np.arange(len(batch.positions)) - np.repeat(batch.starts[:-1], lengths)
    )


def longest_of(batch: Batch) -> int:
    """Rows of the longest sequence."""
    return int(np.diff(batch.starts).max(initial=0))


def pair_constants(rows: int, longest: int, spec: AttentionSpec, piece: Piece) -> bytes:
    """Return PairsArgs of kernels/pairs.h."""
    return constants(
        *(rows, spec.heads, spec.kv_heads, spec.head_dim, spec.window or 0, stride_of(longest)),
        *(piece.first, piece.together, piece.number, int(piece.is_last)),
        float(spec.scale),
        float(spec.softcap or 0.0),
    )


def pair_tiles(batch: Batch) -> Ints:
    """Return [tiles][first row, rows, the sequence's first row, its length]."""
    tiles = [
        (first, min(_HIGH, int(end) - first), int(begin), int(end - begin))
        for begin, end in zip(batch.starts, batch.starts[1:], strict=False)
        for first in range(int(begin), int(end), _HIGH)
    ]
    return np.array(tiles, np.int32).reshape(-1, 4)


def stride_of(longest: int) -> int:
    """Floats of a row of P."""
    return -(-longest // _QUAD) * _QUAD


def pair_bytes(kv_heads: int, rows: int, longest: int) -> int:
    """Bytes of P and dS at once; 0 where those of one head are too many."""
    of_head = 2 * 4 * rows * stride_of(longest)
    return of_head * min(kv_heads, MOST_BYTES // of_head) if of_head else 0


def pieces(spec: AttentionSpec, rows: int, longest: int) -> Iterator[Piece]:
    """Yield the pieces, those of one key/value head in the order of its query heads; none: too much."""
    of_head = 2 * 4 * rows * stride_of(longest)
    together = pair_bytes(spec.kv_heads, rows, longest) // of_head if of_head else 0
    if together:
        sharing = spec.heads // spec.kv_heads
        for first in range(0, spec.kv_heads, together):
            some = min(together, spec.kv_heads - first)
            for number in range(sharing):
                yield Piece(first, some, number, number + 1 == sharing)


def key_groups(longest: int) -> int:
    """Groups that the keys of the longest sequence take."""
    return -(-longest // _WIDE)


def channel_groups(head_dim: int) -> int:
    """Groups that a head's channels take."""
    return -(-head_dim // _WIDE)
