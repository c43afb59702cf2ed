"""The backend: requests as generators over one engine, on real models through real lanes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from lanes import every_lane
from lanes.row_lane import RowLane
from lanes.tiny_models import BY_FAMILY, write_model
from mens_core.backend import MensBackend
from mens_core.ops import Fault
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendError, BackendInfo, Reply
from vox_plugin_api.conformance_messages import ConformanceParams

INFO = BackendInfo("mens-test", "1.0.0", "cpu", ("canonical",), ("generate", "evaluate", "trace"))
DIGEST = "ab" * 32
VOCAB = 97
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest=DIGEST)
GREEDY = m.SamplingParams(temperature=0)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model_dir(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), BY_FAMILY[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("qwen3"), BY_FAMILY["qwen3"])


@pytest.fixture(scope="module", params=["rows", "mens-cpu-ref"])
def make_lane(request):
    """Makes a lane whose bits depend on nothing but the row."""
    if request.param == "rows":
        return lambda params: RowLane()
    every_lane.make_lane(request.param, request.config)
    return lambda params: every_lane.make_lane(request.param, request.config)


def a_backend(make_lane=lambda params: RowLane(), **options) -> MensBackend:
    return MensBackend(INFO, make_lane, lambda: PASSED, **options)


def load(backend: MensBackend, path: Path, **params) -> Reply:
    *progress, reply = backend.load_model(
        m.LoadModelParams(model_dir=str(path), model_digest=DIGEST, **params)
    )
    assert progress, "no sign of life while loading"
    assert set(progress) == {None}
    return reply


def served(path: Path, make_lane=lambda params: RowLane(), **params) -> MensBackend:
    backend = a_backend(make_lane)
    load(backend, path, **params)
    return backend


def ask(token_ids, max_tokens=8, **wishes) -> m.GenerateParams:
    return m.GenerateParams(
        token_ids=list(token_ids), max_tokens=max_tokens, **{"sampling": GREEDY, **wishes}
    )


def results(stream) -> list:
    return [reply.result for reply in stream if reply is not None]


def token_ids(answer) -> list[int]:
    return [token.token_id for result in answer for token in result.tokens]


def wire(answer) -> list[bytes]:
    return [m.canonical_json(result) for result in answer]


def take_turns(*streams) -> list[list]:
    """What the worker's loop does: one `next` each, round and round."""
    answers = [[] for _ in streams]
    alive = dict(enumerate(streams))
    while alive:
        for i, stream in list(alive.items()):
            try:
                reply = next(stream)
            except StopIteration:
                del alive[i]
                continue
            if reply is not None:
                answers[i].append(reply.result)
    return answers


# --- loading -----------------------------------------------------------------------------------


def test_a_load_reports_what_was_loaded_and_what_it_took(model_dir, make_lane):
    reply = load(a_backend(make_lane), model_dir, max_sequences=2)
    result, seen = reply.result, reply.observation
    config = json.loads((model_dir / "config.json").read_text())
    assert (result.model_digest, result.numerics, result.numerics_version) == (DIGEST, "canonical", 1)
    assert (result.layers, result.vocab_size) == (config["num_hidden_layers"], VOCAB)
    assert (result.context_length, result.model_context_length) == (1024, 1024)
    assert result.parameters > 10_000
    assert "model.embed_tokens.weight" in result.tensors.used
    assert result.tensors.unused == []
    block = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 128 * 4
    assert seen["kv_cache"] == {
        "blocks": 16,
        "block_bytes": block,
        "positions": 2048,
        "reserved_bytes": 16 * block,
        "budget_bytes": 2 << 30,
        "free_bytes": None,
    }
    assert seen["load_s"] >= seen["weights_s"] > 0
    assert isinstance(seen["lane"], dict)


def test_memory_bounds_the_context_and_the_report_says_so(qwen3):
    block = 2 * 3 * 2 * 16 * 128 * 4
    reply = load(a_backend(), qwen3, memory_bytes=3 * block + 5)
    assert reply.result.context_length == 384
    assert reply.result.warnings[-1].startswith("the context is 384 of the model's 1024 positions")
    assert reply.result.warnings[-1].endswith("`vox-host serve --kv-cache-mib 1` holds all")
    assert reply.observation["kv_cache"]["blocks"] == 3


