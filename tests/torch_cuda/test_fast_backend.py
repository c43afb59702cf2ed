"""Fast mode through the protocol, on a CPU in the GPU's place: named, measured, and never by itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from lanes.numpy_training import NumpyTrainingLane
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import LAYER_TARGETS, some_examples
from mens_core.backend import MensBackend
from mens_core.kv_plan import plan_kv_cache
from mens_core.numerics_error import compare_logits
from mens_core.peers.wire import PeerSetup
from mens_torch_cuda.fast.mode import STEP_ROWS, fast_mode
from mens_torch_cuda.fast.ops import FastOps
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendError, BackendInfo

pytestmark = pytest.mark.usefixtures("one_thread")

DIGEST = "ab" * 32
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest=DIGEST)
CAPABILITIES = ("generate", "evaluate", "trace", "train", "adapters")
INFO = BackendInfo("mens-test", "1.0.0", "cuda", ("canonical", "fast"), CAPABILITIES)
ADAPTER = t.AdapterConfig(rank=4, alpha=8.0, targets=list(LAYER_TARGETS))


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model_dir(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), BY_FAMILY[request.param], seed=3)


def a_backend(**options) -> MensBackend:
    fast = fast_mode(torch.device("cpu"), facts={"device": "a CPU"}, **options)
    return MensBackend(INFO, lambda params: NumpyTrainingLane(), lambda: PASSED, fast=fast)


def answer(stream):
    """The last reply of a request."""
    return [reply for reply in stream if reply is not None][-1]


def load(backend: MensBackend, path: Path, numerics="fast", **more):
    params = m.LoadModelParams(model_dir=str(path), model_digest=DIGEST, numerics=numerics, **more)
    return answer(backend.load_model(params))


def tokens(backend: MensBackend, **sampling) -> list[int]:
    params = m.GenerateParams(
        token_ids=[5, 17, 3, 60], max_tokens=12, sampling=m.SamplingParams(**sampling), logprobs=2
    )
    replies = [reply for reply in backend.generate(params) if reply is not None]
    assert replies[-1].result.finish_reason == "length"
    return [token.token_id for reply in replies for token in reply.result.tokens]


def test_the_load_report_names_the_numerics_and_how_far_they_are_from_canonical(model_dir):
    reply = load(a_backend(), model_dir)
    found = reply.result.numerics_error
    assert (reply.result.numerics, found.positions) == ("fast", 96)
    assert 0 < found.max_logit_difference < 3 and 0 < found.mean_kl < 0.2
    assert 0.8 < found.equal_argmax <= 1
    assert reply.observation["lane"]["weights"] == "bfloat16" and reply.observation["measured_s"] > 0
    # The same numbers again: they are of the model and the lane.
    assert load(a_backend(), model_dir).result == reply.result
    canonical = load(a_backend(), model_dir, "canonical")
    assert (canonical.result.numerics, canonical.result.numerics_error) == ("canonical", None)
    assert "measured_s" not in canonical.observation


def test_canonical_is_what_a_load_gets_that_asks_for_nothing(model_dir):
    backend = a_backend()
    reply = answer(backend.load_model(m.LoadModelParams(model_dir=str(model_dir), model_digest=DIGEST)))
    assert reply.result.numerics == "canonical"
    assert isinstance(backend._served.ops, NumpyTrainingLane)


def test_a_worse_lane_is_measured_as_worse(model_dir, monkeypatch):
    right = load(a_backend(), model_dir).result.numerics_error
    add = FastOps.add
    monkeypatch.setattr(FastOps, "add", lambda self, a, b, *, name: add(self, a, b * 4, name=name))
    wrong = load(a_backend(), model_dir).result.numerics_error
    assert wrong.mean_kl > 4 * right.mean_kl and wrong.max_logit_difference > right.max_logit_difference


def test_what_is_compared_is_what_it_is_called():
    canonical = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])).astype(np.float32)
    fast = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])).astype(np.float32) + np.float32(1)
    found = compare_logits(canonical, fast)
    assert (found.positions, found.equal_argmax) == (2, 0.5)
    assert found.max_logit_difference == pytest.approx(1 + np.log(2), rel=1e-6)
    # (0.5 - 0.25) log 2 of the first row; a shift of all logits is no divergence.
    assert found.mean_kl == pytest.approx(0.25 * np.log(2) / 2, rel=1e-6)


def test_both_kinds_of_answers_come_from_the_same_engine(model_dir):
    backend = a_backend()
    load(backend, model_dir)
    greedy = tokens(backend, temperature=0)
    assert greedy == tokens(backend, temperature=0) and len(greedy) == 12
    drawn = tokens(backend, temperature=1.5, seed=4)
    assert drawn == tokens(backend, temperature=1.5, seed=4)
    assert drawn != tokens(backend, temperature=1.5, seed=5)
    penalised = tokens(backend, temperature=0, presence_penalty=2.0)
    assert len(set(penalised)) > len(set(greedy)) or set(greedy) == set(penalised)
    assert backend._served.engine._limits.rows == STEP_ROWS


def test_a_prompt_goes_on_from_blocks_of_its_own_load_alone(model_dir):
    """Fast mode has blocks of other bits: reused within a load, and never of a canonical one."""
    backend = a_backend()
    prompt = [(i * i + 3) % 97 for i in range(200)]
    params = m.GenerateParams(
        token_ids=prompt, max_tokens=2, sampling=m.SamplingParams(temperature=0), logprobs=0
    )

    def asked() -> tuple[int, list[float]]:
        replies = [reply for reply in backend.generate(params) if reply is not None]
        tokens = [token for reply in replies for token in reply.result.tokens]
        return replies[-1].observation["cached_tokens"], [token.logprob for token in tokens]

    found = {}
    for numerics in ("fast", "canonical", "fast"):
        load(backend, model_dir, numerics)
        (first, fresh), (second, again) = asked(), asked()
        assert (first, second) == (0, 128)
        # The same rows by other kernels, in fast mode: as near as a few roundings to bfloat16.
        assert again == (pytest.approx(fresh, abs=0.2) if numerics == "fast" else fresh)
        found[numerics] = fresh
        backend.unload(m.UnloadParams())
    assert found["fast"] != found["canonical"]


def test_a_trace_shows_every_operator(model_dir):
    backend = a_backend()
    load(backend, model_dir)
    reply = answer(backend.trace(m.TraceParams(token_ids=[1, 2, 3], slices=["layers.0.self_attn.q_norm"])))
    names = [made.name for made in reply.result.operators]
    assert {"embed_tokens", "layers.0.self_attn.q_norm", "layers.0.mlp.gated", "lm_head"} <= set(names)


def test_the_cache_is_half_as_large(model_dir):
    backend = a_backend()
    reply = load(backend, model_dir, memory_bytes=1 << 20)
    halves = reply.observation["kv_cache"]["block_bytes"]
    assert 2 * halves == load(a_backend(), model_dir, "canonical").observation["kv_cache"]["block_bytes"]
    config = backend._served.config
    assert halves == 2 * config.layers * config.kv_heads * config.head_dim * 128 * 2
    params = m.LoadModelParams(model_dir="", model_digest=DIGEST)
    assert plan_kv_cache(config, params, value_bytes=2).block_bytes == halves


def test_what_the_device_refuses_is_refused_before_a_weight_is_read(model_dir):
    def refuse(params):
        raise BackendError("insufficient-memory", "no room")

    backend = a_backend(prepare=refuse)
    with pytest.raises(BackendError, match="no room"):
        load(backend, model_dir)
    assert load(backend, model_dir, "canonical").result.numerics == "canonical"


def test_a_lane_without_fast_mode_refuses_it_and_says_what_to_do(model_dir):
    info = BackendInfo("mens-test", "1.0.0", "cpu", ("canonical",), CAPABILITIES)
    backend = MensBackend(info, lambda params: NumpyTrainingLane(), lambda: PASSED)
    with pytest.raises(BackendError) as caught:
        load(backend, model_dir)
    found = caught.value.error
    assert (found.code, found.facts["supported"]) == ("not-supported", ["canonical"])
    assert "canonical" in found.remedy and "vox-host plugin list" in found.remedy


# --- training ------------------------------------------------------------------------------------


def begun(path: Path, numerics="fast", **begin) -> MensBackend:
    backend = a_backend()
    load(backend, path, numerics)
    if not begin:
        begin = {"adapter": ADAPTER, "optimizer": t.OptimizerConfig(learning_rate=1e-2), "seed": 3}
    answer(backend.train_begin(t.TrainBeginParams(**begin)))
    return backend


def step(backend: MensBackend) -> t.TrainStepResult:
    return answer(backend.train_step(t.TrainStepParams(examples=some_examples((20, 9, 30))))).result


def test_a_run_is_begun_saved_and_resumed_as_any_other(model_dir, tmp_path):
    backend = begun(model_dir)
    losses = [step(backend).loss for _ in range(3)]
    assert losses[2] < losses[0]
    saved = answer(backend.train_save(t.TrainSaveParams(folder=str(tmp_path / "3")))).result
    assert {path.name for path in (tmp_path / "3").iterdir()} == set(saved.files)
    assert json.loads((tmp_path / "3/state.json").read_text())["numerics"] == "fast"
    fourth = step(backend)
    again = step(begun(model_dir, resume_dir=str(tmp_path / "3")))
    assert again == fourth and fourth.step == 4
    scored = [r for r in backend.train_evaluate(t.TrainEvaluateParams(examples=some_examples((20, 9)))) if r]
    assert [r.result.index for r in scored] == [0, 1]


@pytest.mark.parametrize(("first", "then"), [("fast", "canonical"), ("canonical", "fast")])
def test_a_run_never_goes_on_in_other_numerics(first, then, model_dir, tmp_path):
    answer(begun(model_dir, first).train_save(t.TrainSaveParams(folder=str(tmp_path / "0"))))
    with pytest.raises(BackendError) as caught:
        begun(model_dir, then, resume_dir=str(tmp_path / "0"))
    found = caught.value.error
    assert (found.code, found.facts["expected"], found.facts["found"]) == ("resume-mismatch", then, first)


def test_a_canonical_save_says_nothing_new(model_dir, tmp_path):
    answer(begun(model_dir, "canonical").train_save(t.TrainSaveParams(folder=str(tmp_path / "0"))))
    assert "numerics" not in json.loads((tmp_path / "0/state.json").read_text())


def test_an_adapter_is_served_as_it_was_trained(model_dir, tmp_path):
    """Serving's logprobs are evaluation's losses, but for rounding; and not the base's."""
    optimizer = t.OptimizerConfig(learning_rate=0.1)
    trained = begun(model_dir, adapter=ADAPTER, optimizer=optimizer)
    for _ in range(8):
        step(trained)
    saved = answer(trained.train_save(t.TrainSaveParams(folder=str(tmp_path / "8")))).result
    example = some_examples((20, 9, 30))[2]
    told = answer(trained.train_evaluate(t.TrainEvaluateParams(examples=[example]))).result
    keys = keys_of(trained)
    adapter = m.AdapterParams(
        file=str(tmp_path / "8/adapter.safetensors"), digest=saved.files["adapter.safetensors"],
        config=ADAPTER, key_map={key: key for key in keys},
    )  # fmt: skip
    losses = {}
    for name, more in (("adapted", {"adapter": adapter}), ("base", {})):
        backend = a_backend()
        reply = load(backend, model_dir, **more)
        assert reply.result.adapter_digest == (saved.adapter_digest if more else None)
        assert reply.result.numerics_error is not None
        scored = answer(backend.evaluate(m.EvaluateParams(sequences=[example.token_ids], top_logprobs=1)))
        pairs = zip(scored.result.tokens, example.loss_mask, strict=True)
        losses[name] = -sum(token.logprob for token, is_learned in pairs if is_learned)
    off = abs(losses["adapted"] - told.loss)
    assert off < 0.03 * told.loss and off < 0.2 * abs(losses["base"] - told.loss)


