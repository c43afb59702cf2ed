"""Which tile a product of several rows is made by (kernels/tiles.h, kernels/row_tiles.h). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SMALL", "TILES", "Tile", "code_tile", "float_tile"]

_ENOUGH = 264
"""Groups that keep a large GPU busy: with fewer, each has fewer rows or outputs."""
_FEW = 96
"""Groups below which more of half the size are the faster ones."""


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


TILES = (Tile("16", 16, 32), Tile("32", 32, 32), Tile("Wide", 32, 64), Tile("Many", 64, 64))
SMALL = Tile("8", 8, 32)
"""Those of int8 codes are `TILES`; those of 16-bit weights are `SMALL` and all but the last."""


def code_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """Of int8 codes: the widest with groups enough."""
    small, plain, wide, many = TILES
    if rows <= small.rows:
        return small
    if rows > wide.rows:
        return many if many.groups(rows, outputs) >= _ENOUGH else wide
    return wide if wide.groups(rows, outputs) >= _FEW else plain


def float_tile(rows: int, outputs: Sequence[int]) -> Tile:
    """Of 16-bit weights: the widest with groups enough."""
    small, plain, wide, _ = TILES
    for tile in (SMALL, small):
        if rows <= tile.rows:
            return tile
    return wide if wide.groups(rows, outputs) >= _FEW else plain
