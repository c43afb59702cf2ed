"""Layers run by one native call give the bits of their operators called one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.test_quant_linear import weights
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from mens_core.ops import AttentionSpec, Ops, StoredTensor
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.layer_recording import UnrecordableError, record
from mens_cpu_ref.training_lane import CpuTrainingOps

WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 4, 2, 64
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
FORMATS = ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k", "f32", "f16", "bf16")


class Fused(CpuTrainingOps):
    """Counts the steps that were replayed."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.replayed = self.refused = 0
        inner = self._replayer.run

        def run(*arguments):
            out = inner(*arguments)
            self.replayed += out is not None
            self.refused += out is None
            return out

        self._replayer.run = run


class OneByOne(CpuTrainingOps):
    """The definition: every operator called by itself."""

    run_layers = Ops.run_layers


@dataclass(frozen=True)
class Everything:
    """A layer of every operator that layers call, with weights of every format among its layers."""

    index: int
    spec: AttentionSpec
    parts: dict[str, Any]
    rotary: Any

    def forward(self, ops, x, batch, cache):
        p, spec = self.parts, self.spec
        normed = ops.rms_norm(x, p["norm"], 1e-6, name="norm")
        q, k, v = ops.linear_many(normed, (p["q"], p["k"], p["v"]), names=("q", "k", "v"))
        q = ops.head_norm(q, p["q_norm"], spec.heads, 1e-6, name="q_norm")
        q = ops.rope(q, spec.heads, self.rotary, batch.positions, name="q_rope")
        k = ops.rope(k, spec.kv_heads, self.rotary, batch.positions, name="k_rope")
        ops.kv_append(cache, self.index, k, v, batch)
        mixed = ops.attention(q, cache, self.index, batch, spec, name="attention")
        mixed = ops.rms_norm(ops.linear(mixed, p["o"], name="o"), p["norm"], 1e-6, name="o_norm")
        x = ops.add(x, mixed, name="residual")
        gate, up = ops.linear_many(x, (p["gate"], p["up"]), names=("gate", "up"))
        if self.index % 3 == 1:  # the up projection has an update of low rank, as an adapter gives it
            v = ops.linear(ops.linear(x, p["lora_a"], name="lora_a"), p["lora_b"], name="lora_b")
            up = ops.add_scaled(up, v, 0.3, name="adapted")
        gated = (ops.silu_gate if self.index % 2 else ops.gelu_gate)(gate, up, name="gated")
        if self.index == 6:  # a product that others want beside its gate
            gated = ops.add(gated, up, name="again")
        down = ops.rms_norm(ops.linear(gated, p["down"], name="down"), p["norm"], 1e-6, name="down_norm")
        return ops.add(down, x, name="residual")


