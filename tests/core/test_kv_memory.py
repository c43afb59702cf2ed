"""Admission by measured memory: who waits, who is refused with numbers, and what makes place."""

from __future__ import annotations

import json

import pytest

from core.test_prefix_reuse import BASES, alone, an_engine, ask, finish, outcome, serve
from lanes.tiny_models import QWEN3
from mens_core.kv_memory import KvMemory, usable_bytes
from mens_core.kv_plan import plan_kv_cache
from mens_core.weights_fit import RESERVE_BYTES
from vox_plugin_api.backend import BackendError
from vox_plugin_api.families import parse_config
from vox_plugin_api.messages import LoadModelParams

BLOCK_BYTES = 2 * 3 * 2 * 16 * 128 * 4
"""Of the tiny Qwen3: keys and values of three layers, two heads of 16."""


class Machine:
    """Free memory of which an engine's touched blocks take 1000 bytes each, and others what they like."""

    def __init__(self, blocks: int, freely: int = 0) -> None:
        self.blocks, self.others, self.measured = blocks, 0, 0
        self.memory = KvMemory(1000, self.free_bytes, freely)
        self.engine = an_engine(blocks=16, memory=self.memory, rows=64)

    def free_bytes(self) -> int:
        self.measured += 1
        return max(0, self.blocks - self.others - self.engine.pool.touched) * 1112


@pytest.mark.parametrize(("free", "usable"), [(0, 0), (1000, 900), (1 << 30, (1 << 30) - (1 << 30) // 10),
                                              (1 << 40, (1 << 40) - RESERVE_BYTES)])  # fmt: skip
def test_a_tenth_is_left_for_the_steps_and_256_mib_at_most(free, usable):
    assert usable_bytes(free) == usable


def test_who_finds_no_memory_waits_for_those_who_have_it():
    machine = Machine(4)
    engine = machine.engine
    first, second = engine.submit(ask(BASES[0][:300], 9)), engine.submit(ask(BASES[1][:300], 9))
    engine.step()
    assert (engine.running, engine.waiting) == (1, 1), "3 + 3 blocks, and memory for 4"
    finish(engine, first, second)
    assert engine.pool.touched <= 4
    for sequence in (first, second):
        assert outcome(sequence) == alone(sequence.request)


def test_what_can_never_have_memory_is_refused_with_numbers_and_the_next_is_served():
    machine = Machine(2)
    engine = machine.engine
    large, small = engine.submit(ask(BASES[0][:300], 9)), engine.submit(ask(BASES[0][:100], 9))
    finish(engine, large, small)
    assert large.failure.error.code == "insufficient-memory"
    assert large.failure.error.facts == {
        "needed_blocks": 3, "free_blocks": 2, "block_bytes": 1000, "free_bytes": 2224,
    }  # fmt: skip
    assert "needs 3 more KV blocks of 1000 bytes, and 2224 bytes" in large.failure.error.message
    assert outcome(small) == alone(small.request)
    assert engine.pool.reserved == 0


def test_memory_that_others_took_since_the_load_counts():
    machine = Machine(8)
    machine.others = 6
    assert serve_or_fail(machine.engine, ask(BASES[0][:300], 1)).failure is not None
    machine.others = 0
    assert serve_or_fail(machine.engine, ask(BASES[0][:300], 1)).failure is None


def serve_or_fail(engine, request):
    sequence = engine.submit(request)
    while not sequence.is_done:
        engine.step()
    return sequence


def test_kept_blocks_make_place_before_a_request_is_refused():
    machine = Machine(3, freely=16)
    for first in range(4):
        sequence = serve(machine.engine, ask([first, *BASES[0][:300]], 1))
        assert outcome(sequence) == alone(sequence.request)
    assert machine.engine.pool.touched == 3


def test_nothing_is_measured_while_blocks_that_are_touched_will_do():
    machine = Machine(8, freely=6)
    serve(machine.engine, ask([1, 2, 3], 40))
    assert machine.measured == 1
    for first in range(5):
        serve(machine.engine, ask([first, 2, 3], 40))
    assert machine.measured == 1


def test_where_memory_can_not_be_told_nobody_is_refused_for_it():
    engine = an_engine(blocks=3, memory=KvMemory(1000, lambda: None, 0))
    assert serve(engine, ask(BASES[0][:300], 9)).failure is None


# --- planning a cache ------------------------------------------------------------------------------


def plan(free_bytes, **params):
    config = parse_config(json.loads(json.dumps(QWEN3)))
    asked = LoadModelParams(model_dir="", model_digest="0" * 64, **params)
    return plan_kv_cache(config, asked, free_bytes=free_bytes)


def test_what_is_free_bounds_the_cache_and_the_context_and_is_told():
    assert plan(None).context_length == plan(1 << 40).context_length == 1024
    tight = plan(4 * BLOCK_BYTES)  # a tenth is left: three blocks
    assert (tight.blocks, tight.context_length) == (3, 384)
    assert tight.as_facts()["free_bytes"] == 4 * BLOCK_BYTES
    assert f"of {4 * BLOCK_BYTES} bytes that are free here may use" in tight.warnings[-1]
    # What the host allows counts where it is less.
    assert plan(4 * BLOCK_BYTES, memory_bytes=BLOCK_BYTES).blocks == 1


def test_a_context_that_was_asked_for_may_take_more_than_the_lanes_own_bound_if_it_is_free():
    config = parse_config(json.loads(json.dumps(QWEN3)))
    asked = LoadModelParams(model_dir="", model_digest="0" * 64, context_length=1024)
    found = plan_kv_cache(config, asked, default_bytes=2 * BLOCK_BYTES, free_bytes=1 << 40)
    assert (found.blocks, found.context_length) == (8, 1024)
    unasked = asked.model_copy(update={"context_length": None})
    assert plan_kv_cache(config, unasked, default_bytes=2 * BLOCK_BYTES).context_length == 256
    # Not if the host has named the memory, nor if it isn't free.
    for changes, free in (({"memory_bytes": 2 * BLOCK_BYTES}, 1 << 40), ({}, 4 * BLOCK_BYTES)):
        with pytest.raises(BackendError, match="positions"):
            plan_kv_cache(
                config, asked.model_copy(update=changes), default_bytes=2 * BLOCK_BYTES, free_bytes=free
            )


@pytest.mark.parametrize(("free", "params", "remedy"), [
    (4 * BLOCK_BYTES, {"context_length": 512}, "at most 384 positions"),
    (BLOCK_BYTES, {}, "Close other programs"),
])  # fmt: skip
def test_a_cache_that_what_is_free_can_not_hold_is_refused_with_numbers(free, params, remedy):
    with pytest.raises(BackendError) as caught:
        plan(free, **params)
    assert caught.value.error.code == "insufficient-memory"
    assert caught.value.error.facts["free_bytes"] == free
    assert remedy in caught.value.error.remedy
