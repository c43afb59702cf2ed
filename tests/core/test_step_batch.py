"""A step's batch: rows, tables and wanted logits, as the slices say; and what is read of it in time."""

from __future__ import annotations

import numpy as np

from mens_core.engine import Engine
from mens_core.kv_blocks import BlockPool
from mens_core.models.model import RowFault, StepResult
from mens_core.ops import BLOCK
from mens_core.scheduler import Slice
from mens_core.sequence import Sequence, SequenceRequest
from mens_core.step_batch import assemble
from mens_core.wishes import Reading


def test_a_batch_is_its_slices_in_order():
    pool = BlockPool(8)
    answer = Sequence(SequenceRequest(token_ids=(5, 6, 7), max_tokens=4))
    prompt = Sequence(SequenceRequest(token_ids=tuple(range(300)), max_tokens=1))
    for sequence in (answer, prompt):
        sequence.blocks = pool.reserve(3)
    answer.tokens.append(9)
    batch, wanted = assemble([Slice(answer, 3, 1), Slice(prompt, 0, BLOCK + 2), Slice(prompt, 298, 2)])
    assert batch.token_ids.tolist() == [9, *range(BLOCK + 2), 298, 299]
    assert batch.positions.tolist() == [3, *range(BLOCK + 2), 298, 299]
    assert batch.starts.tolist() == [0, 1, BLOCK + 3, BLOCK + 5]
    assert batch.block_tables.tolist() == [[0, -1, -1], [1, 2, 3], [1, 2, 3]]
    assert batch.logit_rows.tolist() == [0, BLOCK + 4]
    assert [(row.index, row.sequence, row.position) for row in wanted] == [(0, answer, 3), (1, prompt, 299)]
    arrays = (batch.token_ids, batch.positions, batch.starts, batch.block_tables, batch.logit_rows)
    assert all(array.dtype == np.int32 for array in arrays)


def test_an_answer_that_goes_on_has_a_block_for_its_next_position():
    """And neither a prompt, whose next block may be one that is known, nor an answer that ends."""
    pool = BlockPool(8)

    def tables(prompt: int, end: int, **asked) -> list[list[int]]:
        sequence = Sequence(SequenceRequest(token_ids=tuple(range(prompt)), **asked))
        sequence.blocks = pool.reserve(2)
        sequence.tokens += [1] * (end - prompt)
        sequence.cached = end - 1 if end > prompt else 0
        batch, _ = assemble([Slice(sequence, sequence.cached, end - sequence.cached)])
        sequence.blocks.release()
        return [len(row) - row.count(-1) for row in batch.block_tables.tolist()]

    assert tables(100, BLOCK - 1, max_tokens=100) == [1]
    assert tables(100, BLOCK, max_tokens=100) == [2]
    assert tables(100, BLOCK, max_tokens=BLOCK - 100 + 1) == [1]
    assert tables(BLOCK, BLOCK, max_tokens=100) == [1]


class Told:
    """A model whose step ends as it is told."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def forward(self, batch, cache, wishes=()):
        return self.result


def after_a_step(result: StepResult, **asked) -> Sequence:
    engine = Engine(Told(result), None, vocab_size=40, context_length=64, blocks=2)
    sequence = engine.submit(SequenceRequest(token_ids=(1, 2, 3), max_tokens=2, **asked))
    assert engine.step() == 3
    assert engine.running == 0 and engine.pool.reserved == 0
    return sequence


def test_a_sequence_with_a_fault_in_a_row_is_given_no_token_of_another():
    told = StepResult(None, (RowFault(0, "layers.0.mlp.down_proj"),), (Reading(token_id=5),))
    failed = after_a_step(told)
    assert failed.failure is not None and failed.failure.error.facts["operator"] == "layers.0.mlp.down_proj"
    assert not failed.ready and failed.generated == 0


def test_a_sequence_whose_scores_are_not_finite_is_given_no_token_of_that_step():
    scored = Reading(np.zeros(40, np.float32), np.float32(4))
    told = StepResult(None, (), (scored, Reading(fault="log_normaliser"), Reading(token_id=5)))
    failed = after_a_step(told, prompt_logprobs=0)
    assert failed.failure is not None and failed.failure.error.facts["operator"] == "log_normaliser"
    assert not failed.ready and failed.generated == 0
