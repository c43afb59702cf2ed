"""The operators on an Apple GPU: the grid kernels, and for few rows those that share an output's chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_core.grid_device import Buffer, constants
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridKvCache, GridOps, GridRotaryTable, GridTensor
from mens_core.kernel_source import GROUP
from mens_core.ops import Batch, Fault, ServedStep, rows_of_batch
from mens_core.rotary_blocks import make_angles
from mens_core.wishes import Reading, Wish
from mens_torch_mps.matrices import TILE
from mens_torch_mps.one_read import PENALISING, SCORING, Places, by_wish, readings
from mens_torch_mps.rotary import QueuedRotaryTable

if TYPE_CHECKING:
    from mens_torch_mps.device import MpsDevice

__all__ = ["MpsOps"]

_FEW_ROWS = 4
"""A step of more rows has threads enough with one per output and row."""
_SIDE = 8
"""Of a SIMD-group matrix: a sum that is not whole sides is left to the scalar kernels."""
_MATRIX_ROWS = 8
"""Fewer rows would leave most of a matrix empty."""


class MpsOps(GridOps):
    """Grid kernels on a GPU; rotary tables are made on the host by integers."""

    def __init__(
        self, device: MpsDevice, *, simd_width: int, uses_matrices: bool, facts: Mapping[str, Any]
    ) -> None:
        """Take a device and the threads of its SIMD groups, which divide a group.

        `uses_matrices`: whether a probe found that the GPU's matrices add as the rules say.
        """
        super().__init__(device, make_angles)
        self._memory = device
        self.simd_width, self.uses_matrices = simd_width, uses_matrices
        self._outputs_of_group = GROUP // simd_width
        self._facts = dict(facts)

    def facts(self) -> dict[str, Any]:
        """Device, compiler and kernels."""
        return self._facts

    # --- steps ---------------------------------------------------------------------------------

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> GridRotaryTable:
        """Return a table that grows with the commands."""
        return QueuedRotaryTable(self._memory, self._make_angles, frequencies, attention_factor)

    def run_and_read(
        self, step: ServedStep, batch: Batch, cache: GridKvCache, wishes: Sequence[Wish]
    ) -> tuple[GridTensor | None, list[Fault], list[Reading]]:
        """A whole step and what is read of its logits; submitted once, and waited for once."""
        self._uploaded.clear()
        self._watched = RowFlags(self._device)  # not those of a step that was given up half-way
        hidden = step.hidden(self, batch, cache)
        bounds = [self._watched.calls]
        logits = None
        if len(batch.logit_rows):
            logits = step.logits(self, self.take_rows(hidden, batch.logit_rows), batch, cache)
        bounds.append(self._watched.calls)
        places = self._queue_reading(logits, wishes)
        found = self._device.get(places.whole, np.uint8, (places.nbytes,))
        parts = self._watched.parts()
        flags = [
            found[at : at + 4 * count].view(np.int32)
            for at, (_, count) in zip(places.flags_at, parts, strict=True)
        ]
        of_hidden, of_head, of_reading = self._watched.read(flags, *bounds)
        self._watched = RowFlags(self._device)
        self._uploaded.clear()
        faults = of_hidden + rows_of_batch(of_head, batch)
        rows = {row for fault in faults for row in fault.rows}
        spoiled = {i for i, wish in enumerate(wishes) if int(batch.logit_rows[wish.row]) in rows}
        return logits, faults, readings(places, wishes, found, by_wish(of_reading, wishes), spoiled)

    def run_step(
        self, step: ServedStep, batch: Batch, cache: GridKvCache
    ) -> tuple[GridTensor | None, list[Fault]]:
        """A whole step, of whose logits nothing is read."""
        logits, faults, _ = self.run_and_read(step, batch, cache, ())
        return logits, faults

    def _queue_reading(self, logits: GridTensor | None, wishes: Sequence[Wish]) -> Places:
        """Queue what is wished of the logits, and the flags; `readings` takes apart where they lie."""
        rows, width = (0, 0) if logits is None else logits.shape
        of_scores = self._flags(SCORING, sum(wish.is_scored for wish in wishes))
        of_penalties = self._flags(PENALISING, rows)
        parts = self._watched.parts()
        places = Places.reserve(self._device, wishes, rows, width, [end for _, end in parts])
        if logits is not None:
            self._queue_scores(logits, wishes, places, of_scores)
            self._queue_penalties(logits, wishes, of_penalties)
            self._queue_choice(logits, wishes, places)
        for (buffer, end), at in zip(parts, places.flags_at, strict=True):
            used, out = self._device.part(buffer, 0, 4 * end), self._device.part(places.whole, at, 4 * end)
            self._run("vox_copy_words", (used, out), constants(end), (end, 1))
        return places

    def _queue_scores(
        self, logits: GridTensor, wishes: Sequence[Wish], places: Places, flags: Buffer
    ) -> None:
        count, width = len(places.scored), places.width
        if not count:
            return
        ids = self._ints(np.array([wishes[i].row for i in places.scored], np.int32))
        scores = self._device.part(places.whole, places.scores_at, 4 * count * width)
        normalisers = self._device.part(places.whole, places.normalisers_at, 4 * count)
        self._run("vox_take_rows", (logits.buffer, ids, scores), constants(width), (width, count))
        self._run("vox_log_normaliser", (scores, normalisers, flags), constants(width), (count * GROUP, 1))

    def _queue_penalties(self, logits: GridTensor, wishes: Sequence[Wish], flags: Buffer) -> None:
        for wish in wishes:
            if wish.penalty is not None:
                self._queue_penalty(logits, wish.row, *wish.penalty, flags)

    def _queue_choice(self, logits: GridTensor, wishes: Sequence[Wish], places: Places) -> None:
        rows, width = logits.shape
        if any(wish.is_chosen and wish.draw is None for wish in wishes):
            highest = self._device.part(places.whole, places.highest_at, 4 * rows)
            self._run("vox_argmax", (logits.buffer, highest), constants(width), (rows * GROUP, 1))
        if not places.drawn:
            return
        most = self._new(rows, 1).buffer
        self._run("vox_row_max", (logits.buffer, most), constants(width), (rows * GROUP, 1))
        for number in places.drawn:
            out = self._device.part(places.whole, *places.weights_of(number))
            args = constants(width, wishes[number].row, float(wishes[number].temperature))
            self._run("vox_token_weights", (logits.buffer, most, out), args, (width, 1))

    # --- products --------------------------------------------------------------------------------

    def _launch_linear(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        if rows >= _MATRIX_ROWS and self.uses_matrices and weight.block == 0 and weight.columns % _SIDE == 0:
            return self._linear_by_matrices(activations, rows, weight, name)
        if rows > _FEW_ROWS:
            return super()._launch_linear(activations, rows, weight, name)
        return self._rows(
            f"vox_chunked_{weight.format}",
            (*activations, weight.buffer),
            (rows, weight.rows),
            constants(weight.rows, weight.columns),
            name,
            across=-(-weight.rows // self._outputs_of_group) * GROUP,
        )

    def _linear_by_matrices(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        out = self._new(rows, weight.rows)
        self._run(
            f"vox_matrices_{weight.format}",
            (*activations, weight.buffer, out.buffer, self._flags(name, rows)),
            constants(rows, weight.columns, weight.rows, 0, weight.columns),
            (-(-weight.rows // TILE) * GROUP, -(-rows // TILE)),
        )
        return out
