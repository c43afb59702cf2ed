"""Which products of a few rows with int8 codes kernels/few_rows.h makes, and by which of its tiles. Pure."""

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
_HEAD = 65536
"""Outputs from which on each warp had better go through all columns."""
FEW_TILES = {
    tile.name: tile
    for tile in (
        *(Tile("16x32", 16, 32), Tile("16x128", 16, 128)),
        *(Tile("32x16", 32, 16), Tile("32x32", 32, 32), Tile("32x128", 32, 128)),
    )
}


def is_few(rows: int, columns: int) -> bool:
    """Whether codes of such an input lie in the order of tiles, and its products are made there."""
    return _FEWEST <= rows <= _MOST and columns % _CHUNK == 0


def few_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """The tile for these weights side by side, as measured (docs/log.md)."""
    high, wide = 16 if rows <= TILE_ROWS else 32, 32
    if sum(outputs) >= _HEAD:
        wide = 128
    elif high == 32:
        groups = FEW_TILES["32x32"].groups(rows, outputs)
        # More rows than one tile has: the wider one where all its groups run at once, or come in many waves.
        wide = 32 if rows > high and (groups <= _WAVE or groups > 4 * _WAVE) else 16
    return FEW_TILES[f"{high}x{wide}"]
