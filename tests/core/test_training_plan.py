"""What a step will hold, against what it holds."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fixtures.demo_model import demo_gguf
from lanes import every_lane
from lanes.demo_lane import import_demo
from lanes.numpy_training import RowTrainingLane
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import ALL_TARGETS, LAYER_TARGETS, a_config, finish
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.differentiate import differentiate, score
from mens_core.example_tree import ExampleTree
from mens_core.micro_batches import Example, pack
from mens_core.models.passes import Dropout
from mens_core.sized_ops import Meter, SizedOps
from mens_core.trainer import Trainer
from mens_core.training_ops import AttentionSaved, TrainingOps
from mens_core.training_plan import plan_step
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendError

ADAPTER = a_config(ALL_TARGETS, rank=4).adapter


@pytest.fixture(scope="module", params=BY_FAMILY)
def model_dir(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), BY_FAMILY[request.param], seed=3)


def plan(
    model_dir, *, adapter=ADAPTER, longest=9, examples=4, micro=None, process=None, devices=1, memory=None
) -> t.TrainMemory:
    ops = RowTrainingLane()
    params = t.TrainPlanParams(
        adapter=adapter,
        longest_example=longest,
        examples=examples,
        micro_batch_size=micro,
        devices=devices,
        memory_bytes=memory,
    )
    loaded = open_model(model_dir, ops)
    return plan_step(
        params, loaded.model, ops, parameters=loaded.plan.parameters, process_bytes=process
    ).memory


def shapes(made) -> tuple:
    if isinstance(made, AttentionSaved):
        made = (made.out, made.m, made.l)
    return tuple(x.shape for x in made) if isinstance(made, list | tuple) else (made.shape,)


def recording(ops: TrainingOps) -> list[tuple]:
    """Note what every operator of `ops` makes from now on: its name and shapes."""
    made: list[tuple] = []
    within: list[str] = []

    def watch(operator: str):
        function = getattr(ops, operator)

        def call(*arguments, **named):
            within.append(operator)
            out = function(*arguments, **named)
            within.pop()
            # What an operator asks of others is its own affair.
            if out is not None and not within:
                made.append((operator, named.get("name"), shapes(out)))
            return out

        return call

    unlike = {"take_faults", "to_host", "new_kv_cache", "load_matrix", "load_vector", "rotary_table"}
    for operator in {*TrainingOps.__abstractmethods__, "join_rows"} - unlike:
        setattr(ops, operator, watch(operator))
    return made


def test_a_step_without_values_makes_what_a_step_makes(model_dir):
    """Operator by operator, the shapes are those of a lane that computes."""
    config = a_config(ALL_TARGETS, dropout=0.5)
    examples = [Example((1,) * 140, tuple(range(1, 140))), Example((2,) * 7, (3, 6))]
    lane = RowTrainingLane()
    model = open_model(model_dir, lane).model
    adapter = Trainer.plan_for(model, config)
    sized = SizedOps(Meter(), {id(linear.weight): linear.shape for linear in model.linears.values()})
    sized._weights[id(model.head.embedding.weight)] = (97, 40)
    found = []
    for ops in (lane, sized):
        rng = np.random.default_rng(0)
        tensors = {key: rng.normal(0, 0.1, shape).astype(np.float32) for key, shape in adapter.shapes.items()}
        loras = make_loras(ops, adapter, to_lane(ops, tensors))
        # Tensors without values are zeros, which a forward would leave out.
        loras = {name: replace(lora, is_zero=False) for name, lora in loras.items()}
        made = recording(ops)
        adapted = replace(model, ops=ops).adapted(loras)
        finish(differentiate(adapted, ops, pack(examples, 0), Dropout(0.5, 0, 0), lambda key, g: None))
        found.append(made)
    assert len(found[0]) > 300
    assert found[0] == found[1]


class LogitsMeter(Meter):
    most_logits = 0

    def take(self, kind, nbytes):
        super().take(kind, nbytes)
        self.most_logits = max(self.most_logits, self._held["logits"])


def test_an_evaluation_holds_the_logits_of_one_slice_of_the_head(model_dir):
    held = []
    for slices in (1, 3):
        model = open_model(model_dir, RowTrainingLane()).model
        meter, rows = LogitsMeter(), 128 * slices
        weights = {id(linear.weight): linear.shape for linear in model.linears.values()}
        weights[id(model.head.embedding.weight)] = (97, 40)
        ops = SizedOps(meter, weights)
        finish(
            score(
                replace(model, ops=ops),
                ops,
                pack([Example((1,) * (rows + 1), tuple(range(1, rows + 1)))], 0),
                digests=False,
            )
        )
        held.append(meter.most_logits)
    # Logits, their gradient, and a loss per row.
    assert held[0] == held[1] == 4 * 128 * (97 + 97 + 1)


def test_an_evaluation_of_more_than_a_step_is_counted(model_dir):
    many, one = (plan(model_dir, examples=1, longest=33, micro=size) for size in (None, 1))
    assert many.rows_at_once == one.rows_at_once == 32
    assert many.total > one.total + 512 * 97


def noting(name, function, done):
    def call(*arguments, **named):
        if done[-1:] != [name]:
            done.append(name)
        return function(*arguments, **named)

    return call


@pytest.mark.parametrize("what", ["step", "evaluation"])
def test_freed_memory_is_given_back_before_the_moments_that_hold_most(model_dir, what):
    lane, done = RowTrainingLane(), []
    for operator in ("release_freed", "cross_entropy", "adamw"):
        setattr(lane, operator, noting(operator, getattr(lane, operator), done))
    trainer = Trainer(open_model(model_dir, lane).model, lane, a_config(ALL_TARGETS), micro_batch_size=1)
    examples = [Example((1, 2, 3), (1, 2))] * 2
    finish(trainer.train_step(examples) if what == "step" else trainer.evaluate(examples, digests=False))
    heads = ["release_freed", "cross_entropy"] * 2
    assert done == heads + (["release_freed", "adamw"] if what == "step" else [])


def test_each_kind_is_counted(model_dir):
    memory = plan(model_dir, process=10 << 30)
    loaded = open_model(model_dir, RowTrainingLane())
    numbers = Trainer.plan_for(loaded.model, a_config(ALL_TARGETS, rank=4)).parameters
    assert memory.kinds["weights"] == 4 * loaded.plan.parameters
    assert memory.kinds["moments"] in (8 * numbers, 16 * numbers)
    assert memory.kinds["process"] == (10 << 30) - memory.kinds["weights"]
    assert memory.total == sum(memory.kinds.values())
    assert (memory.examples_at_once, memory.rows_at_once) == (4, 32)


def test_more_at_once_takes_more(model_dir):
    small, large = (plan(model_dir, longest=300, examples=8, micro=size) for size in (1, 8))
    assert (small.rows_at_once, large.rows_at_once) == (299, 2392)
    assert large.kinds["activations"] > 6 * small.kinds["activations"]
    assert plan(model_dir, longest=300, examples=8).rows_at_once == 299, "512 rows at once, if nobody says"
    dropping = ADAPTER.model_copy(update={"dropout": 0.1})
    assert plan(model_dir, adapter=dropping, longest=300).total > plan(model_dir, longest=300).total
    few, many = (plan(model_dir, examples=count, micro=1) for count in (2, 60_000))
    assert many.kinds["gradients"] > 8 * few.kinds["gradients"]


def a_model_of(vocabulary, folder):
    return write_model(folder, BY_FAMILY["qwen3"] | {"num_hidden_layers": 2, "vocab_size": vocabulary})


def test_what_is_free_goes_to_what_would_be_made_twice_and_the_total_stays_within(tmp_path):
    path = a_model_of(4096, tmp_path)

    def planned(memory):
        return plan(path, longest=300, examples=1, micro=1, memory=memory)

    least = planned(None)
    assert least.remember_bytes == 0
    assert "remembered" not in least.kinds
    assert planned(least.total) == least
    rooms = [least.total + (1 << i) for i in range(14, 24)]
    found = [planned(room) for room in rooms]
    for memory, before in zip(found[1:], found, strict=False):
        assert memory.remember_bytes >= before.remember_bytes
    for memory, room in zip(found, rooms, strict=True):
        assert memory.kinds.get("remembered", 0) == memory.remember_bytes
        assert memory.total == sum(memory.kinds.values()) <= room
        # What is remembered is all that comes on top, with its share of the reserve.
        assert memory.total == least.total + memory.remember_bytes * 17 // 16
    for remembered in {memory.remember_bytes for memory in found}:
        assert planned(least.total + remembered + 1).total <= least.total + remembered + 1
    assert len({memory.remember_bytes for memory in found}) > 3


def test_a_pass_grows_to_three_times_its_whole_logits_at_most(tmp_path):
    """With a tiny vocabulary it remembers nothing; with some, a part; with a large one, all."""
    remembered = []
    for vocabulary in (97, 512, 4096):
        memory = plan(a_model_of(vocabulary, tmp_path / str(vocabulary)), longest=300, memory=1 << 40)
        held = memory.kinds["activations"] + memory.kinds["logits"] + memory.remember_bytes
        assert held <= 3 * 4 * 299 * vocabulary or memory.remember_bytes == 0
        remembered.append(memory.remember_bytes)
    assert 0 == remembered[0] < remembered[1] < remembered[2]


@pytest.mark.parametrize("together", [1, 2, 3, 4, 8])
def test_a_tree_never_holds_more_sums_than_were_counted(together):
    from mens_core.training_plan import _most_partial_sums

    for examples in range(1, 70):
        tree, most = ExampleTree(lambda a, b: a + b), 0
        starts = [*range(0, examples, together), examples]
        for first, end in pairwise(starts):
            most = max(most, len(tree.nodes()))
            for _ in range(first, end):
                tree.push(1)
        assert most <= _most_partial_sums(examples, together), examples


def test_nothing_is_allocated(tmp_path):
    path = write_model(tmp_path, BY_FAMILY["qwen3"])
    adapter = ADAPTER.model_copy(update={"rank": 4096})
    ops = RowTrainingLane()
    loaded = open_model(path, ops)
    params = t.TrainPlanParams(adapter=adapter, longest_example=1000, examples=64, micro_batch_size=4)
    plan_step(params, loaded.model, ops, parameters=loaded.plan.parameters, process_bytes=None)
    tracemalloc.start()
    memory = plan_step(
        params, loaded.model, ops, parameters=loaded.plan.parameters, process_bytes=None
    ).memory
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory.total > 900 << 20
    assert most < 2 << 20


def test_what_can_t_be_trained_is_refused_as_it_would_be(model_dir):
    with pytest.raises(BackendError, match="no layer of this model that takes an update is called 'q_prj'"):
        plan(model_dir, adapter=ADAPTER.model_copy(update={"targets": ["q_prj"]}))
    with pytest.raises(BackendError, match="1025 tokens was asked about; the context is 1024"):
        plan(model_dir, longest=1025)


def run_program(program: str, *arguments: str) -> str:
    """What it prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import json, sys
