"""A decode step is submitted once, whatever is asked of its logits; and its answers are the CPU lane's."""

from __future__ import annotations

import numpy as np
import pytest

from lanes.tiny_models import QWEN3, open_model, write_model
from mens_core.conformance.inputs import floats, stored_float
from mens_core.engine import Engine
from mens_core.kv_blocks import blocks_for
from mens_core.ops import Batch, Ops
from mens_core.sequence import SequenceRequest
from mens_core.wishes import Penalty, Wish
from mens_torch_mps.lane import MpsOps
from metal_shim.submissions import Submissions
from vox_plugin_api.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, seed=7, top_k=20, top_p=0.9)
PENALISED = SamplingParams(
    temperature=0.7, seed=3, repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={5: 1.5}
)
HOT = SamplingParams(temperature=1.5, seed=1, presence_penalty=0.5)
KINDS = {
    "greedy": [(GREEDY, None)],
    "sampled": [(SAMPLED, None)],
    "penalised and scored": [(PENALISED, 3)],
    "greedy, many": [(GREEDY, None)] * 5,
    "sampled, many": [(SAMPLED, None), (HOT, None), (SAMPLED, None), (HOT, None)],
    "mixed": [(GREEDY, 2), (SAMPLED, None), (PENALISED, 1), (HOT, 0), (GREEDY, None), (PENALISED, None)],
}
TOKENS = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # 300 tokens, so that a row of logits has three chunks.
    return write_model(tmp_path_factory.mktemp("one"), {**QWEN3, "num_hidden_layers": 2, "vocab_size": 300})


def answers(path, ops, kind, first=3):
    """What each of the requests got, and the submissions of each step that only decodes."""
    model = open_model(path, ops).model
    requests = [
        SequenceRequest(
            token_ids=tuple(range(1, first + i)), max_tokens=TOKENS, sampling=sampling, logprobs=logprobs
        )
        for i, (sampling, logprobs) in enumerate(KINDS[kind])
    ]
    blocks = sum(blocks_for(request.positions) for request in requests)
    engine = Engine(model, model.new_cache(blocks), vocab_size=300, context_length=400, blocks=blocks)
    sequences = [engine.submit(request) for request in requests]
    while any(sequence.generated == 0 for sequence in sequences):
        engine.step()
    counts = []
    with Submissions() as torch_does:
        while engine.running:
            before = torch_does.count
            engine.step()
            counts.append(torch_does.count - before)
    assert all(sequence.finish_reason == "length" for sequence in sequences)
    return [[token.model_dump() for token in sequence.ready] for sequence in sequences], counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_is_submitted_once(started, library, path, kind):
    from mens_cpu_ref.lane import CpuOps

    found, counts = answers(path, started().lane(), kind)
    assert counts == [1] * (TOKENS - 1)
    assert found == answers(path, CpuOps(library.kernels), kind)[0]


def test_a_block_of_positions_that_is_new_is_not_waited_for(started, library, path):
    """Decoding goes over the border at position 128, and the table of angles grows between commands."""
    from mens_cpu_ref.lane import CpuOps

    found, counts = answers(path, started().lane(), "greedy", first=128)
    assert counts == [1] * (TOKENS - 1)
    assert found == answers(path, CpuOps(library.kernels), "greedy", first=128)[0]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_second_read_is_seen(started, path, kind, monkeypatch):
    """Planted: choosing waits for itself, as operators one by one do; and flags are read by themselves."""
    with monkeypatch.context() as planted:
        planted.setattr(MpsOps, "run_and_read", Ops.run_and_read)
        planted.setattr(MpsOps, "run_step", Ops.run_step)
        assert set(answers(path, started().lane(), kind)[1]) == {3}
    queue = MpsOps._queue_reading

    def and_wait(self, *arguments):
        self._device.get(self._watched.parts()[0][0], np.int32, (1,))
        return queue(self, *arguments)

    monkeypatch.setattr(MpsOps, "_queue_reading", and_wait)
    assert set(answers(path, started().lane(), kind)[1]) == {2}


def test_what_torch_is_not_known_to_queue_is_an_error(started):
    buffer = started().device.put(np.arange(4, dtype=np.int32))
    with Submissions(), pytest.raises(AssertionError, match="it is not known whether"):
        buffer.cpu().add(1)


class Step:
    """A table and a head: rows that are too great for the one, the other, or neither."""

    def __init__(self, ops):
        table, head = floats(3, 6, 64), floats(4, 40, 64)
        table[1], table[3] = 3e38, 1e37
        head = np.abs(head) + np.float32(1)
        self.table = ops.load_matrix(stored_float(table, "table"))
        self.head = ops.load_matrix(stored_float(head, "head"))

    def hidden(self, ops, batch, cache):
        return ops.embed(self.table, batch.token_ids, 2.0, name="hidden")

    def logits(self, ops, hidden, batch, cache):
        return ops.linear(hidden, self.head, name="head")


def test_a_row_that_is_not_finite_is_named_as_the_cpu_lane_names_it(started, library):
    """By the step or by its reading; other rows are read as if it were not there."""
    from mens_cpu_ref.lane import CpuOps

    one = np.ones(1, np.float32)
    steep = Penalty(np.array([7], np.int32), one * np.float32(1e-38), one)
    mild = Penalty(np.array([7], np.int32), one * np.float32(2), one)

    def draw(weights):
        return int(weights.astype(np.float64).sum()) % 40

    wishes = [
        Wish(0, is_scored=True, penalty=mild, is_chosen=True, draw=draw, temperature=0.75),
        Wish(1, is_scored=True, is_chosen=True),
        Wish(2, penalty=steep, is_chosen=True, draw=draw, temperature=0.75),
        Wish(3, is_chosen=True, draw=draw, temperature=0.75),
        Wish(4, is_scored=True),
        Wish(5, penalty=mild, is_chosen=True),
    ]
    ids = np.array([0, 1, 2, 3, 4, 5, 4], np.int32)
    rows = np.arange(1, 7, dtype=np.int32)
    batch = Batch(ids[[6, 0, 1, 2, 3, 4, 5]], rows, rows[:1] * 0, np.zeros((1, 1), np.int32), rows)

    def ask(ops):
        logits, faults, made = ops.run_and_read(Step(ops), batch, None, wishes)
        assert logits is not None
        return faults, [
            (r.token_id, r.fault, r.normaliser, None if r.logits is None else r.logits.tobytes())
            for r in made
        ]

    faults, made = ask(started().lane())
    assert (faults, made) == ask(CpuOps(library.kernels))
    assert [(fault.name, fault.rows) for fault in faults] == [("hidden", (2,)), ("head", (2, 4))]
    assert [reading[1] for reading in made] == [None, None, "penalise", None, None, None]
    assert [reading[0] is None for reading in made] == [False, True, True, True, True, False]
