"""Training in fast mode on a CPU: gradients within what roundings explain, steps whole, runs that go on."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

from lanes.batches import Sequences
from lanes.float64_training_lane import Float64TrainingLane
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from lanes.training import a_config, finish, gradients_of, random_adapter, read, some_examples
from mens_core.adapters.keys import parameter_key
from mens_core.trainer import Trainer, TrainerState
from mens_torch_cuda.fast import loss, memory, rotary
from mens_torch_cuda.fast import trainer as module
from mens_torch_cuda.fast.laid_out import LaidOut
from mens_torch_cuda.fast.ops import FastOps
from mens_torch_cuda.fast.trainer import FastTrainer
from vox_plugin_api.backend import BackendError
from vox_plugin_api.families import parse_config
from vox_plugin_api.messages import RankAndAlpha

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
EXAMPLES = read(some_examples((2, 40, 70)))
CONFIG = a_config()


@pytest.fixture(scope="module", params=list(BY_FAMILY))
def family(request):
    return request.param


@pytest.fixture(scope="module")
def model_dir(family, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(family), BY_FAMILY[family], seed=3)


def a_model(path):
    return open_model(path, FastOps(CPU, facts={})).model


def a_trainer(path, config=CONFIG, adapter=None, **options) -> FastTrainer:
    model = a_model(path)
    state = None
    if adapter is not None:
        zeros = {key: np.zeros_like(value) for key, value in adapter.items()}
        state = TrainerState(step=0, parameters=adapter, first_moments=zeros, second_moments=zeros)
    return FastTrainer(model, CPU, config, state=state, **options)


def an_adapter(path, config=CONFIG):
    return random_adapter(Trainer.plan_for(a_model(path), config).shapes)


def gradients(trainer: FastTrainer, examples=EXAMPLES) -> dict[str, np.ndarray]:
    finish(trainer._differentiate(LaidOut.of(examples, 0, CPU)))
    return trainer._adapter.on_host(trainer._adapter.gradient)


@functools.cache
def exact(family: str, folder) -> tuple[dict[str, np.ndarray], float]:
    """Gradients in float64, and the relative error that roundings to bfloat16 explain (test_fast_forward)."""
    adapter = an_adapter(folder / "right")

    def of(path, values) -> dict[str, np.ndarray]:
        lane = Float64TrainingLane()
        _, found = gradients_of(open_model(path, lane).model, lane, CONFIG, values, EXAMPLES)
        return {parameter_key(name): gradient for name, gradient in found.items()}

    right, worst = of(folder / "right", adapter), 0.0
    for seed in range(2):
        # Backward is as long again as forward, and rounds as often: twelve roundings instead of six.
        off = functools.partial(disturbed, np.random.default_rng(seed))
        tensors = {n: off(w) for n, w in random_tensors(parse_config(BY_FAMILY[family]), 3).items()}
        path = write_model(folder / f"moved-{seed}", BY_FAMILY[family], tensors)
        worst = max(worst, error(of(path, {key: off(w) for key, w in adapter.items()}), right))
    return right, 2 * worst


def disturbed(rng: np.random.Generator, weight: np.ndarray) -> np.ndarray:
    signs = rng.choice((-1, 1), weight.shape)
    return (weight * (1 + signs * np.sqrt(12 / 3) * 2.0**-9)).astype(np.float32)


def error(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The mean relative error of a parameter's gradient."""
    return float(np.mean(errors(found, right)))


