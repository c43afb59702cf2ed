"""Which products of a few rows with int8 codes are made in the order of tiles, and by which tile. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from mens_torch_cuda.tile_choice import Tile

__all__ = ["FEW_TILES", "TILE_ROWS", "few_tile", "is_few"]

TILE_ROWS = 16
"""Rows that lie together in the order of its codes."""
_FEWEST, _MOST = 2, 64
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


def is_few(rows: int, columns: int) -> bool:
    """Whether codes of such an input lie in the order of tiles, and its products are made there."""
    return _FEWEST <= rows <= _MOST and columns % _CHUNK == 0


def few_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """The tile for these weights side by side, as measured (docs/log.md): where outputs are many, a ring."""
    ring = next(tile for tile in _RINGS if tile.rows >= rows)
    if ring.groups(rows, outputs) >= _ENOUGH:
        return ring
    if rows <= TILE_ROWS:
        return FEW_TILES["16x32"]
    # More rows than one tile has: the wider one where all its groups run at once.
    wide = FEW_TILES["32x32"]
    return wide if rows > wide.rows and wide.groups(rows, outputs) <= _WAVE else FEW_TILES["32x16"]