def layers_of_every_format(ops) -> tuple[Everything, ...]:
    rng = np.random.default_rng(8)
    rotary = ops.rotary_table([(1 << 128) // (7 + 3 * i) for i in range(HEAD_DIM // 2)], None)

    def matrix(number: int, rows: int, columns: int):
        weight_format = FORMATS[number % len(FORMATS)]
        if weight_format in ("f32", "f16", "bf16"):
            kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[weight_format]
            values = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
            stored = (values.view(np.uint32) >> 16).astype(kind) if kind is np.uint16 else values.astype(kind)
            data = memoryview(np.ascontiguousarray(stored)).cast("B")
            return ops.load_matrix(StoredTensor("w", weight_format, (rows, columns), data))
        return ops.load_matrix(weights(weight_format, rows, columns, rng))

    def layer(i: int) -> Everything:
        shapes = {"q": (QUERY, WIDTH), "k": (KEY, WIDTH), "v": (KEY, WIDTH), "o": (WIDTH, QUERY)}
        ffn = FFN - 12 if i == 0 else FFN  # its last group of outputs is not whole
        shapes |= {"gate": (ffn, WIDTH), "up": (ffn, WIDTH), "down": (WIDTH, ffn)}
        lora = {"lora_a": (5, WIDTH), "lora_b": (ffn, 5)}
        parts = {name: matrix(7 * i + j, *shape) for j, (name, shape) in enumerate(shapes.items())}
        for name, shape in lora.items():
            parts[name] = ops.matrix(Rows(rng.normal(0, 0.1, shape).astype(np.float32)), name=name)
        parts["norm"] = Rows(rng.normal(0, 0.2, WIDTH).astype(np.float32))
        parts["q_norm"] = Rows(rng.normal(1, 0.2, HEAD_DIM).astype(np.float32))
        window = 20 if i % 2 else None
        spec = AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, 0.125, window, 30.0 if i == 2 else None)
        return Everything(i, spec, parts, rotary)

    return tuple(layer(i) for i in range(9))


def hidden(rows: int, seed: int) -> Rows:
    return Rows(np.random.default_rng(seed).normal(0, 1, (rows, WIDTH)).astype(np.float32))


@pytest.fixture
def both(library, isa):
    """A lane that replays and one that does not, on one instruction set."""
    library.force_isa(isa)
    yield Fused(library), OneByOne(library)
    library.force_isa("")
    library.set_threads(1)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_format_and_operator_gives_the_same_bits_at_once_and_one_by_one(library, both, threads):
    library.set_threads(threads)
    sides = [(ops, layers_of_every_format(ops)) for ops in both]

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(
        st.lists(
            st.tuples(st.integers(0, 2), st.sampled_from([1, 1, 1, 2, 5, 40, 131])), min_size=1, max_size=12
        )
    )
    def run(steps):
        found = []
        for ops, layers in sides:
            sequences = Sequences()
            cache = ops.new_kv_cache(layers=len(layers), kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=40)
            outputs = []
            for number, (company, count) in enumerate(steps):
                # One sequence's rows, and a row each of some others in between.
                rows = [(0, [0] * count), *((s, [0]) for s in range(1, 1 + company))]
                batch = sequences.step(rows)
                x = hidden(len(batch.positions), number)
                before = x.values.copy()
                outputs.append(ops.run_layers(x, layers, batch, cache).values.tobytes())
                assert x.values.tobytes() == before.tobytes(), "the input is the caller's"
            found.append(outputs)
        assert found[0] == found[1]

    run()
    assert both[0].replayed > 12
    assert both[0].refused == 0


@pytest.mark.parametrize("family", BY_FAMILY)
def test_the_models_layers_are_replayed_and_their_logits_are_the_same(library, both, family, tmp_path):
    library.set_threads(2)
    path = write_model(tmp_path, BY_FAMILY[family], seed=4)
    ids = np.random.default_rng(3).integers(0, 97, 140).tolist()
    found = []
    for ops in both:
        model = open_model(path, ops).model
        sequences, cache = Sequences(), model.new_cache(4)
        steps = [[(0, ids)], [(0, [5]), (1, ids[:3])], [(1, [7])], [(0, [8])]]
        found.append([model.forward(sequences.step(rows), cache).logits.values.tobytes() for rows in steps])
    assert found[0] == found[1]
    assert (both[0].replayed, both[0].refused) == (4, 0)


@pytest.mark.parametrize("rows", [3, 45])
def test_a_value_that_is_not_finite_is_named_as_one_by_one(library, both, rows):
    """Nothing of a replay counts then: the operators are called one by one, and say which rows."""
    library.set_threads(2)
    faults = []
    for ops in both:
        layers = layers_of_every_format(ops)[:2]
        cache = ops.new_kv_cache(layers=2, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=1)
        x = hidden(rows, 1)
        x.values[1] = 3e38
        ops.run_layers(x, layers, Sequences().step([(0, [0] * rows)]), cache)
        faults.append(ops.take_faults())
    assert faults[0] == faults[1]
    assert faults[0][0].name == "norm"
    assert 1 in faults[0][0].rows
    assert both[0].refused == 1


def test_a_position_out_of_range_is_refused_as_one_by_one(both):
    for ops in both:
        layers = layers_of_every_format(ops)[:1]
        cache = ops.new_kv_cache(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=1)
        batch = Sequences().step([(0, [0])])
        batch.block_tables[:] = 7
        with pytest.raises(IndexError, match="out of range"):
            ops.run_layers(hidden(1, 1), layers, batch, cache)


def test_positions_beyond_the_tables_made_so_far_are_reached(both):
    found = []
    for ops in both:
        layers = layers_of_every_format(ops)[:1]
        cache = ops.new_kv_cache(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=8)
        sequences, outputs = Sequences(), []
        for count in (1, 127, 1, 700, 1):
            batch = sequences.step([(0, [0] * count)])
            outputs.append(ops.run_layers(hidden(count, count), layers, batch, cache).values.tobytes())
        found.append(outputs)
    assert found[0] == found[1]
    assert both[0].refused == 0


def test_layers_that_do_something_else_run_one_by_one(both):
    class Capped:
        def forward(self, ops, x, batch, cache):
            return ops.softcap(x, 5.0, name="capped")

    x, batch = hidden(2, 1), Sequences().step([(0, [0, 0])])
    cache = both[0].new_kv_cache(layers=1, kv_heads=1, head_dim=16, blocks=1)
    with pytest.raises(UnrecordableError, match="softcap"):
        record((Capped(),), batch, cache, WIDTH)
    one, other = (ops.run_layers(x, (Capped(),), batch, cache).values.tobytes() for ops in both)
    assert one == other
    assert both[0].refused == 1


def test_other_layers_or_another_cache_make_another_recording(both):
    ops, _ = both
    two = layers_of_every_format(ops)[:2]
    batch = Sequences().step([(0, [0, 0, 0])])
    outputs = []
    for some in (two, two[:1], two, two):
        cache = ops.new_kv_cache(layers=2, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=1)
        outputs.append(ops.run_layers(hidden(3, 1), some, batch, cache).values.tobytes())
        assert cache.keys.any(), "the keys went to a cache of before"
    assert outputs[0] == outputs[2] == outputs[3] != outputs[1]
    assert ops.replayed == 4


def test_the_layers_buffers_are_used_again(both):
    """Nine layers need no more working memory than one; a gate's output takes the gate's place."""
    ops, _ = both
    layers = layers_of_every_format(ops)
    batch = Sequences().step([(0, [0])])
    cache = ops.new_kv_cache(layers=9, kv_heads=KV_HEADS, head_dim=HEAD_DIM, blocks=1)
    one, nine = (record(some, batch, cache, WIDTH).slots for some in (layers[:2], layers))
    assert sum(width for width, block in nine if not block) <= sum(w for w, b in one if not b) + WIDTH
    assert sum(width == FFN and not block for width, block in nine) == 3, "gate, up and the update of up"


@pytest.mark.parametrize("width", [1, 16, 4096, 5000, 32768, 32769])
def test_argmax_is_the_lowest_id_however_a_row_is_cut(library, both, width):
    ops, _ = both
    library.set_threads(2)
    logits = np.random.default_rng(width).normal(0, 1, (3, width)).astype(np.float32)
    logits[0, [width // 3, width // 2, width - 1]] = 9.0
    logits[1] = -1.0
    logits[1, width // 2 :] = -0.0
    logits[1, width - 1] = 0.0
    logits[2] = -np.arange(width, dtype=np.float32)
    assert ops.argmax(Rows(logits)).tolist() == [width // 3, width // 2, 0]