def errors(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> list[float]:
    assert found.keys() == right.keys()
    return [float(np.linalg.norm(found[k] - right[k]) / np.linalg.norm(right[k])) for k in right]


@pytest.fixture(scope="module")
def judged(family, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    write_model(folder / "right", BY_FAMILY[family], seed=3)
    return (folder / "right", *exact(family, folder))


def test_gradients_are_as_near_as_bfloat16_allows(judged):
    path, right, allowed = judged
    found = errors(gradients(a_trainer(path, adapter=an_adapter(path))), right)
    print(f"mean relative error {np.mean(found):.3f}, allowed {allowed:.3f}; the worst {max(found):.3f}")
    assert np.mean(found) < allowed
    # One that was never made would be off by 1.
    assert max(found) < 3 * allowed


def test_a_gradient_that_is_missing_is_seen(judged, monkeypatch):
    path, right, allowed = judged
    trainer = a_trainer(path, adapter=an_adapter(path))
    monkeypatch.setattr(type(trainer._decoder.embedding), "backward", lambda *_: None)
    assert max(errors(gradients(trainer), right)) > 3 * allowed


@pytest.mark.parametrize("bug", ["no-scale", "no-norm", "swapped-gate", "no-rotation-back", "parts-mixed"])
def test_a_bug_of_the_backward_is_beyond_it(bug, judged, monkeypatch):
    path, right, allowed = judged
    trainer = a_trainer(path, adapter=an_adapter(path))
    ew = module.losses_and_gradient.__globals__["ew"]
    if bug == "no-scale":
        for group in trainer._decoder.groups:
            for part in group.update.parts:
                part.scale = 1.0
    if bug == "no-norm":
        monkeypatch.setattr(ew, "norm_backward", lambda dy, x, w, eps, r=None: dy if r is None else dy + r)
    if bug == "swapped-gate":
        gate = ew.gate_backward
        monkeypatch.setattr(ew, "gate_backward", lambda *a, **k: gate(*a, **k).roll(56, 1))
    if bug == "no-rotation-back":
        heads = ew.heads_backward
        still = lambda dy, x, w, eps, c, s, at, dx: heads(dy, x, w, eps, c, s, at * 0, dx)  # noqa: E731
        monkeypatch.setattr(ew, "heads_backward", still)
    if bug == "parts-mixed":
        for layer in trainer._decoder.layers:
            first, second, _ = layer.qkv.update.parts
            first.columns, second.columns = second.columns, first.columns
    found = error(gradients(trainer), right)
    print(f"mean relative error {found:.3f}, allowed {allowed:.3f}")
    assert found > allowed


def test_weights_that_have_served_are_not_held_a_second_time(model_dir):
    model = a_model(model_dir)
    batch = Sequences().step([(0, [1, 2, 3])])
    model.forward(batch, model.new_cache(1))
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    before = [linear.weight.data.data_ptr() for linear in (attention.q_proj, attention.v_proj, mlp.up_proj)]
    trainer = FastTrainer(model, CPU, CONFIG)
    after = [linear.weight.data.data_ptr() for linear in (attention.q_proj, attention.v_proj, mlp.up_proj)]
    assert after == before
    first = trainer._decoder.layers[0]
    assert (first.qkv.weight.data_ptr(), first.gate_up.weight.data_ptr()) == (
        before[0],
        mlp.gate_proj.weight.data.data_ptr(),
    )
    assert torch.equal(first.gate_up.weight[len(mlp.gate_proj.weight.data) :], mlp.up_proj.weight.data)


def test_layers_that_run_again_give_what_kept_ones_do(model_dir, monkeypatch):
    adapter = an_adapter(model_dir)
    kept = gradients(a_trainer(model_dir, adapter=adapter))
    for layers in (0, 2):
        monkeypatch.setattr(module, "kept_layers", lambda *_, layers=layers, **__: layers)
        again = gradients(a_trainer(model_dir, adapter=adapter))
        assert all(np.array_equal(again[key], kept[key]) for key in kept)


def test_logits_in_pieces_are_the_same_step(model_dir, monkeypatch):
    one = a_trainer(model_dir)
    first = finish(one.train_step(EXAMPLES))
    monkeypatch.setattr(loss, "LOGIT_BYTES", 7 * 97 * 4)
    assert loss.pieces(100, 97) == 7
    other = finish(a_trainer(model_dir).train_step(EXAMPLES))
    assert other.loss == pytest.approx(first.loss, rel=2.0**-9)
    assert other.gradient_norm == pytest.approx(first.gradient_norm, rel=2.0**-6)


def test_micro_batches_sum_to_the_same_step_within_rounding(model_dir):
    whole = finish(a_trainer(model_dir).train_step(EXAMPLES))
    parts = finish(a_trainer(model_dir, micro_batch_size=1).train_step(EXAMPLES))
    assert parts.trained_tokens == whole.trained_tokens == sum(len(e.trained) for e in EXAMPLES)
    assert parts.loss == pytest.approx(whole.loss, rel=2.0**-9)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=2.0**-5)


def test_a_step_is_the_canonical_trainer_s_but_for_rounding(model_dir):
    """Initial values, schedule, clipping, AdamW: the same rules on nearly the same gradients."""
    lane = Float64TrainingLane()
    # The embedding's update begins as large as a norm: at a usual rate its steps are small beside it.
    config = a_config(learning_rate=1e-4)
    right = Trainer(open_model(model_dir, lane).model, lane, config)
    ours = a_trainer(model_dir, config)
    assert ours.adapter_digest == right.adapter_digest
    for _ in range(3):
        expected, found = finish(right.train_step(EXAMPLES)), finish(ours.train_step(EXAMPLES))
        assert (found.step, found.learning_rate) == (expected.step, expected.learning_rate)
        assert found.loss == pytest.approx(expected.loss, rel=0.05)
    moved, wanted = ours.state().parameters, right.state().parameters
    # AdamW's first steps are signs of gradients: nearly all have moved alike.
    start = Trainer(open_model(model_dir, lane).model, lane, config).state().parameters
    alike = [np.mean(np.sign(moved[k] - start[k]) == np.sign(wanted[k] - start[k])) for k in wanted]
    assert np.mean(alike) > 0.9


@pytest.mark.parametrize("share", [None, 0.25, 4.0])
def test_a_gradient_is_shortened_to_the_norm_that_was_allowed(share, model_dir):
    """After one step the first moment is the gradient's share (1 - beta1)."""

    def first_moment(most: float | None) -> tuple[float, float]:
        optimizer = CONFIG.optimizer.model_copy(update={"max_gradient_norm": most})
        trainer = a_trainer(model_dir, dataclasses.replace(CONFIG, optimizer=optimizer))
        told = finish(trainer.train_step(EXAMPLES)).gradient_norm
        moments = trainer.state().first_moments.values()
        norm = np.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in moments))
        return told, norm / (1 - optimizer.beta1)

    whole, _ = first_moment(None)
    told, used = first_moment(None if share is None else share * whole)
    assert told == pytest.approx(whole, rel=1e-5), "what is told is the norm before"
    assert used == pytest.approx(whole * min(1.0, share or 1.0), rel=1e-5)


