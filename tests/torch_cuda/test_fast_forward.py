"""Fast mode's operators on a CPU: whole models within what roundings to bfloat16 explain, and no bug is.

Between two sums each number is rounded to bfloat16 once: the inputs, the weight and the output of a product,
and what a norm, a rotation, a softmax and a gate make before it: six roundings, each even over its half unit
u = 2^-9, so u / sqrt(3) on average, and independent: sqrt(6 / 3) u together. Weights off by that much each,
with random signs, stand for them. Twice the mean error of the worst of three draws is allowed: a mean
over 150 x 97 logits is steady, and the bugs below are all above it.
"""

from __future__ import annotations

import functools

import gguf
import numpy as np
import pytest
import torch

from lanes.batches import Sequences
from lanes.quantised_model import write_both
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from mens_core.ops import StoredTensor
from mens_torch_cuda.fast import elementwise, rotary
from mens_torch_cuda.fast.attention import FastKvCache, Places
from mens_torch_cuda.fast.blocks import BLOCKS
from mens_torch_cuda.fast.ops import FastOps
from mens_torch_cuda.fast.recorded import Recorder, filled_up
from mens_torch_cuda.fast.weights import load_matrix, load_vector
from oracle.float64_forward import forward, settings_of
from vox_plugin_api.backend import BackendError
from vox_plugin_api.families import parse_config

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
ROUNDING = 2.0**-9
IDS = np.random.default_rng(5).integers(0, 97, 150).tolist()


def an_ops() -> FastOps:
    return FastOps(CPU, facts={})


@functools.cache
def exact(family: str) -> tuple[np.ndarray, float]:
    """Logits [150, 97] in float64, and the mean error that roundings explain."""
    config = BY_FAMILY[family]
    tensors = {n.removeprefix("model."): t for n, t in random_tensors(parse_config(config), 3).items()}
    head = "lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"

    def logits(of: dict[str, np.ndarray]) -> np.ndarray:
        return forward(settings_of(config), of.__getitem__, lambda _: of[head], IDS)

    right, worst = logits(tensors), 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        moved = {
            name: w.astype(np.float64) * (1 + rng.choice((-1, 1), w.shape) * np.sqrt(6 / 3) * ROUNDING)
            for name, w in sorted(tensors.items())
        }
        worst = max(worst, mean_error(logits(moved), right))
    return right, 2 * worst


def mean_error(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.square(found.astype(np.float64) - right).mean()))


@pytest.fixture(scope="module", params=list(BY_FAMILY))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(family, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(family), BY_FAMILY[family], seed=3)


def in_one_go(model) -> np.ndarray:
    batch = Sequences().step([(0, IDS)], all_logits=True)
    return model.ops.to_host(model.forward(batch, model.new_cache(4)).logits)


