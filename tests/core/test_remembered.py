"""What a step remembers of a layer's forward: how much, and that no bit depends on it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.test_trainer import LENGTHS, SMALL, Faulty, a_trainer, steps
from core.test_training import a_backend
from lanes import every_lane
from lanes.numpy_training import RowTrainingLane
from lanes.tiny_models import open_model, write_model
from lanes.training import ALL_TARGETS, LAYER_TARGETS, a_config, finish, random_adapter, read, some_examples
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.differentiate import differentiate
from mens_core.micro_batches import Example, pack
from mens_core.models.passes import Dropout
from mens_core.models.remembered import Part, Remembered, choose_parts, part_bytes
from mens_core.sized_ops import Meter, SizedOps
from mens_core.trainer import Trainer
from mens_core.training_ops import AttentionSaved
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendError

ALL = 1 << 40
ROWS = 140


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model_dir(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), SMALL[request.param], seed=3)


def parts_of(model_dir, longest=ROWS):
    model = open_model(model_dir, RowTrainingLane()).model
    loras = make_loras(
        model.ops,
        Trainer.plan_for(model, a_config(ALL_TARGETS)),
        to_lane(model.ops, random_adapter(Trainer.plan_for(model, a_config(ALL_TARGETS)).shapes)),
    )
    return [layer.parts(longest) for layer in model.adapted(loras).layers]


@pytest.mark.parametrize("lane_name", ["mens-cpu-ref", "mens-cpu-ref:reference"])
def test_all_some_and_none_remembered_are_the_same_bytes(model_dir, lane_name, request):
    def outcomes(remember_bytes):
        lane = every_lane.make_training_lane(lane_name, request.config)
        config = a_config(ALL_TARGETS, dropout=0.25, max_gradient_norm=0.5)
        return steps(a_trainer(model_dir, lane, config, remember_bytes=remember_bytes), 3)

    _, most = choose_parts(parts_of(model_dir), ROWS, ALL)
    none, *others = (outcomes(room) for room in (0, most // 3, 2 * most // 3, ALL))
    assert all(other == none for other in others)
    assert len({outcome.adapter_digest for outcome in none}) == 3


class Counting(RowTrainingLane):
    """Counts what each operator makes, by its name."""

    def __init__(self):
        super().__init__()
        self.made = Counter()
        self.is_saving = False

    def linear(self, x, weight, *, name):
        self.made[name] += 1
        return super().linear(x, weight, name=name)

    def linear_many(self, x, weights, *, names):
        return [self.linear(x, weight, name=name) for weight, name in zip(weights, names, strict=True)]

    def attention(self, q, cache, layer, batch, spec, *, name):
        self.made[name] += not self.is_saving
        return super().attention(q, cache, layer, batch, spec, name=name)

    def attention_saving(self, q, cache, layer, batch, spec, *, name):
        self.made[name] += 1
        self.is_saving = True
        saved = super().attention_saving(q, cache, layer, batch, spec, name=name)
        self.is_saving = False
        return saved


def made_by(model_dir, remember_bytes):
    lane = Counting()
    trainer = a_trainer(model_dir, lane, a_config(ALL_TARGETS), remember_bytes=remember_bytes)
    steps(trainer, 1)
    lane.made.clear()
    steps(trainer, 1, first=1)
    return lane.made


def test_what_is_remembered_is_made_once(model_dir):
    """And what a second forward doesn't need is not made again."""
    names = frozenset().union(*(part.names for parts in parts_of(model_dir) for part in parts))
    made = made_by(model_dir, ALL)
    assert names
    assert {made[name] for name in names} == {1}
    assert {made[f"{name}.lora_A"] for name in names if not name.endswith("attention")} == {1}
    again = made_by(model_dir, 0)
    assert {again[name] for name in names} == {2}
    # What follows is the next layer's input, which is there.
    of_down = again["layers.0.mlp.down_proj"], made["layers.0.mlp.down_proj"]
    assert of_down == ((1, 1) if "layers.0.mlp.down_proj" not in names else (2, 1))


def test_some_parts_are_made_once_and_others_twice(model_dir):
    rows = [example.rows for example in read(some_examples(LENGTHS, seed=1))]
    parts = parts_of(model_dir, max(rows))
    _, most = choose_parts(parts, sum(rows), ALL)
    names, _ = choose_parts(parts, sum(rows), most // 2)
    made = made_by(model_dir, most // 2)
    once = frozenset().union(*names)
    twice = frozenset().union(*(part.names for of_layer in parts for part in of_layer)) - once
    assert {made[name] for name in once} == {1}
    assert {made[name] for name in twice} == {2}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(1, 50), max_size=4), max_size=6), st.integers(0, 3), st.integers(0, 5000)
)
def test_what_is_chosen_fits_and_the_longest_sums_come_first(widths, rows, room):
    layers = [
        [Part(frozenset((f"{i}.{j}",)), floats, 100 - j) for j, floats in enumerate(of_layer)]
        for i, of_layer in enumerate(widths)
    ]
    names, taken = choose_parts(layers, rows, room)
    chosen = [
        part
        for parts, of_layer in zip(layers, names, strict=True)
        for part in parts
        if part.names <= of_layer
    ]
    assert taken == sum(part_bytes(part, rows) for part in chosen) <= room
    left = [
        part
        for parts, of_layer in zip(layers, names, strict=True)
        for part in parts
        if not part.names & of_layer
    ]
    assert all(taken + part_bytes(part, rows) > room for part in left)
    _, everything = choose_parts(layers, rows, ALL)
    assert everything == sum(part_bytes(part, rows) for parts in layers for part in parts)
    in_order = [(j, -i) for i, parts in enumerate(layers) for j, _ in enumerate(parts)]
    sizes = [part_bytes(layers[-i][j], rows) for j, i in sorted((j, i) for j, i in in_order)]
    for most in accumulate(sizes):
        names, taken = choose_parts(layers, rows, most)
        assert taken == most


