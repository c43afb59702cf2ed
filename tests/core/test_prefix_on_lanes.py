"""Prefix reuse through the protocol, on whole models of both families: the bytes of a fresh worker."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from core.test_served_adapters import load, params_of, plan_of
from lanes import every_lane
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import random_adapter
from mens_core.adapters.file import safetensors_bytes
from mens_core.backend import MensBackend
from mens_core.serving import kv_origin
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendInfo

INFO = BackendInfo(
    "mens-test", "1.0.0", "cpu", ("canonical",), ("generate", "evaluate", "trace", "train", "adapters")
)
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest="ab" * 32)
GREEDY = m.SamplingParams(temperature=0)
SYSTEM = [(17 * i * i + 5) % 97 for i in range(300)]
"""Longer than two blocks, and much longer than Gemma's window of 20."""


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model(request, tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp(request.param), BY_FAMILY[request.param])


@pytest.fixture
def make_backend(request) -> Any:
    every_lane.make_lane("mens-cpu-ref", request.config)
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps

    library = load_library()
    return lambda: MensBackend(
        INFO,
        lambda params: CpuOps(library.kernels),
        lambda: PASSED,
        make_training_lane=lambda ops: CpuTrainingOps(library),
    )


def ask(token_ids: list[int], max_tokens: int, **wishes: Any) -> m.GenerateParams:
    return m.GenerateParams(
        token_ids=token_ids, max_tokens=max_tokens, **{"sampling": GREEDY, "logprobs": 3, **wishes}
    )


class Answer:
    """What `generate` gave: the bytes that are compared, and what was observed."""

    def __init__(self, backend: MensBackend, params: m.GenerateParams) -> None:
        replies = [reply for reply in backend.generate(params) if reply is not None]
        self.bytes = b"\n".join(m.canonical_json(reply.result) for reply in replies)
        self.token_ids = [token.token_id for reply in replies for token in reply.result.tokens]
        self.observed = [
            reply.observation["cached_tokens"] for reply in replies if "cached_tokens" in reply.observation
        ]

    @property
    def cached_tokens(self) -> int:
        first, last = self.observed
        assert first == last
        return last


def test_a_chat_has_the_bytes_of_workers_that_never_saw_its_beginning(model, make_backend):
    chat = make_backend()
    load(chat, model)
    said, reused = list(SYSTEM), []
    for turn in range(4):
        said = [*said, *(turn + word for word in (9, 21, 33))]
        params = ask(said, 40, sampling=m.SamplingParams(temperature=0.8, seed=turn))
        fresh = make_backend()
        load(fresh, model)
        answer, expected = Answer(chat, params), Answer(fresh, params)
        assert answer.bytes == expected.bytes
        assert expected.cached_tokens == 0
        reused.append(answer.cached_tokens)
        said += answer.token_ids
    assert reused == [0, 256, 384, 384]
    seen = chat.unload(m.UnloadParams()).observation
    assert seen["cached_tokens"] == sum(reused)
    assert seen["computed_tokens"] == 303 + 346 - 256 + 389 - 384 + 432 - 384 + 4 * 39


def test_scores_after_reuse_are_those_of_a_fresh_worker(model, make_backend):
    backend, fresh = make_backend(), make_backend()
    load(backend, model)
    load(fresh, model)
    Answer(backend, ask(SYSTEM, 1))
    params = m.EvaluateParams(sequences=[SYSTEM, SYSTEM[:200]], top_logprobs=2)
    answers = [
        [m.canonical_json(reply.result) for reply in one.evaluate(params) if reply is not None]
        for one in (backend, fresh)
    ]
    assert answers[0] == answers[1]
    assert backend.unload(m.UnloadParams()).observation["cached_tokens"] == 0


def test_an_adapter_and_its_base_never_meet_the_other_ones_blocks(model, make_backend, tmp_path):
    plan = plan_of(model)
    paths = []
    for seed in (1, 2):
        paths.append(tmp_path / f"{seed}.safetensors")
        paths[-1].write_bytes(safetensors_bytes(random_adapter(plan.shapes, seed=seed)))
    adapters = [None, params_of(paths[0], plan), params_of(paths[1], plan), None]
    one = make_backend()
    answers = []
    for adapter in adapters:
        load(one, model, adapter=adapter)
        first, second = Answer(one, ask(SYSTEM, 6)), Answer(one, ask(SYSTEM, 6))
        assert first.bytes == second.bytes
        assert (first.cached_tokens, second.cached_tokens) == (0, 256)
        one.unload(m.UnloadParams())
        answers.append(first.bytes)
    assert answers[0] == answers[3]
    assert len(set(answers)) == 3


