"""In which order a tensor's int8 codes lie in memory, by who multiplies them (kernels/between.h). Pure."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Order", "order_of", "room_of"]

_CHUNK = 128
_FEWEST = 2
_FEWEST_OF_CORES = 65
"""Rows from which on a warpgroup's matrices, of 64 rows, are worth it."""


class Order(IntEnum):
    """As kernels are told."""

    ROWS = 1
    """Row by row."""
    TILES = 2
    """What a lane of a warp multiplies of sixteen rows and a block lies together."""
    CORES = 3
    """Sixteen columns of eight rows lie together, as of weights."""


_HIGH = {Order.ROWS: 1, Order.TILES: 16, Order.CORES: 64}
"""Rows that there is room for are a multiple of this."""


def order_of(rows: int, columns: int, *, has_warpgroups: bool) -> Order:
    """The order for products of such an input, on a device that multiplies by warpgroups or does not."""
    if rows < _FEWEST or columns % _CHUNK:
        return Order.ROWS
    return Order.CORES if has_warpgroups and rows >= _FEWEST_OF_CORES else Order.TILES


def room_of(rows: int, order: Order) -> int:
    """Rows that there must be room for."""
    return -(-rows // _HIGH[order]) * _HIGH[order]
