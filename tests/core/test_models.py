"""The models over a plain numpy lane: shape of a step, caches, faults, and no bug left unseen."""

import dataclasses
import functools

import numpy as np
import pytest

from lanes.batches import Sequences
from lanes.counting_lane import CountingLane
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from mens_core.models.load import Progress, load
from mens_core.models.model import RowFault
from mens_core.ops import Ops
from oracle.float64_forward import settings_of
from oracle.rounding import logit_bound
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families import parse_config

FAMILIES = list(BY_FAMILY)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model_dir(family, tmp_path):
    return write_model(tmp_path, BY_FAMILY[family], seed=3)


def some_ids(count, seed=5):
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


def all_logits(model, ids):
    return model.forward(Sequences().step([(0, ids)], all_logits=True), model.new_cache(4)).logits


def test_a_step_of_many_sequences_calls_each_matmul_once_with_all_rows(family, model_dir):
    lane = CountingLane()
    model = open_model(model_dir, lane).model
    sequences, cache = Sequences(), model.new_cache(16)
    model.forward(sequences.step([(0, some_ids(130)), (1, some_ids(3))]), cache)
    lane.linears.clear()
    rows = [(0, some_ids(1)), (1, some_ids(40)), (2, some_ids(1)), (3, some_ids(7))]
    result = model.forward(sequences.step(rows), cache)

    assert set(lane.calls_per_name().values()) == {1}
    layers = model.config.layers
    assert len(lane.linears) == 7 * layers + 1
    assert {n for name, n in lane.linears if name != "lm_head"} == {49}
    assert dict(lane.linears)["lm_head"] == 4, "the head sees the wanted rows alone"
    assert result.logits.shape == (4, 97)
    last = f"layers.{layers - 1}"
    assert {f"{last}.self_attn.q_proj", f"{last}.mlp.down_proj"} <= set(dict(lane.linears))


def test_projections_of_one_input_are_offered_as_one_fusion(model_dir):
    lane = CountingLane()
    model = open_model(model_dir, lane).model
    all_logits(model, some_ids(4))
    assert len(lane.fused) == 2 * model.config.layers
    assert lane.fused[0] == tuple(f"layers.0.self_attn.{p}_proj" for p in "qkv")
    assert lane.fused[1] == ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")


def test_a_step_without_wanted_logits_never_runs_the_head(model_dir):
    lane = CountingLane()
    model = open_model(model_dir, lane).model
    batch = dataclasses.replace(Sequences().step([(0, some_ids(9))]), logit_rows=np.array([], np.int32))
    assert model.forward(batch, model.new_cache(1)).logits is None
    assert "lm_head" not in lane.calls_per_name()


def test_float32_logits_are_within_the_rounding_bound_of_the_exact_ones(family, model_dir):
    ids = some_ids(150)
    exact, bound = exact_logits(family, ids)
    found = all_logits(open_model(model_dir, NumpyLane()).model, ids)
    assert bound < 2e-3, "a bound that allows everything proves nothing"
    assert np.abs(found - exact).max() < bound


def test_attention_softcap_is_applied_where_a_config_asks_for_it(tmp_path):
    config = BY_FAMILY["gemma3"] | {"attn_logit_softcapping": 3.0}
    ids = some_ids(150)
    exact, bound = exact_logits("gemma3", ids, 3.0)
    found = all_logits(open_model(write_model(tmp_path, config, seed=3), NumpyLane()).model, ids)
    assert np.abs(found - exact).max() < bound
    assert np.abs(exact - exact_logits("gemma3", ids)[0]).max() > 2 * bound


def exact_logits(family, ids, softcap=None):
    return _exact_logits(family, tuple(ids), softcap)


@functools.cache
def _exact_logits(family, ids, softcap):
    config = BY_FAMILY[family] | ({"attn_logit_softcapping": softcap} if softcap else {})
    tensors = random_tensors(parse_config(config), 3)
    named = {name.removeprefix("model."): t for name, t in tensors.items()}
    head = "lm_head.weight" if "lm_head.weight" in named else "embed_tokens.weight"
    return logit_bound(settings_of(config), named, head, ids)