def test_all_that_decides_a_blocks_bytes_is_in_its_origin(model, tmp_path):
    plan = plan_of(model)
    path = tmp_path / "adapter.safetensors"
    path.write_bytes(safetensors_bytes(random_adapter(plan.shapes)))
    from mens_core.adapters.served import read_adapter
    from vox_plugin_api.checkpoint import read_json_object
    from vox_plugin_api.families import parse_config

    adapter = params_of(path, plan)
    louder = adapter.model_copy(update={"config": adapter.config.model_copy(update={"alpha": 3.0})})
    config = parse_config(read_json_object(model / "config.json"))
    base = {"model_dir": str(model), "model_digest": "ab" * 32}
    loads = [
        base,
        {**base, "model_digest": "cd" * 32},
        {**base, "numerics": "fast"},
        {**base, "adapter": adapter},
        {**base, "adapter": louder},
    ]
    origins = []
    for fields in loads:
        params = m.LoadModelParams(**fields)
        read = None if params.adapter is None else read_adapter(params.adapter, config)
        origins.append(kv_origin(params, read))
    assert len(set(origins)) == len(loads)
    same = m.LoadModelParams(**{**base, "threads": 3, "memory_bytes": 1 << 20, "max_sequences": 2})
    assert kv_origin(same, None) == origins[0]


def test_requests_side_by_side_have_the_bytes_of_solo_workers(model, make_backend):
    """Random prompts with common beginnings, in tight memory, some given up half-way."""
    draw = Random(11)
    solo: dict[bytes, bytes] = {}

    def alone(params: m.GenerateParams) -> bytes:
        key = m.canonical_json(params)
        if key not in solo:
            fresh = make_backend()
            load(fresh, model)
            solo[key] = Answer(fresh, params).bytes
        return solo[key]

    cached = 0
    for blocks in (4, 5, 9):
        backend = make_backend()
        block_bytes = load(backend, model).observation["kv_cache"]["block_bytes"]
        backend.unload(m.UnloadParams())
        load(backend, model, memory_bytes=blocks * block_bytes, context_length=512)
        waiting = [
            ask(
                SYSTEM[: draw.choice([127, 129, 257, 300])] + [draw.randrange(3) for _ in range(3)],
                draw.choice([1, 5, 20]),
                prompt_logprobs=draw.random() < 0.1,
                sampling=m.SamplingParams(temperature=1.0, seed=draw.randrange(2)),
            )
            for _ in range(14)
        ]
        running: list[list[Any]] = []
        while waiting or running:
            if waiting and draw.random() < 0.5:
                params = waiting.pop()
                running.append([params, backend.generate(params), []])
            for one in list(running):
                params, stream, replies = one
                if draw.random() < 0.004:
                    stream.close()
                    running.remove(one)
                    continue
                try:
                    reply = next(stream)
                except StopIteration:
                    assert b"\n".join(replies) == alone(params)
                    running.remove(one)
                    continue
                if reply is not None:
                    replies.append(m.canonical_json(reply.result))
        cached += backend.unload(m.UnloadParams()).observation["cached_tokens"]
    assert cached > 1000


def test_what_is_kept_between_requests_takes_no_new_memory(model, make_backend):
    """The CPU lane takes memory as blocks are written: for what is served, or an eighth of the weights."""
    backend = make_backend()
    seen = load(backend, model).observation["kv_cache"]
    freely = (model / "model.safetensors").stat().st_size // 8 // seen["block_bytes"]
    for i in range(6):
        Answer(backend, ask([i, *SYSTEM], 2))
    assert backend.unload(m.UnloadParams()).observation["peak_kv_blocks"] == max(3, freely) < 18
    # Who named the memory gets all of it used: two whole blocks of each are kept.
    load(backend, model, memory_bytes=20 * seen["block_bytes"])
    for i in range(6):
        Answer(backend, ask([i, *SYSTEM], 2))
    assert backend.unload(m.UnloadParams()).observation["kept_kv_blocks"] == 12
