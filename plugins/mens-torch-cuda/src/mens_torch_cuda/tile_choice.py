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
_QUAD, _CHUNK = 4, 128
_ROWS = 32
"""Rows of the largest tile of several."""
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
    slices: int = 1
    """Chunks of 128 columns that a group makes at once; with fewer, some of its lanes have nothing to do."""

    def worth(self, rows: int, outputs: Sequence[int], columns: int = _CHUNK) -> float:
        """10^12 useful float operations a second, of a large GPU whose groups are spread evenly."""
        deepest = -(-self.groups(rows, outputs) // _MULTIPROCESSORS)
        turns, rest = divmod(deepest, len(self.speeds))
        took = turns * len(self.speeds) / self.speeds[-1] + (rest / self.speeds[rest - 1] if rest else 0)
        chunks = -(-columns // _CHUNK)
        full = chunks / (-(-chunks // self.slices) * self.slices)
        return full * rows * sum(outputs) / (_MULTIPROCESSORS * self.rows * self.outputs * took)

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
_WARPS = 8
"""Of a group of kernels/sliced.h."""
_BROAD_TERMS, _BROAD_GAP = 16, 4
"""Terms of a stage, and floats between two of them, of kernels/chains.h."""


def _broad(name: str, rows: int, outputs: int, *speeds: float, are_aside: bool) -> Tile:
    """Of kernels/chains.h; `are_aside`: sums of chunks lie in shared memory."""
    stages = 2 * _BROAD_TERMS * (rows + outputs + 2 * _BROAD_GAP)
    return Tile(name, rows, outputs, 4 * (stages + rows * outputs * are_aside), speeds)


def _sliced(name: str, rows: int, outputs: int, speed: float, *, parts: int, folds: int) -> Tile:
    """Of kernels/sliced.h: each of the `parts` of eight warps has two stages, and some of its sums."""
    slices, stage = _WARPS * parts, 4 * (8 * rows + 4 * outputs + 16 + 8)
    shared = slices * (2 * stage + 4 * rows * outputs // folds)
    return Tile(name, rows, outputs, shared, (speed,), 32 * _WARPS, slices)


BROAD_TILES = (
    _broad("Most", 128, 128, 21, 45, are_aside=True),
    _broad("High", 128, 64, 24, 43.5, are_aside=False),
    _broad("Low", 64, 64, 26, 37.5, 41, 42, are_aside=False),
)
FLOAT_TILES = (
    Tile("8", 8, 32),
    _sliced("Deep", 16, 64, 32, parts=2, folds=2),
    _sliced("Even", 32, 48, 34, parts=2, folds=3),
    _sliced("Wide", 32, 64, 37.5, parts=2, folds=4),
    _sliced("Short", 32, 64, 36, parts=1, folds=1),
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


def float_tile(rows: int, outputs: Sequence[int], columns: int) -> Tile:
    """Of 16-bit weights."""
    small, *sliced = FLOAT_TILES
    if rows <= small.rows:
        return small
    # Sums of larger tiles go out by fours.
    can_be_large = rows > _ROWS and all(count % _QUAD == 0 for count in outputs)
    tiles = (*(BROAD_TILES if can_be_large else ()), *sliced)
    best: Tile = max(tiles, key=lambda tile: tile.worth(rows, outputs, columns))
    return best if rows > _ROWS or best.groups(rows, outputs) >= _FEW else small


def broad_tile(rows: int, columns: int) -> Tile:
    """Of many rows in float32."""
    return max(BROAD_TILES, key=lambda tile: tile.worth(rows, [columns]))