@pytest.mark.parametrize(
    ("params", "code", "fact"),
    [
        ({"context_length": 1025}, "context-too-long", ("model_context_length", 1024)),
        (
            {"context_length": 512, "memory_bytes": 3 * 98_304},
            "insufficient-memory",
            ("needed_bytes", 393_216),
        ),
        ({"memory_bytes": 98_303}, "insufficient-memory", ("budget_bytes", 98_303)),
        ({"numerics": "fast"}, "not-supported", ("supported", ["canonical"])),
    ],
)
def test_what_cannot_be_provided_is_refused_with_numbers(qwen3, params, code, fact):
    backend = a_backend()
    with pytest.raises(BackendError) as caught:
        load(backend, qwen3, **params)
    assert caught.value.error.code == code
    assert caught.value.error.facts[fact[0]] == fact[1]
    if code == "insufficient-memory":
        assert "--kv-cache-mib 1" in caught.value.error.remedy
        assert "memory_bytes" not in caught.value.error.remedy
    load(backend, qwen3, context_length=512, memory_bytes=4 * 98_304)


def test_a_directory_without_a_model_is_an_error_not_a_crash(tmp_path):
    backend = a_backend()
    with pytest.raises(BackendError) as caught:
        load(backend, tmp_path)
    assert str(tmp_path) in caught.value.error.message
    with pytest.raises(BackendError, match="no model is loaded"):
        next(backend.generate(ask([1])))


def test_one_model_at_a_time_and_unloading_makes_room(qwen3):
    backend = served(qwen3)
    with pytest.raises(BackendError) as caught:
        load(backend, qwen3)
    assert caught.value.error.code == "model-already-loaded"
    running = backend.generate(ask([1, 2], 50))
    for _ in range(4):
        next(running)
    assert backend.unload(m.UnloadParams()).observation["peak_kv_blocks"] == 1
    with pytest.raises(BackendError) as caught:
        results(running)
    assert caught.value.error.code == "model-unloaded"
    with pytest.raises(BackendError, match="no model is loaded"):
        backend.unload(m.UnloadParams())
    load(backend, qwen3)


def test_two_loads_at_once_are_one_too_many(qwen3):
    backend = a_backend()
    first = backend.load_model(m.LoadModelParams(model_dir=str(qwen3), model_digest=DIGEST))
    next(first)
    with pytest.raises(BackendError) as caught:
        load(backend, qwen3)
    assert caught.value.error.code == "model-already-loaded"
    first.close()
    load(backend, qwen3)


# --- generating --------------------------------------------------------------------------------


def test_an_answer_is_one_token_a_result_and_then_how_it_ended(model_dir, make_lane):
    stream = served(model_dir, make_lane).generate(ask([5, 6, 7], 6, logprobs=2))
    replies = [reply for reply in stream if reply is not None]
    *pieces, last = [reply.result for reply in replies]
    assert [len(piece.tokens) for piece in pieces] == [1] * 6
    assert all(len(piece.tokens[0].top) == 2 for piece in pieces)
    assert all(piece.tokens[0].logprob == piece.tokens[0].top[0].logprob for piece in pieces)
    assert last == m.GenerateResult(finish_reason="length", prompt_tokens=3, generated_tokens=6)
    assert replies[-1].observation["total_s"] >= replies[-1].observation["first_token_s"] > 0


def test_a_stop_token_ends_it(qwen3):
    backend = served(qwen3)
    answer = token_ids(results(backend.generate(ask([5], 12))))
    length = max(i for i in range(12) if answer[i] not in answer[:i])
    assert length > 0
    *pieces, last = results(backend.generate(ask([5], 12, stop_token_ids=[answer[length]])))
    assert token_ids(pieces) == answer[:length]
    assert last == m.GenerateResult(
        finish_reason="stop", stop_token_id=answer[length], prompt_tokens=1, generated_tokens=length + 1
    )


def test_scoring_without_generating_is_what_an_echo_needs(model_dir, make_lane):
    prompt = [5, 9, 9, 40, 2]
    backend = served(model_dir, make_lane)
    scored, last = results(backend.generate(ask(prompt, 0, prompt_logprobs=True, logprobs=1)))
    assert [token.token_id for token in scored.prompt] == prompt
    assert scored.prompt[0].logprob is None
    assert all(token.logprob < 0 and len(token.top) == 1 for token in scored.prompt[1:])
    assert last == m.GenerateResult(finish_reason="length", prompt_tokens=5, generated_tokens=0)
    both = results(backend.generate(ask(prompt, 2, prompt_logprobs=True, logprobs=1)))
    assert both[0] == scored
    assert len(token_ids(both)) == 2


def test_greedy_scores_are_those_of_the_model_s_own_logits(model_dir):
    """By hand: one forward pass, softmax in float64."""
    backend = served(model_dir)
    prompt = [3, 1, 4, 1, 5]
    (scored, _) = results(backend.generate(ask(prompt, 0, prompt_logprobs=True)))
    (reply,) = backend.trace(m.TraceParams(token_ids=prompt[:3], slices=["lm_head"]))
    name = "logit_softcap" if reply.result.operators[-1].name == "logit_softcap" else "lm_head"
    (reply,) = backend.trace(m.TraceParams(token_ids=prompt[:3], slices=[name]))
    logits = np.frombuffer(reply.slices[0], "<f4").astype(np.float64)
    logprob = logits[1] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert scored.prompt[3].logprob == pytest.approx(logprob, abs=1e-5)


