"""What choosing a token needs of a row of logits, over the grid kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, constants
from mens_core.grid_launches import GridLaunches
from mens_core.grid_tensors import GridTensor
from mens_core.kernel_source import GROUP
from mens_core.ops import Ints

__all__ = ["GridChoosing"]


class GridChoosing(GridLaunches):
    """The operators of `Ops` that read logits."""

    def penalise(
        self,
        logits: GridTensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        """Change one row in place."""
        flags = self._flags("penalise", logits.shape[0])
        self._queue_penalty(logits, row, token_ids, repetition, subtract, flags)

    def _queue_penalty(
        self,
        logits: GridTensor,
        row: int,
        token_ids: Ints,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
        flags: Buffer,
    ) -> None:
        """`penalise`, with the flags of all rows."""
        count, width = len(token_ids), logits.shape[1]
        if not count == len(repetition) == len(subtract):
            raise ValueError(f"{count} ids, {len(repetition)} and {len(subtract)} penalties")
        if count and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < width:
            raise IndexError(f"penalise: a token id is not in [0, {width})")
        factors = self._device.put(np.ascontiguousarray(repetition, np.float32))
        offsets = self._device.put(np.ascontiguousarray(subtract, np.float32))
        self._run(
            "vox_penalise",
            (logits.buffer, self._ints(token_ids), factors, offsets, flags),
            constants(width, row, count),
            (count, 1),
        )

    def argmax(self, logits: GridTensor) -> Ints:
        """Highest logit of each row, the lowest id on ties."""
        rows, width = logits.shape
        out = self._device.empty(4 * rows)
        self._run("vox_argmax", (logits.buffer, out), constants(width), (rows * GROUP, 1))
        return self._device.get(out, np.int32, (rows,))

    def token_weights(self, logits: GridTensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        """floor(exp((x - max) / T) * 2^32) of one row."""
        rows, width = logits.shape
        most, out = self._device.empty(4 * rows), self._device.empty(8 * width)
        self._run("vox_row_max", (logits.buffer, most), constants(width), (rows * GROUP, 1))
        self._run(
            "vox_token_weights",
            (logits.buffer, most, out),
            constants(width, row, float(temperature)),
            (width, 1),
        )
        return self._device.get(out, np.uint64, (width,))

    def log_normaliser(self, logits: GridTensor) -> npt.NDArray[np.float32]:
        """m + log(sum of exp(x - m)) of each row."""
        rows, width = logits.shape
        out = self._device.empty(4 * rows)
        self._run(
            "vox_log_normaliser",
            (logits.buffer, out, self._flags("log_normaliser", rows)),
            constants(width),
            (rows * GROUP, 1),
        )
        return self._device.get(out, np.float32, (rows,))
