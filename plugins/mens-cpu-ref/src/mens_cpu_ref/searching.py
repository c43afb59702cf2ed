"""The greatest output of a matrix in halves, found without most of its lower half (native/quant_abi.h).

It is the `argmax` of `linear`, whatever is looked at; only the time depends on how far the greatest output
stands out. Where most outputs come near it, all are computed sooner, and for a while nothing else is tried.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_cpu_ref import quantised
from mens_cpu_ref.arrays import address_of
from mens_cpu_ref.quantised import Functions, QuantisedMatrix

__all__ = ["Search"]

_MOST_ROWS = 4
"""With more rows of x, bounds are more work than reading all of W is, which rows share (docs/log.md)."""
_WORTHWHILE = 0.1
"""Of the matrix's groups of 16 outputs: where more were searched, over all rows, all outputs are quicker."""
_LONGEST_PAUSE = 64
_ALIGNMENT = 64


class Search:
    """Searches the matrices of one lane."""

    def __init__(self, functions: Functions) -> None:
        self._choose = functions.get("quant_choose")
        self._bytes = functions.get("quant_choose_bytes")
        self._memory: dict[tuple[int, int, int], tuple[npt.NDArray[np.uint8], int]] = {}
        self._pause = 0
        self._paused_for = 0
        self.searched = np.zeros(1, np.int64)
        """Groups whose outputs the last search computed, over all rows."""

    def greatest(self, x: npt.NDArray[np.float32], weight: QuantisedMatrix) -> npt.NDArray[np.int32] | None:
        """Return the id of the greatest output of each row of x [N, columns], the lowest of equals.

        None: compute all outputs. That is so for a matrix that does not lie in halves, for many rows, for
        values that can't be bounded, and for some calls after one in which too much was searched.
        """
        rows = len(x)
        if self._choose is None or weight.number != quantised.UPPER or rows > _MOST_ROWS:
            return None
        if self._paused_for:
            self._paused_for -= 1
            return None
        ids = np.empty(rows, np.int32)
        memory = self._working_memory(weight, rows)
        code = self._choose(
            weight.address,
            weight.rows,
            weight.columns,
            address_of(x),
            rows,
            memory,
            address_of(ids),
            address_of(self.searched),
        )
        quantised.check_memory(code, "looking for the greatest output")
        # In Python's own numbers: numpy's code for a smallest one has left the caches once the weights were
        # read, and took 2 % of a step.
        if min(ids.tolist()) < 0:
            return None
        self._take_note(self.searched.item() > _WORTHWHILE * (weight.rows / 16))
        return ids

    def _take_note(self, was_long: bool) -> None:
        self._pause = min(_LONGEST_PAUSE, max(1, 2 * self._pause)) if was_long else 0
        self._paused_for = self._pause

    def _working_memory(self, weight: QuantisedMatrix, rows: int) -> int:
        """Address of what a search works in: kept, since new memory would cost as much as a tenth of one."""
        shape = (weight.rows, weight.columns, rows)
        kept = self._memory.get(shape)
        if kept is None:
            assert self._bytes is not None
            memory = np.empty(self._bytes(*shape) + _ALIGNMENT, np.uint8)
            address = -(-address_of(memory) // _ALIGNMENT) * _ALIGNMENT
            kept = self._memory[shape] = (memory, address)
        return kept[1]