def test_what_is_held_is_what_was_chosen(model_dir, monkeypatch):
    """On tensors without values: what is noted, and the fullest moment, which grows by no more than that."""
    held = []
    note = Remembered.note

    def noting(self, name, made, *, of=None):
        note(self, name, made, of=of)
        if self.recall(name) is made:
            parts = (made.out, made.m, made.l) if isinstance(made, AttentionSaved) else (made,)
            held.append(sum(part.nbytes for part in parts))

    monkeypatch.setattr(Remembered, "note", noting)
    lane = RowTrainingLane()
    model = open_model(model_dir, lane).model
    plan = Trainer.plan_for(model, a_config(ALL_TARGETS))
    examples = [Example((1,) * (ROWS + 1), tuple(range(1, ROWS + 1)))]
    most = []
    for room in (0, 100_000, ALL):
        meter = Meter()
        shapes = {id(linear.weight): linear.shape for linear in model.linears.values()}
        shapes[id(model.head.embedding.weight)] = model.head.embedding.shape
        ops = SizedOps(meter, shapes)
        loras = make_loras(ops, plan, to_lane(ops, random_adapter(plan.shapes)))
        loras = {name: replace(lora, is_zero=False) for name, lora in loras.items()}
        adapted = replace(model, ops=ops).adapted(loras)
        micro = pack(examples, 0)
        held.clear()
        finish(
            differentiate(adapted, ops, micro, Dropout(0.5, 0, 0), lambda key, g: None, remember_bytes=room)
        )
        _, taken = choose_parts([layer.parts(ROWS) for layer in adapted.layers], ROWS, room)
        assert sum(held) == taken
        most.append((taken, meter.most))
    (_, without), *others = most
    assert all(without < total <= without + taken for taken, total in others)


@pytest.mark.parametrize(
    ("at", "rows"),
    [
        ("embed_tokens", (3,)),
        ("layers.1.self_attn.attention", (11,)),
        ("layers.0.mlp.up_proj.lora_A", (0,)),
        ("layers.0.mlp.up_proj.lora_B", (0,)),
        ("layers.1.mlp.gated.backward", (2,)),
        ("layers.1.mlp.up_proj.lora_A.gradient", (1,)),
    ],
)
def test_what_is_not_finite_has_the_name_that_it_has_without(tmp_path, at, rows):
    path, found = write_model(tmp_path, SMALL["qwen3"], seed=3), []
    for room in (0, ALL):
        lane = Faulty()
        trainer = a_trainer(path, lane, remember_bytes=room)
        steps(trainer, 1)
        lane.at, lane.rows = at, rows
        with pytest.raises(BackendError) as caught:
            steps(trainer, 1, first=1)
        found.append(caught.value.error)
    assert found[0] == found[1]
    assert found[0].facts["operator"] == at


def test_a_new_adapter_reduces_its_inputs_once(model_dir):
    """B is zero, so the forward leaves the update out: what its gradient needs is made on the way back."""
    lane = Counting()
    trainer = a_trainer(model_dir, lane, a_config(ALL_TARGETS), remember_bytes=ALL)
    lane.made.clear()
    (outcome,) = steps(trainer, 1)
    assert {count for name, count in lane.made.items() if name.endswith("proj.lora_A")} == {1}
    assert np.isfinite(outcome.loss)


def test_a_run_remembers_what_it_is_told_to_new_or_resumed(model_dir, tmp_path):
    config, made = a_config(LAYER_TARGETS), []
    for number, room in enumerate((0, ALL)):
        new = t.TrainBeginParams(adapter=config.adapter, optimizer=config.optimizer, remember_bytes=room)
        folder = str(tmp_path / str(number))
        resumed = t.TrainBeginParams(resume_dir=folder, remember_bytes=room)
        for begin in (new, resumed):
            lane = Counting()
            backend = a_backend(model_dir, lambda lane=lane: lane)
            list(backend.train_begin(begin))
            lane.made.clear()
            list(backend.train_step(t.TrainStepParams(examples=some_examples((5, 9)))))
            made.append(lane.made["layers.0.self_attn.attention"])
            if begin is new:
                list(backend.train_save(t.TrainSaveParams(folder=folder)))
    assert made == [2, 2, 1, 1]