from mens_core.adapters.plan import plan_adapter
from mens_core.training import answer_plan, begin_run
from mens_core.models.load import load_all
from mens_cpu_ref.training_lane import CpuTrainingOps
from mens_cpu_ref.library import load_library
from vox_plugin_api import messages as m, train_messages as t
from vox_plugin_api.checkpoint import Checkpoint, read_json_object
from vox_plugin_api.families import parse_config
from pathlib import Path

path, tokens = Path(sys.argv[1]), int(sys.argv[2])
config = parse_config(read_json_object(path / "config.json"))
ops = CpuTrainingOps(load_library())
loaded = load_all(config, Checkpoint.open(path), ops)
adapter = t.AdapterConfig(rank=int(sys.argv[4]), alpha=16.0, targets=sys.argv[3].split(","))
asked = t.TrainPlanParams(
    adapter=adapter, longest_example=tokens, examples=1, memory_bytes=int(sys.argv[6]) or None
)
told = answer_plan(asked, loaded, ops)
remember = told.observation["remember_bytes"]
assert bool(remember) == bool(asked.memory_bytes)
# From here on the high-water mark is the training's.
Path("/proc/self/clear_refs").write_text("5")
peaks = {}
def finish(what, work):
    for _ in work:
        pass
    mark(what)