def test_a_run_goes_on_from_its_state_to_the_same_numbers(model_dir):
    straight = a_trainer(model_dir)
    for _ in range(2):
        finish(straight.train_step(EXAMPLES))
    state = straight.state()
    finish(straight.train_step(EXAMPLES))
    resumed = FastTrainer(a_model(model_dir), CPU, CONFIG, state=state)
    finish(resumed.train_step(EXAMPLES))
    assert (resumed.step, resumed.adapter_digest) == (3, straight.adapter_digest)


def test_a_recorded_step_is_not_run_again_once_the_angles_have_moved(model_dir, monkeypatch):
    """A longer example makes the tables anew: what was recorded reads where they lay."""

    class Recordings:
        held_bytes = 0

        def __init__(self):
            self.asked = []

        def is_due(self, shape):
            self.asked.append(shape)
            return False

    monkeypatch.setattr(rotary, "_FIRST", 4)
    trainer = a_trainer(model_dir)
    trainer._recorder = recordings = Recordings()
    for lengths in ((3,), (3,), (40,), (3,)):
        finish(trainer._differentiate(LaidOut.of(read(some_examples(lengths)), 0, CPU)))
    first, second, _, again = recordings.asked
    assert first == second != again


def test_dropout_has_a_key_for_each_step_matrix_and_micro_batch(model_dir, monkeypatch):
    seen = set()

    def noted(x, rate, key):
        seen.add((rate, *key))
        return x

    monkeypatch.setattr(module, "dropped", noted)
    trainer = a_trainer(model_dir, a_config(dropout=0.25), micro_batch_size=1)
    for _ in range(2):
        finish(trainer.train_step(EXAMPLES))
    # An embedding's rows are looked up, and nothing of them is dropped.
    numbers = [matrix.number for matrix in trainer.plan.matrices if not matrix.is_embedding]
    expected = {
        (0.25, trainer.config.seed, step, number, first)
        for step in range(2)
        for number in numbers
        for first in range(len(EXAMPLES))
    }
    assert seen == expected
    seen.clear()
    finish(trainer.evaluate(EXAMPLES, digests=False))
    assert not seen, "a loss is of the adapter as it is"


def test_dropout_is_the_same_each_time_a_step_is_run(model_dir, monkeypatch):
    config = a_config(dropout=0.25)
    adapter = an_adapter(model_dir)
    first = gradients(a_trainer(model_dir, config, adapter))
    monkeypatch.setattr(module, "kept_layers", lambda *_, **__: 0)
    again = gradients(a_trainer(model_dir, config, adapter))
    assert all(np.array_equal(first[key], again[key]) for key in first)
    other = gradients(a_trainer(model_dir, a_config(dropout=0.25, seed=8), adapter))
    without = gradients(a_trainer(model_dir, a_config(), adapter))
    assert all(not np.array_equal(first[key], other[key]) for key in first)
    assert all(not np.array_equal(first[key], without[key]) for key in first)


def test_evaluation_is_a_step_s_loss_without_dropout(model_dir):
    trainer = a_trainer(model_dir, a_config(dropout=0.5))
    scores = finish(trainer.evaluate(EXAMPLES, digests=True))
    again = finish(trainer.evaluate(EXAMPLES, digests=True))
    assert scores == again and len({score.logits_digest for score in scores}) == len(EXAMPLES)
    told = finish(a_trainer(model_dir).train_step(EXAMPLES))
    total = sum(float(score.loss) for score in scores)
    assert told.loss == pytest.approx(total / told.trained_tokens, rel=1e-5)