def test_answers_together_are_answers_alone(model_dir, make_lane):
    rng = np.random.default_rng(7)
    asked = [
        ask(
            rng.integers(0, VOCAB, length).tolist(), 3 + i, logprobs=1, prompt_logprobs=i % 2 == 0, sampling=s
        )
        for i, length in enumerate((1, 40, 130, 7, 256))
        for s in (GREEDY, m.SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=i))
    ]
    backend = served(model_dir, make_lane, max_sequences=6)
    alone = [wire(results(backend.generate(params))) for params in asked]
    together = take_turns(*[backend.generate(params) for params in asked])
    assert [wire(answer) for answer in together] == alone


def test_requests_in_flight_share_steps(qwen3):
    backend = served(qwen3)
    engine = backend._served.engine
    take_turns(*[backend.generate(ask([i], 20)) for i in range(8)])
    assert engine.steps <= 22


def test_a_stream_that_nobody_else_pulls_goes_on_alone(qwen3):
    backend = served(qwen3)
    left_lying = backend.generate(ask([1], 60))
    next(left_lying)
    alone = results(backend.generate(ask([2], 40)))
    assert len(token_ids(alone)) == 40
    late = results(left_lying)
    assert len(token_ids(late)) == 60
    # Several were ready at once; they come as they would have come.
    assert [len(result.tokens) for result in late] == [1] * 60 + [0]


def test_a_round_of_turns_is_one_step_however_many_read_their_prompts(qwen3):
    backend = served(qwen3)
    engine = backend._served.engine
    streams = [backend.generate(ask([i] * length, 30)) for i, length in enumerate((2, 3, 900, 900, 900))]
    for stream in streams:
        next(stream)
    for _ in range(10):
        before = engine.steps
        for stream in streams:
            next(stream)
        assert engine.steps == before + 1


def test_closing_a_stream_frees_its_blocks_at_once(qwen3):
    backend = served(qwen3)
    pool = backend._served.engine.pool
    stream = backend.generate(ask([1] * 200, 60))
    for _ in range(3):
        next(stream)
    assert (pool.reserved, pool.used) == (3, 2)
    stream.close()
    assert (pool.reserved, pool.used) == (0, 0)


def test_overflow_and_bad_parameters_are_refused_before_anything_starts(qwen3):
    backend = served(qwen3, context_length=64)
    engine = backend._served.engine
    for params, code in [
        (ask([1] * 60, 5), "context-overflow"),
        (ask([97], 5), "invalid-token"),
        (ask([1], 5, sampling=m.SamplingParams(temperature=-1)), "invalid-sampling"),
    ]:
        with pytest.raises(BackendError) as caught:
            next(backend.generate(params))
        assert caught.value.error.code == code
        assert (engine.waiting, engine.running, engine.steps) == (0, 0, 0)


class FaultyLane(RowLane):
    """Says that an operator's output was not finite for rows that hold token 13."""

    def embed(self, table, token_ids, scale, *, name):
        rows = super().embed(table, token_ids, scale, name=name)
        bad = np.flatnonzero(token_ids == 13)
        rows[bad, 0] = np.inf
        if bad.size:
            self._faults.append(Fault("layers.2.mlp.gate_proj", tuple(bad.tolist())))
        return rows


def test_a_value_that_is_not_finite_fails_one_request_by_operator_and_layer(qwen3):
    backend = served(qwen3, lambda params: FaultyLane())
    with np.errstate(all="ignore"):
        good, bad = backend.generate(ask([1, 2], 6)), backend.generate(ask([1, 13], 6))
        next(good), next(bad)
        answer = results(good)
        with pytest.raises(BackendError) as caught:
            results(bad)
    assert caught.value.error.code == "non-finite"
    assert caught.value.error.facts["operator"] == "layers.2.mlp.gate_proj"
    assert caught.value.error.facts["position"] == 1
    assert wire(answer) == wire(results(served(qwen3).generate(ask([1, 2], 6))))


# --- evaluating and tracing --------------------------------------------------------------------


