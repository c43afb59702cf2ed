"""Which tile a product of several rows is made by (kernels/tiles.h, kernels/row_tiles.h). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CODE_TILES", "FLOAT_TILES", "Tile", "code_tile", "float_tile"]

_ENOUGH = 264
"""Groups that keep a large GPU busy: with fewer, each has fewer rows or outputs."""
_FEW = 96
_MANY = 256
"""Groups below which smaller ones were faster (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a group makes."""

    name: str
    """The end of the kernel's name."""
    rows: int
    outputs: int

    def groups(self, rows: int, outputs: Sequence[int]) -> int:
        """Groups of a product with these weights side by side."""
        return -(-rows // self.rows) * sum(-(-count // self.outputs) for count in outputs)


CODE_TILES = {
    tile.name: tile
    for tile in (
        Tile("16", 16, 32),
        Tile("32", 32, 32),
        Tile("Thin", 32, 16),
        Tile("Wide", 32, 64),
        Tile("Many", 64, 64),
    )
}
FLOAT_TILES = (Tile("8", 8, 32), Tile("16", 16, 64), Tile("32", 32, 64))


def code_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """Of int8 codes."""
    wide, many = CODE_TILES["Wide"], CODE_TILES["Many"]
    if rows <= 16:
        return CODE_TILES["16"]
    if rows > wide.rows:
        return many if many.groups(rows, outputs) >= _ENOUGH else wide
    if wide.groups(rows, outputs) >= _ENOUGH:
        return wide
    plain = CODE_TILES["32"]
    return plain if plain.groups(rows, outputs) >= _FEW else CODE_TILES["Thin"]


def float_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """Of 16-bit weights: the largest that has rows enough and groups enough."""
    small, middle, large = FLOAT_TILES
    if rows > middle.rows and large.groups(rows, outputs) >= _MANY:
        return large
    return middle if rows > small.rows and middle.groups(rows, outputs) >= _FEW else small
