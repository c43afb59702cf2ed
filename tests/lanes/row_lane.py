"""The numpy lane, one row at a time: a row's bits depend on nothing but the row.

Numpy sums a product of matrices in an order that moves with their sizes. This lane is for tests
that compare bits between batches; its bits are its own, not the numerics'.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lanes.numpy_lane import F32, Array, Cache, NumpyLane
from mens_core.ops import AttentionSpec, Batch


class RowLane(NumpyLane):
    def linear(self, x: Array, weight: Array, *, name: str) -> Array:
        y = np.array([(weight * row).sum(axis=1, dtype=F32) for row in x], F32)
        return self._checked(name, y.reshape(len(x), len(weight)))

    def attention(
        self, q: Array, cache: Cache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Array:
        before = list(self._faults)
        rows = [
            super(RowLane, self).attention(q[i : i + 1], cache, layer, one, spec, name=name)
            for i, one in enumerate(_rows(batch))
        ]
        self._faults = before  # those of the single rows all say row 0
        return self._checked(name, np.concatenate(rows))


def _rows(batch: Batch) -> Iterator[Batch]:
    for s in range(len(batch.starts) - 1):
        for row in range(int(batch.starts[s]), int(batch.starts[s + 1])):
            yield Batch(
                token_ids=batch.token_ids[row : row + 1],
                positions=batch.positions[row : row + 1],
                starts=np.array([0, 1], np.int32),
                block_tables=batch.block_tables[s : s + 1],
                logit_rows=np.array([], np.int32),
            )
