"""Which tile a product of several rows is made by (kernels/tiles.h, row_tiles.h, sliced.h, broad.h). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mens_core.kernel_source import GROUP

__all__ = ["BROAD_TILES", "CODE_TILES", "FLOAT_TILES", "Tile", "broad_tile", "code_tile", "float_tile"]

_MULTIPROCESSORS = 132
"""Of a large GPU."""
_ENOUGH = 264
"""Groups that keep a large GPU busy: with fewer, each has fewer rows or outputs."""
_QUAD = 4
_FEW = 96
"""Groups below which smaller ones were faster (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """What a group makes."""

    name: str
    """The end of the kernel's name."""
    rows: int
    outputs: int
    shared: int = 0
    """Bytes of shared memory that the launch gives."""
    speeds: tuple[float, ...] = ()
    """10^12 float operations a second where each multiprocessor has one group, two, ... (docs/log.md)."""
    group: int = GROUP
    """Threads of a group."""

    def worth(self, rows: int, outputs: Sequence[int]) -> float:
        """10^12 useful float operations a second, of a large GPU whose groups are spread evenly."""
        deepest = -(-self.groups(rows, outputs) // _MULTIPROCESSORS)
        turns, rest = divmod(deepest, len(self.speeds))
        took = turns * len(self.speeds) / self.speeds[-1] + (rest / self.speeds[rest - 1] if rest else 0)
        return rows * sum(outputs) / (_MULTIPROCESSORS * self.rows * self.outputs * took)

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
_BROAD_TERMS, _BROAD_GAP = 16, 4
"""Terms of a stage, and floats between two of them, of kernels/chains.h."""


def _broad(name: str, rows: int, outputs: int, *speeds: float, are_aside: bool) -> Tile:
    """Of kernels/chains.h; `are_aside`: sums of chunks lie in shared memory."""
    stages = 2 * _BROAD_TERMS * (rows + outputs + 2 * _BROAD_GAP)
    return Tile(name, rows, outputs, 4 * (stages + rows * outputs * are_aside), speeds)


def _sliced(rows: int, outputs: int, slices: int, *, folds: int) -> int:
    """Bytes of shared memory of kernels/sliced.h: a slice has two stages and a part of its sums."""
    return slices * (2 * (4 * 8 * rows + 2 * 8 * outputs) + 4 * rows * outputs // folds)


BROAD_TILES = (
    _broad("Most", 128, 128, 21, 45, are_aside=True),
    _broad("High", 128, 64, 24, 43.5, are_aside=False),
    _broad("Low", 64, 64, 26, 37.5, 41, 42, are_aside=False),
)
FLOAT_TILES = (
    Tile("8", 8, 32),
    Tile("Deep", 16, 64, _sliced(16, 64, 16, folds=2), (30,), 512),
    Tile("Wide", 32, 64, _sliced(32, 64, 8, folds=1), (35,), 256),
)


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
    """Of 16-bit weights."""
    small, deep, wide = FLOAT_TILES
    if rows > wide.rows:
        # Sums of larger tiles go out by fours.
        large: tuple[Tile, ...] = BROAD_TILES if all(count % _QUAD == 0 for count in outputs) else ()
        best: Tile = max((*large, wide, deep), key=lambda tile: tile.worth(rows, outputs))
        return best
    if rows > deep.rows and wide.groups(rows, outputs) >= _FEW:
        return wide
    return deep if rows > small.rows and deep.groups(rows, outputs) >= _FEW else small


def broad_tile(rows: int, columns: int) -> Tile:
    """Of many rows in float32."""
    return max(BROAD_TILES, key=lambda tile: tile.worth(rows, [columns]))