def test_an_evaluation_scores_every_sequence_in_order(model_dir, make_lane):
    rng = np.random.default_rng(5)
    sequences = [rng.integers(0, VOCAB, length).tolist() for length in (4, 200, 1, 33, 2, 2, 9, 50, 3, 17)]
    backend = served(model_dir, make_lane, max_sequences=3)
    found = results(backend.evaluate(m.EvaluateParams(sequences=sequences, top_logprobs=2)))
    assert [result.index for result in found] == list(range(10))
    for sequence, result in zip(sequences, found, strict=True):
        scored, _ = results(backend.generate(ask(sequence, 0, prompt_logprobs=True, logprobs=2)))
        assert result.tokens == scored.prompt
    assert len({result.logits_digest for result in found}) == 10
    again = results(backend.evaluate(m.EvaluateParams(sequences=sequences[3:4], logits_digest=True)))
    assert again[0].logits_digest == found[3].logits_digest
    plain = results(backend.evaluate(m.EvaluateParams(sequences=sequences[3:4], logits_digest=False)))
    assert plain[0].logits_digest is None
    assert backend._served.engine.pool.reserved == 0


def test_the_logits_digest_is_over_the_logits_a_trace_shows(qwen3, make_lane):
    backend = served(qwen3, make_lane)
    (found,) = results(backend.evaluate(m.EvaluateParams(sequences=[[3, 1, 4]])))
    rows = []
    for length in (1, 2, 3):
        (reply,) = backend.trace(m.TraceParams(token_ids=[3, 1, 4][:length], slices=["lm_head"]))
        rows.append(reply.slices[0])
    assert found.logits_digest == hashlib.sha256(b"".join(rows)).hexdigest()


def test_an_evaluation_refuses_by_the_number_of_the_sequence(qwen3):
    backend = served(qwen3, context_length=64)
    with pytest.raises(BackendError) as caught:
        results(backend.evaluate(m.EvaluateParams(sequences=[[1], [2] * 65])))
    assert caught.value.error.code == "context-overflow"
    assert caught.value.error.facts["index"] == 1
    assert backend._served.engine.waiting == 0


def test_closing_an_evaluation_leaves_nothing_behind(qwen3):
    backend = served(qwen3, max_sequences=2)
    stream = backend.evaluate(m.EvaluateParams(sequences=[[1] * 300] * 5))
    for _ in range(3):
        next(stream)
    stream.close()
    engine = backend._served.engine
    assert (engine.waiting, engine.running, engine.pool.reserved) == (0, 0, 0)


def test_a_trace_has_a_digest_per_operator_and_the_slices_that_were_asked_for(model_dir, make_lane):
    backend = served(model_dir, make_lane)
    prompt = [i % VOCAB for i in range(130)]
    (reply,) = backend.trace(m.TraceParams(token_ids=prompt, slices=["norm", "embed_tokens"]))
    by_name = {made.name: made for made in reply.result.operators}
    assert by_name["layers.0.self_attn.q_norm"].shape == [130, 64]
    assert by_name["lm_head"].shape == [1, VOCAB]
    for data, name in zip(reply.slices, ["norm", "embed_tokens"], strict=True):
        assert hashlib.sha256(data).hexdigest() == by_name[name].digest
    assert len(reply.slices[1]) == 130 * 40 * 4
    (again,) = backend.trace(m.TraceParams(token_ids=prompt))
    assert again.result == reply.result
    with pytest.raises(BackendError) as caught:
        list(backend.trace(m.TraceParams(token_ids=prompt, slices=["lm_haed"])))
    assert caught.value.error.facts["near"] == {"lm_haed": ["lm_head"]}


def test_a_trace_disturbs_no_answer_in_progress(qwen3, make_lane):
    backend = served(qwen3, make_lane)
    expected = wire(results(backend.generate(ask([8, 9], 10))))
    stream = backend.generate(ask([8, 9], 10))
    found = []
    for reply in stream:
        if reply is not None:
            found.append(reply.result)
            list(backend.trace(m.TraceParams(token_ids=[1, 2, 3])))
    assert wire(found) == expected


def test_the_self_test_is_the_lane_s_own():
    reply = a_backend().self_test(m.SelfTestParams())
    assert reply.result == PASSED
    assert reply.observation["self_test_s"] >= 0


# --- lane options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "said"), [({}, "takes none"), ({"isa": ("a", "b")}, "name one")])
def test_a_lane_option_that_the_lane_did_not_state_is_refused(known, said):
    made = MensBackend(INFO, lambda params: pytest.fail("made"), lambda: PASSED, lane_options=known)
    options = {"iso": "a"}
    load = m.LoadModelParams(model_dir="", model_digest="0" * 64, lane_options=options)
    for ask in (
        lambda: list(made.load_model(load)),
        lambda: list(
            made.conformance(ConformanceParams(group="operators", case="add", lane_options=options))
        ),
    ):
        with pytest.raises(BackendError, match="no lane option is called 'iso'") as caught:
            ask()
        assert caught.value.error.code == "lane-option"
        assert said in caught.value.error.remedy
        assert caught.value.error.facts["known"] == {name: list(values) for name, values in known.items()}