def test_copies_of_base_weights_are_held_against_the_file_s_not_their_roundings(model_dir, tmp_path):
    """Fast weights are rounded: no copy equals them, and one that is wrong by less would."""
    trained = begun(model_dir)
    answer(trained.train_save(t.TrainSaveParams(folder=str(tmp_path / "0"))))
    update = load_file(tmp_path / "0/adapter.safetensors")
    weights = load_file(model_dir / "model.safetensors")
    (table,) = (x for name, x in weights.items() if name.endswith("embed_tokens.weight"))
    file = tmp_path / "with-copy.safetensors"

    def load_with(copy: np.ndarray) -> m.LoadResult:
        save_file({**update, "copy": copy}, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        adapter = m.AdapterParams(
            file=str(file), digest=digest, config=ADAPTER, key_map={key: key for key in keys_of(trained)},
            base_copies={"embed_tokens": "copy"},
        )  # fmt: skip
        return load(a_backend(), model_dir, adapter=adapter).result

    assert load_with(table).numerics == "fast"
    table[3, 1] = np.nextafter(table[3, 1], np.float32(9))
    with pytest.raises(BackendError, match="row 3 differs first"):
        load_with(table)


def keys_of(backend: MensBackend) -> list[str]:
    return list(backend._training._trainer.plan.shapes)


def test_several_devices_are_refused_whoever_asks(model_dir):
    backend = a_backend()
    load(backend, model_dir)
    backend.peers = a_setup_of_many()
    plan = t.TrainPlanParams(adapter=ADAPTER, longest_example=9, examples=4, devices=2)
    begin = t.TrainBeginParams(
        adapter=ADAPTER, optimizer=t.OptimizerConfig(learning_rate=1e-2), seed=3, devices=2
    )
    for stream in (backend.train_plan(plan), backend.train_begin(begin)):
        with pytest.raises(BackendError) as caught:
            list(stream)
        found = caught.value.error
        assert (found.code, found.facts) == ("not-supported", {"requested": 2})
        assert "fast numerics train on one device" in found.message


def a_setup_of_many() -> PeerSetup:
    def unasked(*arguments):
        raise AssertionError("no other rank is started")

    return PeerSetup(entry="", devices=lambda: 8, environment=unasked, open_wire=unasked)


def test_a_plan_takes_every_target_that_a_run_takes(model_dir):
    """The host asks for the plan before it begins a run."""
    backend = a_backend()
    load(backend, model_dir)
    every = ADAPTER.model_copy(update={"targets": ["embed_tokens", "lm_head", "down_proj"]})
    planned = answer(backend.train_plan(t.TrainPlanParams(adapter=every, longest_example=9, examples=1)))
    begin = t.TrainBeginParams(adapter=every, optimizer=t.OptimizerConfig(learning_rate=1e-2), seed=3)
    begun_with = answer(backend.train_begin(begin))
    assert {"embed_tokens", "lm_head"} < set(planned.result.matrices) == set(begun_with.result.matrices)
    assert planned.result.parameters == begun_with.result.parameters


def test_a_plan_names_what_a_step_takes_at_least(model_dir):
    backend = a_backend()
    load(backend, model_dir)
    params = t.TrainPlanParams(adapter=ADAPTER, longest_example=100, examples=4)
    reply = answer(backend.train_plan(params))
    kinds = reply.observation["kinds"]
    assert (
        reply.observation["total"] == sum(kinds.values()) and kinds["moments"] == 16 * reply.result.parameters
    )
    assert (reply.observation["examples_at_once"], reply.observation["rows_at_once"]) == (4, 396)
    with pytest.raises(BackendError, match="the context is"):
        answer(backend.train_plan(t.TrainPlanParams(adapter=ADAPTER, longest_example=2000, examples=1)))