class Planted(NumpyLane):
    """A lane or a config with one classic bug."""

    def __init__(self, bug):
        super().__init__()
        self.bug = bug

    def head_norm(self, x, weight, heads, eps, *, name):
        if self.bug == "no-head-norm" or (self.bug == "no-k-norm" and "k_norm" in name):
            return x
        return super().head_norm(x, weight, heads, eps, name=name)

    def rope(self, x, heads, table, positions, *, name):
        if self.bug == "no-rope":
            return x
        if self.bug == "rope-off-by-one" and "k_rope" in name:
            positions = positions + 1
        if self.bug == "interleaved-rope":
            width = x.shape[1] // heads
            order = np.arange(width).reshape(-1, 2).T.ravel()
            pairs = x.reshape(len(x), heads, width)[..., order].reshape(x.shape)
            return super().rope(pairs, heads, table, positions, name=name)
        return super().rope(x, heads, table, positions, name=name)

    def attention(self, q, cache, layer, batch, spec, *, name):
        if self.bug == "window-off-by-one" and spec.window:
            spec = dataclasses.replace(spec, window=spec.window + 1)
        if self.bug == "no-window":
            spec = dataclasses.replace(spec, window=None)
        if self.bug == "heads-shared-in-turn":
            shape = (len(q), -1, spec.kv_heads, spec.head_dim)
            q = q.reshape(shape).swapaxes(1, 2).reshape(q.shape)
        return super().attention(q, cache, layer, batch, spec, name=name)

    def silu_gate(self, gate, up, *, name):
        if self.bug == "gate-and-up-swapped":
            gate, up = up, gate
        if self.bug == "other-activation":
            return super().gelu_gate(gate, up, name=name)
        return super().silu_gate(gate, up, name=name)

    def gelu_gate(self, gate, up, *, name):
        if self.bug == "gate-and-up-swapped":
            gate, up = up, gate
        if self.bug == "other-activation":
            return super().silu_gate(gate, up, name=name)
        return super().gelu_gate(gate, up, name=name)


LANE_BUGS = ["no-head-norm", "no-k-norm", "no-rope", "rope-off-by-one", "interleaved-rope"]
LANE_BUGS += ["heads-shared-in-turn", "gate-and-up-swapped", "other-activation"]
GEMMA_LANE_BUGS = ["window-off-by-one", "no-window"]
GEMMA_CONFIG_BUGS = {
    "no-embed-scale": {"embed_scale": None},
    "no-plus-one": {"norm_plus_one": False},
    "no-logit-softcap": {"logit_softcap": None},
    "scale-from-head-dim": {"attention_scale": 0.25},
    "attention-softcap": {"attention_softcap": 5.0},
    "eps": {"rms_eps": 1e-5},
    "layers-shifted": {"attention_kinds": ("full", *["sliding"] * 5, "full")},
}


@pytest.mark.parametrize("bug", LANE_BUGS)
def test_a_planted_bug_in_an_operator_is_out_of_bounds(family, model_dir, bug):
    ids = some_ids(150)
    exact, bound = exact_logits(family, ids)
    assert np.abs(all_logits(open_model(model_dir, Planted(bug)).model, ids) - exact).max() > 2 * bound


@pytest.mark.parametrize("bug", [*GEMMA_LANE_BUGS, *GEMMA_CONFIG_BUGS, "local-theta", "local-scaling"])
def test_a_planted_bug_in_gemma_is_out_of_bounds(tmp_path, bug):
    path = write_model(tmp_path, BY_FAMILY["gemma3"], seed=3)
    ids = some_ids(150)
    exact, bound = exact_logits("gemma3", ids)
    config = parse_config(BY_FAMILY["gemma3"])
    config = dataclasses.replace(config, **GEMMA_CONFIG_BUGS.get(bug, {}))
    full, sliding = config.ropes["full"], config.ropes["sliding"]
    if bug == "local-theta":
        config = dataclasses.replace(config, ropes={"full": full, "sliding": full})
    if bug == "local-scaling":
        scaled = dataclasses.replace(sliding, scaling=full.scaling)
        config = dataclasses.replace(config, ropes={"full": full, "sliding": scaled})
    steps = load(config, Checkpoint.open(path), Planted(bug))
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            model = stop.value.model
            break
    assert np.abs(all_logits(model, ids) - exact).max() > 2 * bound