def result_of(work):
    try:
        while True:
            next(work)
    except StopIteration as end:
        return end.value
def mark(what):
    status = Path("/proc/self/status").read_text().splitlines()
    peaks[what] = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
loaded_with = m.LoadModelParams(model_dir=str(path), model_digest="0" * 64)
begin = t.TrainBeginParams(
    adapter=adapter, optimizer=t.OptimizerConfig(learning_rate=1e-3), remember_bytes=remember
)
example = t.TrainExample(token_ids=list(range(100, 100 + tokens)), loss_mask=[False] + [True] * (tokens - 1))
for life in ("new", "resumed"):
    run = None  # A worker trains one adapter: a resumed life has no earlier run.
    run = result_of(begin_run(begin, loaded.model, ops, None, loaded_with=loaded_with, peers=None))
    mark(life + " begin")
    finish(life + " step", run.step(t.TrainStepParams(examples=[example])))
    folder = sys.argv[5] + "/" + life
    finish(life + " save", run.save(t.TrainSaveParams(folder=folder)))
    begin = t.TrainBeginParams(resume_dir=folder, remember_bytes=remember)
# Rows of two slices of the head.
finish("evaluation", run.evaluate(t.TrainEvaluateParams(examples=[example] * (160 // tokens))))
print(json.dumps({"peaks": peaks, "total": told.observation["total"]}))
"""


HOLES = """
import numpy as np
from mens_cpu_ref.library import load_library
from mens_cpu_ref.training_lane import CpuTrainingOps
from vox_plugin_api.resident import resident_bytes

ops = CpuTrainingOps(load_library())
# Small enough for the heap; what stays keeps it from shrinking by itself.
arrays = [np.ones(16_000, np.float32) for _ in range(1000)]
kept = arrays[::100] + arrays[-1:]
del arrays
before = resident_bytes()
ops.release_freed()
print(before - resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked to give pages back")
def test_the_cpu_lane_gives_freed_pages_back(request):
    every_lane.make_training_lane("mens-cpu-ref", request.config)
    assert int(run_program(HOLES)) > 40 << 20


@pytest.fixture(scope="module")
def demo_model(tmp_path_factory, request):
    every_lane.make_training_lane("mens-cpu-ref", request.config)
    return import_demo(demo_gguf(), tmp_path_factory.mktemp("demo"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the high-water mark is read from /proc")
@pytest.mark.parametrize(
    ("rank", "tokens", "targets", "memory"),
    [(8, 32, LAYER_TARGETS, 1 << 40), (64, 8, LAYER_TARGETS, 0), (16, 8, ("embed_tokens",), 0)],
)
def test_the_estimate_is_above_the_measured_peak_and_near_it(
    tmp_path, demo_model, rank, tokens, targets, memory
):
    """On the demo model, over begin, step, save, resume and evaluation: below it, by a fifth of it at most.

    Logits are most of what the small adapter takes; its own tensors, all in a save, of the large one.
    """
    arguments = (str(demo_model), str(tokens), ",".join(targets), str(rank), str(tmp_path), str(memory))
    found = json.loads(run_program(PROGRAM, *arguments))
    assert 0.8 * found["total"] <= max(found["peaks"].values()) <= found["total"], found


def test_several_devices_add_what_crosses_between_them(model_dir):
    alone, shared = plan(model_dir, examples=8), plan(model_dir, examples=8, devices=2)
    assert (alone.devices, shared.devices) == (1, 2)
    assert "transfer" not in alone.kinds
    numbers = Trainer.plan_for(
        open_model(model_dir, RowTrainingLane()).model, a_config(ALL_TARGETS)
    ).parameters
    # Nodes of a rank's sums: at most four of eight examples, of all tensors here.
    assert 0 < shared.kinds["transfer"] <= 4 * 4 * numbers
    assert shared.total == sum(shared.kinds.values()) >= alone.total + shared.kinds["transfer"]


def test_no_share_of_a_step_holds_more_sums_than_were_counted():
    from mens_core.training_plan import _most_nodes

    for examples in range(2, 40):
        for first in range(examples):
            tree = ExampleTree(lambda a, b: a + b, first=first)
            for _ in range(first, examples):
                tree.push(1)
                assert len(tree.nodes()) <= _most_nodes(examples)