def in_pieces(model) -> np.ndarray:
    """Chunks beside another sequence, then token by token: every path through cache and attention."""
    sequences, cache, made = Sequences(), model.new_cache(8), []
    for first, last in ((0, 100), (100, 146)):
        batch = sequences.step([(0, IDS[first:last]), (1, IDS[first // 2 : 60])], all_logits=True)
        made.append(model.ops.to_host(model.forward(batch, cache).logits)[: last - first])
    for at in range(146, 150):
        batch = sequences.step([(1, [3]), (0, [IDS[at]])], all_logits=True)
        made.append(model.ops.to_host(model.forward(batch, cache).logits)[1:])
    return np.concatenate(made)


@pytest.mark.parametrize("way", [in_one_go, in_pieces])
def test_logits_are_as_near_as_bfloat16_allows(way, family, model_dir):
    right, allowed = exact(family)
    assert mean_error(way(open_model(model_dir, an_ops()).model), right) < allowed
    assert allowed < 0.1 * np.sqrt(np.square(right).mean()), "a bound that allows everything proves nothing"


BUGS = ["no-rotation", "one-off", "no-scale", "first-head", "stale-block"]


@pytest.mark.parametrize("bug", [*BUGS, "no-window"])
def test_a_bug_is_beyond_it(bug, family, model_dir, monkeypatch):
    plant(bug, monkeypatch)
    right, allowed = exact(family)
    found = mean_error(in_pieces(open_model(model_dir, an_ops()).model), right)
    # Qwen3 has no window that could be forgotten.
    is_there = bug != "no-window" or family == "gemma3"
    assert (found > allowed) == is_there


def plant(bug: str, monkeypatch) -> None:
    from mens_torch_cuda.fast import ops as module

    heads, decode, prefill = elementwise.heads, module.decode_attention, module.prefill_attention
    if bug == "no-rotation":
        unturned = lambda x, w, eps, c, s, at: heads(x, w, eps, c, s, at * 0)  # noqa: E731
        monkeypatch.setattr(elementwise, "heads", unturned)
    if bug == "one-off":
        # Of the keys alone: rotation is relative.
        moved = lambda x, w, eps, c, s, at: heads(x, w, eps, c, s, at + (x.shape[1] == 2))  # noqa: E731
        monkeypatch.setattr(elementwise, "heads", moved)
    if bug in ("no-window", "no-scale"):
        import dataclasses

        changed = {"window": None} if bug == "no-window" else {"scale": 1.0}
        other = lambda of: lambda *a: of(*a[:-1], dataclasses.replace(a[-1], **changed))  # noqa: E731
        monkeypatch.setattr(module, "decode_attention", other(decode))
        monkeypatch.setattr(module, "prefill_attention", other(prefill))
    if bug == "first-head":
        same = lambda q, k, v, *rest: prefill(q, k[:, :1].expand_as(k), v, *rest)  # noqa: E731
        monkeypatch.setattr(module, "prefill_attention", same)
    if bug == "stale-block":
        append = FastOps.kv_append

        def late(self, cache, layer, k, v, batch):
            keys = cache.keys[layer].clone()
            append(self, cache, layer, k, v, batch)
            cache.keys[layer] = keys

        monkeypatch.setattr(FastOps, "kv_append", late)


def test_a_softcap_of_attention_counts_in_every_path(tmp_path):
    capped = write_model(tmp_path / "a", BY_FAMILY["gemma3"] | {"attn_logit_softcapping": 0.3}, seed=3)
    model = open_model(capped, an_ops()).model
    plain = open_model(write_model(tmp_path / "b", BY_FAMILY["gemma3"], seed=3), an_ops()).model
    allowed = exact("gemma3")[1]
    assert (
        mean_error(in_pieces(model), in_one_go(model))
        < allowed
        < mean_error(in_pieces(model), in_one_go(plain))
    )


def test_quantised_weights_are_those_of_the_dequantised_model(tmp_path):
    config = BY_FAMILY["qwen3"] | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    quantised, plain = (open_model(path, an_ops()).model for path in write_both(tmp_path, config))
    np.testing.assert_array_equal(in_one_go(quantised), in_one_go(plain))


@pytest.mark.parametrize("name", list(BLOCKS))
def test_blocks_are_widened_as_the_reference_does(name):
    kind = gguf.GGMLQuantizationType[name.upper()]
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (40, BLOCKS[name].nbytes), np.uint8)
    # Scales that are numbers; all else may be any bits.
    halves = rng.normal(0, 1, (40, 2)).astype(np.float16).view(np.uint8)
    places = {"q6_k": (208,), "q4_k": (0, 2), "q5_k": (0, 2)}.get(name, (0,))
    for number, at in enumerate(places):
        blocks[:, at : at + 2] = halves[:, 2 * number : 2 * number + 2]
    found = BLOCKS[name].widen(torch.from_numpy(blocks))
    np.testing.assert_array_equal(found.numpy(), gguf.quants.dequantize(blocks, kind))


def stored(values: np.ndarray, form: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
    return StoredTensor("layers.0.a", form, shape or values.shape, memoryview(values).cast("B"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (stored(np.array([[1.0, np.inf]], np.float32), "f32"), "weights-not-finite"),
        (stored(np.array([[1.0, 3.4e38]], np.float32), "f32"), "weights-not-finite"),
        (stored(np.ones((2, 3), np.float32), "f32", (2, 4)), "tensor-size"),
        (stored(np.zeros(33, np.uint8), "q8_0", (1, 32)), "tensor-size"),
        (stored(np.full(34, 255, np.uint8), "q8_0", (1, 32)), "weights-not-finite"),
    ],
)
def test_weights_that_can_t_be_are_refused_by_name(tensor, code):
    with pytest.raises(BackendError) as caught:
        load_matrix(CPU, tensor)
    assert (caught.value.error.code, caught.value.error.facts["tensor"]) == (code, "layers.0.a")


def test_a_norm_s_one_is_added_in_float32():
    weight = np.array([2.0**-12, 0.5], np.float32)
    found = load_vector(CPU, stored(weight, "f32"), plus_one=True)
    assert found.tolist() == [1 + 2.0**-12, 1.5]
    with pytest.raises(BackendError, match="float vector"):
        load_vector(CPU, stored(np.zeros(34, np.uint8), "q8_0", (32,)), plus_one=False)


def test_a_value_that_is_not_finite_fails_its_row_alone(model_dir):
    model = open_model(model_dir, an_ops()).model
    sequences, cache = Sequences(), model.new_cache(4)
    model.forward(sequences.step([(0, IDS[:20]), (1, IDS[:20])]), cache)
    cache.values[1, 0, :, 3] = torch.inf
    result = model.forward(sequences.step([(0, [1]), (1, [2])]), cache)
    assert [(fault.row, fault.name) for fault in result.faults] == [(0, "layers")]


@pytest.mark.parametrize("count", [1, 3, 5, 17])
def test_a_decode_step_may_be_filled_up_with_rows_of_nobody(count, family, model_dir):
    """What a recorded step does: others' logits stay, and nobody's block is written."""
    model = open_model(model_dir, an_ops()).model
    sequences, cache = Sequences(), model.new_cache(2 * count + 1)
    model.forward(sequences.step([(i, IDS[i : i + 126 + i % 4]) for i in range(count)]), cache)
    batch = sequences.step([(i, [7 + i]) for i in range(count)])
    filled = filled_up(batch, cache.spare)
    assert len(filled.positions) in (1, 4, 8, 24)
    plain = FastKvCache(cache.keys.clone(), cache.values.clone())
    found = model.ops.to_host(model.forward(filled, cache).logits)[:count]
    assert mean_error(found, model.ops.to_host(model.forward(batch, plain).logits)) < exact(family)[1]
    written = (cache.keys[:, :-1] - plain.keys[:, :-1]).abs().amax((0, 2, 4)) > 0.25
    assert not written.any(), "a row of nobody wrote where somebody's keys are"


class Recordings:
    """Stands in for the recorder, which needs a GPU: what it would replay when it is asked."""

    takes = staticmethod(Recorder.takes)

    def __init__(self):
        self.forgotten = 0

    def forget(self):
        self.forgotten += 1

    def run(self, run, step, batch, cache):
        return run(step, Places.of(batch, torch.device("cpu")), cache)


@pytest.mark.parametrize("by", ["a prompt", "a decode step", "an operator alone"])
def test_recorded_steps_are_forgotten_when_the_angles_have_moved(by, model_dir, monkeypatch):
    """A replay reads the memory that was theirs when it was recorded."""
    monkeypatch.setattr(rotary, "_FIRST", 4)
    ops = an_ops()
    model = open_model(model_dir, ops).model
    ops._recorder = recordings = Recordings()
    sequences, cache = Sequences(), model.new_cache(4)
    model.forward(sequences.step([(0, IDS[:2])]), cache)
    model.forward(sequences.step([(0, [1])]), cache)
    before = recordings.forgotten
    model.forward(sequences.step([(0, [2])]), cache)
    assert recordings.forgotten == before, "positions 2 and 3 are held by the same tables"
    if by == "a prompt":
        model.forward(sequences.step([(1, IDS[:40])]), cache)
    elif by == "an operator alone":
        ops._tables[-1].reach(40)
    model.forward(sequences.step([(0, [3])]), cache)
    assert recordings.forgotten == before + 1


def test_choosing_follows_the_contract(model_dir):
    ops = an_ops()
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [9.0, -2.0, 4.0, 9.0]])
    assert ops.argmax(logits).tolist() == [1, 0]
    weights = ops.token_weights(logits, 0, 2.0)
    assert weights.dtype == np.uint64 and weights[1] == 2**32
    assert weights[0] == int(np.floor(np.exp(-1.5) * 2**32))
    expected = np.log(np.exp(logits.numpy().astype(np.float64)).sum(1))
    np.testing.assert_allclose(ops.log_normaliser(logits), expected, rtol=1e-6)
    by = np.array([2.0, 2.0], np.float32)
    ops.penalise(logits, 1, np.array([0, 1], np.int32), repetition=by, subtract=by / 4)
    assert logits[1].tolist() == [4.0, -4.5, 4.0, 9.0] and ops.take_faults() == []
    ops.penalise(
        logits, 0, np.array([1], np.int32), repetition=by[:1], subtract=np.array([np.inf], np.float32)
    )
    assert [fault.rows for fault in ops.take_faults()] == [(0,)] and ops.take_faults() == []
