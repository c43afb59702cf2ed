"""A model whose every answer depends on every number in the cache, made of integers: quick, and exact.

What is kept of a position is mixed from what is kept of the one before, as deeper layers do, and the logits
from all of it. So a block of other tokens, of the same tokens behind others, of another adapter, or one that
was written over in the meantime shows in the next token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lanes.toy_model import VOCAB, ToyLane, matrix
from mens_core.models.model import RowFault, StepResult
from mens_core.ops import BLOCK, Batch
from mens_core.wishes import Reading, read_logits
from vox_plugin_api.backend import BackendError

_MIX, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_LOGITS = matrix(11, 1021, VOCAB) * np.float32(3)
_WEIGHTS = np.arange(1, 8 * BLOCK + 1, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95) | np.uint64(1)


def new_cache(blocks: int) -> np.ndarray:
    return np.full((blocks, BLOCK), 0xBAD, np.uint64)


@dataclass
class ChainModel:
    """What the engine needs of a model. `adapter` changes all that is kept."""

    adapter: int = 0
    poison: int | None = None
    """A token id whose row is not finite."""
    most_rows: int | None = None
    """A step of more is refused, after some of it was written: the device has no room."""
    lane: ToyLane = field(default_factory=ToyLane)

    def forward(self, batch: Batch, cache: np.ndarray, wishes=()) -> StepResult:
        starts, positions = batch.starts.tolist(), batch.positions.tolist()
        ids = batch.token_ids.tolist()
        refuses = self.most_rows is not None and len(ids) > self.most_rows
        faults = []
        for table, first, last in zip(batch.block_tables, starts, starts[1:], strict=False):
            at = positions[first]
            kept = int(cache[table[(at - 1) // BLOCK], (at - 1) % BLOCK]) if at else self.adapter
            for row in range(first, last):
                kept = (kept * _MIX + ids[row] + 1) & _WORD
                kept ^= kept >> 29
                position = positions[row]
                cache[table[position // BLOCK], position % BLOCK] = kept ^ refuses
                if ids[row] == self.poison:
                    faults.append(RowFault(row, "embed"))
        if refuses:
            raise BackendError("out-of-device-memory", "no room", facts={"rows": len(ids)})
        rows = batch.logit_rows.tolist()
        logits = np.array([self._logits(batch, cache, row) for row in rows], np.float32).reshape(-1, VOCAB)
        spoiled = {fault.row for fault in faults}
        left = [wish for wish in wishes if rows[wish.row] not in spoiled]
        read = dict(zip([wish.row for wish in left], read_logits(self.lane, logits, left), strict=True))
        return StepResult(logits, tuple(faults), tuple(read.get(wish.row, Reading()) for wish in wishes))

    def _logits(self, batch: Batch, cache: np.ndarray, row: int) -> np.ndarray:
        sequence = int(np.searchsorted(batch.starts, row, side="right")) - 1
        seen = int(batch.positions[row]) + 1
        table = batch.block_tables[sequence, : -(-seen // BLOCK)]
        assert (table >= 0).all()
        kept = cache[table].reshape(-1)[:seen]
        mixed = int((kept * _WEIGHTS[:seen]).sum(dtype=np.uint64))
        return _LOGITS[(mixed >> 20) % len(_LOGITS)]