def test_what_is_not_finite_is_named_and_nothing_has_changed(model_dir):
    trainer = a_trainer(model_dir)
    finish(trainer.train_step(EXAMPLES))
    before = trainer.state()
    trainer._decoder.layers[1].down.weight[3, 5] = torch.nan
    with pytest.raises(BackendError) as caught:
        finish(trainer.train_step(EXAMPLES))
    found = caught.value.error
    assert (found.code, found.facts["layer"], found.facts["step"]) == ("non-finite", 1, 2)
    assert (found.facts["example"], found.facts["position"]) == (0, 0)
    assert "step 2 was not taken and the adapter is unchanged" in found.message
    after = trainer.state()
    assert after.step == before.step == 1
    assert all(np.array_equal(after.parameters[key], before.parameters[key]) for key in before.parameters)


def test_a_step_without_room_is_not_taken_and_says_so(model_dir, monkeypatch):
    trainer = a_trainer(model_dir)
    before, digest = trainer.state().parameters, trainer.adapter_digest

    def no_room(*arguments):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    with monkeypatch.context() as planted:
        planted.setattr(trainer._adapter, "stepped", no_room)
        with pytest.raises(BackendError) as caught:
            finish(trainer.train_step(EXAMPLES))
    found = caught.value.error
    assert (found.code, found.facts["step"]) == ("out-of-device-memory", 1)
    assert trainer.step == 0 and trainer.adapter_digest == digest
    assert all(np.array_equal(x, before[key]) for key, x in trainer.state().parameters.items())


@pytest.mark.parametrize("which", [0, 1, 2], ids=["values", "first moment", "second moment"])
def test_a_step_whose_result_alone_is_not_finite_is_not_taken(model_dir, monkeypatch, which):
    """Loss and norm of the gradient are; the update overflows."""
    trainer = a_trainer(model_dir)
    before, digest, stepped = trainer.state().parameters, trainer.adapter_digest, trainer._adapter.stepped

    def overflowing(gradient, by):
        made = stepped(gradient, by)
        made[which][3] = torch.inf
        return made

    with monkeypatch.context() as planted:
        planted.setattr(trainer._adapter, "stepped", overflowing)
        with pytest.raises(BackendError) as caught:
            finish(trainer.train_step(EXAMPLES))
    assert (caught.value.error.code, trainer.step, trainer.adapter_digest) == ("non-finite", 0, digest)
    assert all(np.array_equal(x, before[key]) for key, x in trainer.state().parameters.items())


def test_layers_may_have_ranks_and_alphas_of_their_own(model_dir):
    """Exceptions beside the common rank: the same numbers as where each is the only kind."""
    common = a_config(("q_proj", "v_proj"))
    own = {"layers.1.self_attn.q_proj": RankAndAlpha(rank=2, alpha=3.0)}
    config = dataclasses.replace(common, adapter=common.adapter.model_copy(update={"exceptions": own}))
    lane = Float64TrainingLane()
    adapter = random_adapter(Trainer.plan_for(a_model(model_dir), config).shapes)
    _, exactly = gradients_of(open_model(model_dir, lane).model, lane, config, adapter, EXAMPLES)
    found = gradients(a_trainer(model_dir, config, adapter))
    assert found[parameter_key("layers.1.self_attn.q_proj.lora_A")].shape[0] == 2
    right = {parameter_key(name): gradient for name, gradient in exactly.items()}
    assert max(errors(found, right)) < 0.5


def test_targets_of_one_group_may_be_some_of_its_layers(model_dir):
    config = a_config(("v_proj", "q_proj", "up_proj"))
    adapter = random_adapter(Trainer.plan_for(a_model(model_dir), config).shapes)
    some = gradients(a_trainer(model_dir, config, adapter))
    every = an_adapter(model_dir)
    for key, value in every.items():
        every[key] = adapter.get(key, np.zeros_like(value))
    beside = gradients(a_trainer(model_dir, CONFIG, every))
    for key, gradient in some.items():
        scale = np.abs(beside[key]).max()
        np.testing.assert_allclose(gradient, beside[key], atol=2.0**-5 * scale)


def test_memory_decides_how_many_layers_keep_what_they_made(family, monkeypatch):
    config = parse_config(BY_FAMILY[family])
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    rows = 4096
    least = 1000 + config.layers * rows * config.hidden_size * 2 + memory.working_bytes(config, rows)
    one = memory.layer_bytes(config, rows)
    kept = [memory.kept_layers(config, rows, gpu, least + extra) for extra in (-1, 0, one, 2 * one, 99 * one)]
    assert kept == [0, 0, 1, 2, config.layers]
    assert memory.kept_layers(config, rows, CPU, 0) == config.layers
