"""Make batches as the engine would: rows of several sequences, blocks handed out by need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mens_core.ops import BLOCK, Batch


class Sequences:
    """Positions and KV blocks of sequences that grow; blocks are interleaved on purpose."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead`: positions behind the last one for which there is a block already."""
        self._ahead = ahead
        self._length: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._next = 0

    def step(self, rows: Sequence[tuple[int, Sequence[int]]], *, all_logits: bool = False) -> Batch:
        """Append token ids to sequences: [(sequence, token ids), ...]; logits of each last row, or all."""
        token_ids: list[int] = []
        positions: list[int] = []
        starts, tables, last = [0], [], []
        for sequence, ids in rows:
            begin = self._length.get(sequence, 0)
            end = begin + len(ids)
            blocks = self._blocks.setdefault(sequence, [])
            while len(blocks) * BLOCK < end + self._ahead:
                blocks.append(self._next)
                self._next += 1
            token_ids += ids
            positions += range(begin, end)
            starts.append(len(token_ids))
            last.append(len(token_ids) - 1)
            tables.append(list(blocks))
            self._length[sequence] = end
        width = max(map(len, tables))
        return Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=np.array(positions, np.int32),
            starts=np.array(starts, np.int32),
            block_tables=np.array([t + [-1] * (width - len(t)) for t in tables], np.int32),
            logit_rows=np.array(range(len(token_ids)) if all_logits else last, np.int32),
        )
