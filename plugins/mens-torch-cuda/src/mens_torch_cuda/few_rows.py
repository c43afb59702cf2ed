"""Which tile of kernels few_rows.h, ring_rows.h, many_rows.h, warpgroup_tiles.h makes a product. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mens_core.kernel_source import GROUP
from mens_torch_cuda.tile_choice import Tile

__all__ = ["CORE_TILES", "FEW_TILES", "MANY_TILES", "coded_tile", "core_tile"]

_TILE_ROWS = 16
"""Rows that lie together in the order of their codes."""
_FEW = 64
"""Rows up to which few_rows.h and ring_rows.h are faster."""
_CHUNK = 128
_WAVE = 264
"""Groups of 32 outputs that a large GPU runs at once."""
_ENOUGH = 264
"""Groups that keep a large GPU busy: with fewer, each has fewer outputs."""


def _ring(rows: int, outputs: int, stages: int) -> Tile:
    """A tile with a ring of chunks: codes of both sides, and a scale for each 32 of them."""
    chunk = outputs * (_CHUNK + _CHUNK // 32 * 2) + rows * (_CHUNK + _CHUNK // 32 * 4)
    return Tile(f"{rows}x{outputs}", rows, outputs, shared=stages * chunk)


_RINGS = (_ring(16, 64, 4), _ring(32, 64, 5), _ring(64, 64, 4))
FEW_TILES = {
    tile.name: tile for tile in (Tile("16x32", 16, 32), Tile("32x16", 32, 16), Tile("32x32", 32, 32), *_RINGS)
}


def _many(name: str, rows: int, outputs: int, stages: int, *speeds: float, group: int = GROUP) -> Tile:
    """Of many_rows.h: a stage is a chunk of both sides, and a barrier that counts its bytes."""
    return Tile(name, rows, outputs, stages * (rows * 144 + outputs * 136 + 16), speeds, group)


MANY_TILES = {
    tile.name: tile
    for tile in (
        _many("32x32by2", 32, 32, 5, 40, 75, 105, 138, 155, group=64),
        _many("32x64by4", 32, 64, 4, 58, 115, 146, 175),
        _many("64x64by4", 64, 64, 4, 95, 150, 195),
        _many("64x64by2", 64, 64, 3, 72, 110, 150, 215, group=64),
    )
}

_STAGES = 4
CORE_TILES = {
    tile.name: tile
    for tile in (
        Tile("WarpgroupHalf", 64, 64, _STAGES * 17920, (183, 255, 290)),
        Tile("WarpgroupWide", 64, 128, _STAGES * 26624, (227, 288)),
    )
}


def core_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """The tile of codes as core matrices for these weights side by side, as measured (docs/log.md)."""
    return max(CORE_TILES.values(), key=lambda tile: tile.worth(rows, outputs))


def coded_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """The tile for these weights side by side, as measured (docs/log.md)."""
    if rows > _FEW:
        return max(MANY_TILES.values(), key=lambda tile: tile.worth(rows, outputs))
    return _few_tile(rows, outputs)


def _few_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """Where outputs are many, a ring."""
    ring = next(tile for tile in _RINGS if tile.rows >= rows)
    if ring.groups(rows, outputs) >= _ENOUGH:
        return ring
    if rows <= _TILE_ROWS:
        return FEW_TILES["16x32"]
    # More rows than one tile has: the wider one where all its groups run at once.
    wide = FEW_TILES["32x32"]
    return wide if rows > wide.rows and wide.groups(rows, outputs) <= _WAVE else FEW_TILES["32x16"]