def test_chunks_and_company_change_rounding_at_most(family, model_dir):
    """On numpy; lanes with defined bits promise more (tests/conformance)."""
    model = open_model(model_dir, NumpyLane()).model
    ids, other = some_ids(200), some_ids(150, seed=8)
    whole = all_logits(model, ids)
    sequences, cache = Sequences(), model.new_cache(8)
    pieces = []
    for begin, end in [(0, 1), (1, 100), (100, 128), (128, 129), (129, 200)]:
        rows = [(7, other[begin // 2 : end // 2]), (0, ids[begin:end])]
        rows = [row for row in rows if row[1]]
        batch = sequences.step(rows, all_logits=True)
        pieces.append(model.forward(batch, cache).logits[-(end - begin) :])
    _, bound = exact_logits(family, ids)
    assert np.abs(np.concatenate(pieces) - whole).max() < bound


def test_a_fault_is_reported_for_its_row_by_the_name_of_what_was_made(model_dir):
    lane = FaultyLane("layers.1.mlp.up_proj", row=4)
    model = open_model(model_dir, lane).model
    sequences, cache = Sequences(), model.new_cache(8)
    rows = [(0, some_ids(3)), (1, some_ids(4)), (2, some_ids(2))]
    clean = open_model(model_dir, NumpyLane()).model
    expected = clean.forward(Sequences().step(rows), clean.new_cache(8)).logits

    result = model.forward(sequences.step(rows), cache)
    # Rows 4, 5 and 6 are sequence 1's from the broken position on.
    assert result.faults[0] == RowFault(4, "layers.1.mlp.up_proj")
    assert {fault.row for fault in result.faults} == {4, 5, 6}
    for row in (0, 2):
        assert result.logits[row].tobytes() == expected[row].tobytes(), "other sequences are not touched"
    assert model.forward(sequences.step([(3, some_ids(2))]), cache).faults == (), "and it is forgotten"


def test_a_fault_in_the_head_is_reported_for_the_row_of_the_batch(model_dir):
    lane = FaultyLane("lm_head", row=1)
    model = open_model(model_dir, lane).model
    rows = [(0, some_ids(3)), (1, some_ids(4)), (2, some_ids(2))]
    result = model.forward(Sequences().step(rows), model.new_cache(8))
    assert [fault.row for fault in result.faults] == [6]
    assert result.faults[0].name == "lm_head"


class FaultyLane(NumpyLane):
    """Makes one row of one product infinite."""

    def __init__(self, name, row):
        super().__init__()
        self.target, self.row = name, row

    def linear(self, x, weight, *, name):
        y = super().linear(x, weight, name=name)
        if name == self.target and len(y) > self.row:
            y[self.row, 3] = np.inf
            self._checked(name, y)
        return y


@pytest.fixture(autouse=True)
def _quiet_infinities(request):
    if "fault" in request.node.name:
        with np.errstate(invalid="ignore", over="ignore"):
            yield
    else:
        yield


def test_loading_can_be_watched_layer_by_layer(family, model_dir):
    config = parse_config(BY_FAMILY[family])
    layers = config.layers
    steps = list(load(config, Checkpoint.open(model_dir), NumpyLane()))
    assert steps == [Progress(i, layers) for i in range(layers)]


def test_the_lane_supplies_the_abstract_operators_and_nothing_else():
    public = {name for name, value in vars(NumpyLane).items() if callable(value) and name[0] != "_"}
    public -= {"float"}  # the type it computes in
    assert public == Ops.__abstractmethods__
