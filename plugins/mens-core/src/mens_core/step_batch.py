"""Lay a step's slices out as the one ragged batch that the model runs."""

from __future__ import annotations

from itertools import repeat

import numpy as np

from mens_core.ops import Batch
from mens_core.readout import LogitRow
from mens_core.scheduler import Slice

__all__ = ["assemble"]


def assemble(slices: list[Slice]) -> tuple[Batch, list[LogitRow]]:
    """Return the batch, and whose each row of logits will be; blocks are taken for what is written."""
    token_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    logit_rows: list[int] = []
    wanted: list[LogitRow] = []
    tables: list[list[int]] = []
    for piece in slices:
        sequence, end = piece.sequence, piece.start + piece.count
        if sequence.blocks is None:
            raise AssertionError("a planned sequence owns blocks")
        # For an answer that goes on, a block sooner than it is written: a lane may begin its next row ahead.
        ahead = int(sequence.prompt_is_cached)
        sequence.blocks.grow_to(min(end + ahead, sequence.request.positions))
        tables.append(sequence.blocks.table)
        first = len(token_ids)
        for position in range(piece.start, end):
            if sequence.wants_logits(position):
                wanted.append(LogitRow(len(wanted), sequence, position))
                logit_rows.append(first + position - piece.start)
        token_ids += sequence.tokens[piece.start : end]
        positions += range(piece.start, end)
        starts.append(len(token_ids))
    longest = max(map(len, tables))
    block_tables = np.array([[*table, *repeat(-1, longest - len(table))] for table in tables], np.int32)
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        starts=np.array(starts, np.int32),
        block_tables=block_tables,
        logit_rows=np.array(logit_rows, np.int32),
    )
    return batch, wanted
