"""The backend's training requests, without a worker around them."""

from __future__ import annotations

import pytest

from lanes.numpy_training import RowTrainingLane
from lanes.row_lane import RowLane
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import a_config, some_examples
from mens_core.backend import MensBackend
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import Backend, BackendError, BackendInfo, Reply

INFO = BackendInfo("mens-test", "1.0.0", "cpu", ("canonical",), ("generate", "train"))
PASSED = m.SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest="ab" * 32)
CONFIG = a_config(("q_proj",))
NEW = t.TrainBeginParams(adapter=CONFIG.adapter, optimizer=CONFIG.optimizer)
STEP = t.TrainStepParams(examples=some_examples((5, 12, 3)))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(
        tmp_path_factory.mktemp("model"), BY_FAMILY["qwen3"] | {"num_hidden_layers": 2}, seed=3
    )


def a_backend(model_dir, lane=RowTrainingLane, **options) -> MensBackend:
    backend = MensBackend(INFO, lambda params: lane(), lambda: PASSED, **options)
    load = m.LoadModelParams(model_dir=str(model_dir), model_digest="cd" * 32)
    assert list(backend.load_model(load))[-1] is not None
    return backend


def replies(stream) -> list[Reply]:
    return [reply for reply in stream if reply is not None]


def code_of(call) -> str:
    with pytest.raises(BackendError) as caught:
        list(call())
    return caught.value.error.code


def test_what_is_begun_is_told(model_dir):
    (reply,) = replies(a_backend(model_dir).train_begin(NEW))
    assert reply.result.step == 0
    assert reply.result.matrices == ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]
    assert reply.result.parameters == 2 * 4 * (40 + 64)
    assert reply.observation["begin_s"] > 0


def test_a_step_shows_life_on_its_way_and_tells_what_it_took(model_dir):
    backend = a_backend(model_dir)
    list(backend.train_begin(NEW))
    made = list(backend.train_step(STEP))
    assert made.count(None) >= 2 * 2 + 1, "one sign of life for each layer, there and back, and the head"
    assert made[-1].result.step == 1
    assert made[-1].observation["rows"] == sum(e.loss_mask.index(True, len(e.loss_mask) - 2)
                                               for e in STEP.examples)  # fmt: skip
    assert made[-1].observation["step_s"] > 0


def test_requests_out_of_order_are_errors(model_dir):
    backend = MensBackend(INFO, lambda params: RowTrainingLane(), lambda: PASSED)
    assert code_of(lambda: backend.train_begin(NEW)) == "no-model"
    assert code_of(lambda: backend.train_step(STEP)) == "no-model"
    backend = a_backend(model_dir)
    for call in (
        lambda: backend.train_step(STEP),
        lambda: backend.train_evaluate(t.TrainEvaluateParams(examples=STEP.examples)),
        lambda: backend.train_save(t.TrainSaveParams(folder="/nowhere/run")),
    ):
        assert code_of(call) == "no-training"
    list(backend.train_begin(NEW))
    assert code_of(lambda: backend.train_begin(NEW)) == "training-begun"


def test_two_requests_at_once_are_one_too_many(model_dir):
    backend = a_backend(model_dir)
    list(backend.train_begin(NEW))
    running = backend.train_step(STEP)
    next(running)
    assert code_of(lambda: backend.train_step(STEP)) == "training-busy"
    assert code_of(lambda: backend.train_save(t.TrainSaveParams(folder="/nowhere/run"))) == "training-busy"
    running.close()
    assert replies(backend.train_step(STEP))[0].result.step == 1


def test_unloading_ends_the_training_and_what_runs(model_dir):
    backend = a_backend(model_dir)
    list(backend.train_begin(NEW))
    running = backend.train_step(STEP)
    next(running)
    backend.unload(m.UnloadParams())
    assert code_of(lambda: running) == "model-unloaded"
    assert code_of(lambda: backend.train_step(STEP)) == "no-model"


def test_a_lane_without_training_says_so(model_dir):
    assert code_of(lambda: a_backend(model_dir, RowLane).train_begin(NEW)) == "not-supported"


def test_a_lane_is_made_when_training_begins_and_not_before(model_dir):
    made = []

    def make(serving):
        made.append(serving)
        return RowTrainingLane()

    backend = a_backend(model_dir, RowLane, make_training_lane=make)
    assert made == []
    list(backend.train_begin(NEW))
    assert len(made) == 1
    expected = a_backend(model_dir)
    list(expected.train_begin(NEW))
    found, wanted = (replies(b.train_step(STEP))[0].result for b in (backend, expected))
    assert found == wanted


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"loss_mask": [False] * 5}, "has no token to learn"),
        ({"loss_mask": [True] * 5}, "marks its first token"),
        ({"loss_mask": [False, True]}, "has 5 tokens and a loss mask of 2"),
        ({"token_ids": [1, 2, 3, 4, -1]}, "has token -1 at position 4"),
        (
            {"token_ids": [1] * 1025, "loss_mask": [False, *[True] * 1024]},
            "has 1025 tokens; the context is 1024",
        ),
    ],
)
def test_a_bad_example_is_named_by_its_number_and_nothing_runs(model_dir, change, mention):
    backend = a_backend(model_dir)
    list(backend.train_begin(NEW))
    examples = [STEP.examples[0], STEP.examples[0].model_copy(update=change)]
    with pytest.raises(BackendError) as caught:
        list(backend.train_step(t.TrainStepParams(examples=examples)))
    assert caught.value.error.code == "invalid-example"
    assert f"example 1 {mention}" in caught.value.error.message
    assert replies(backend.train_step(STEP))[0].result.step == 1


def test_a_backend_without_training_refuses_each_method():
    class Plain(Backend):
        info = INFO
        self_test = load_model = generate = None  # not asked for here

    for method, params in [
        ("train_plan", t.TrainPlanParams(adapter=CONFIG.adapter, longest_example=9, examples=1)),
        ("train_begin", NEW),
        ("train_step", STEP),
        ("train_evaluate", t.TrainEvaluateParams(examples=STEP.examples)),
        ("train_save", t.TrainSaveParams(folder="/nowhere")),
    ]:
        with pytest.raises(BackendError) as caught:
            getattr(Plain(), method)(params)
        assert caught.value.error.code == "not-supported"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": CONFIG.adapter},
        {"optimizer": CONFIG.optimizer},
        {"adapter": CONFIG.adapter, "optimizer": CONFIG.optimizer, "resume_dir": "/run"},
        {"seed": 1, "resume_dir": "/run"},
        {"schedule": t.Schedule(), "resume_dir": "/run"},
    ],
)
def test_a_run_is_new_or_resumed_and_not_both(fields):
    with pytest.raises(ValueError, match="resume_dir"):
        t.TrainBeginParams(**fields)


def test_messages_survive_the_wire():
    for message in (NEW, STEP, t.TrainBeginParams(resume_dir="/run", micro_batch_size=2)):
        again = type(message).model_validate(message.model_dump(mode="json"))
        assert m.canonical_json(again) == m.canonical_json(message)
    with pytest.raises(ValueError, match="total_steps"):
        t.Schedule(kind="cosine", warmup_steps=5, total_steps=5)
