"""One optimizer step: what may change its bits, what may not, and that it is whole or not taken."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.test_backward_models import oracle
from lanes import every_lane
from lanes.batches import Sequences
from lanes.float64_training_lane import Float64TrainingLane
from lanes.numpy_training import RowTrainingLane
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import (
    ALL_TARGETS,
    LAYER_TARGETS,
    a_config,
    finish,
    gradients_of,
    random_adapter,
    read,
    some_examples,
)
from mens_core.adapters.apply import make_loras
from mens_core.adapters.keys import adapter_digest
from mens_core.micro_batches import cut, pack
from mens_core.models.passes import ForwardPass, TrainingPass
from mens_core.ops import Fault
from mens_core.trainer import Trainer, TrainerState
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import RankAndAlpha
from vox_plugin_api.train_messages import Schedule, TrainExample

SMALL = {
    "qwen3": BY_FAMILY["qwen3"] | {"num_hidden_layers": 2},
    "gemma3": BY_FAMILY["gemma3"] | {"num_hidden_layers": 2, "sliding_window_pattern": 2},
}
LENGTHS = (2, 9, 140, 5, 3)


@pytest.fixture(autouse=True)
def one_thread():
    """More of them only wait for each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def model_dir(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), SMALL[request.param], seed=3)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("qwen3"), SMALL["qwen3"], seed=3)


@pytest.fixture(scope="module", params=["rows", "mens-cpu-ref", "mens-cpu-ref:reference"])
def make_lane(request):
    """Makes a lane whose bits depend on nothing but the row."""
    every_lane.make_training_lane(request.param, request.config)
    return lambda: every_lane.make_training_lane(request.param, request.config)


def a_trainer(path, lane, config=None, **options) -> Trainer:
    return Trainer(open_model(path, lane).model, lane, config or a_config(), **options)


def steps(trainer: Trainer, count: int, *, first: int = 0):
    """Take steps on examples that differ from step to step."""
    return [finish(trainer.train_step(read(some_examples(LENGTHS, seed=first + i)))) for i in range(count)]


# --- what changes no bit ---------------------------------------------------------------------


def test_micro_batches_change_no_bit(model_dir, make_lane):
    config = a_config(dropout=0.25, max_gradient_norm=0.5)
    outcomes = [
        steps(a_trainer(model_dir, make_lane(), config, micro_batch_size=size), 3) for size in (1, 2, 4, 8)
    ]
    assert all(outcome == outcomes[0] for outcome in outcomes[1:])
    assert len({outcome.adapter_digest for outcome in outcomes[0]}) == 3


def test_layers_with_a_rank_of_their_own_train_to_the_same_bytes_and_go_on(qwen3, make_lane):
    exceptions = {
        "layers.1.self_attn.q_proj": RankAndAlpha(rank=2, alpha=6.0),
        "embed_tokens": RankAndAlpha(rank=3, alpha=3.0),
    }
    config = a_config(dropout=0.25)
    config = dataclasses.replace(config, adapter=config.adapter.model_copy(update={"exceptions": exceptions}))
    whole, small = (a_trainer(qwen3, make_lane(), config, micro_batch_size=size) for size in (None, 1))
    outcomes = steps(whole, 3)
    assert steps(small, 2) == outcomes[:2]
    state = small.state()
    shapes = {key: values.shape for key, values in state.parameters.items()}
    assert shapes["base_model.model.model.embed_tokens.lora_embedding_A"] == (3, 97)
    assert shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"][1] == 2
    assert shapes["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"][1] == 4
    assert steps(a_trainer(qwen3, make_lane(), config, state=state), 1, first=2) == outcomes[2:]


def test_threads_change_no_bit(model_dir, request):
    every_lane.make_training_lane("mens-cpu-ref", request.config)
    from mens_cpu_ref.library import load_library

    made = []
    for threads in (1, 2):
        load_library().set_threads(threads)
        lane = every_lane.make_training_lane("mens-cpu-ref", request.config)
        made.append(steps(a_trainer(model_dir, lane), 3))
    load_library().set_threads(1)
    assert made[0] == made[1]


def test_the_reference_and_the_kernels_train_to_the_same_bytes(model_dir, request):
    made = [
        steps(
            a_trainer(model_dir, every_lane.make_training_lane(name, request.config), a_config(dropout=0.1)),
            3,
        )
        for name in every_lane.EXACT
    ]
    assert made[0] == made[1]


def test_padding_an_example_behind_its_last_trained_token_changes_nothing(qwen3):
    lane = RowTrainingLane()
    short = some_examples(LENGTHS)
    long = [
        example.model_copy(
            update={"token_ids": [*example.token_ids, 5, 6], "loss_mask": [*example.loss_mask, False, False]}
        )
        for example in short
    ]
    assert finish(a_trainer(qwen3, lane).train_step(read(short))) == finish(
        a_trainer(qwen3, lane).train_step(read(long))
    )


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(1, 13))
def test_every_example_is_in_one_micro_batch_and_in_order(lengths, size):
    examples = read(some_examples(lengths))
    for chosen in (size, None):
        together = [list(part) for part in cut(examples, chosen)]
        assert [i for part in together for i in part] == list(range(len(lengths)))
        assert all(together)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(2, 150), min_size=1, max_size=5),
    st.sampled_from([1, 2, 3, None]),
    st.integers(0, 2**64 - 1),
)
def test_any_examples_in_any_micro_batches_give_the_bytes_of_one_at_a_time(qwen3, lengths, size, seed):
    lane, examples = RowTrainingLane(), read(some_examples(lengths, seed=seed % 1000))
    config = a_config(("q_proj", "down_proj", "lm_head"), seed=seed, dropout=0.5)
    alone = finish(a_trainer(qwen3, lane, config, micro_batch_size=1).train_step(examples))
    assert finish(a_trainer(qwen3, lane, config, micro_batch_size=size).train_step(examples)) == alone


def test_the_head_in_slices_is_the_head_in_one_piece(qwen3, make_lane):
    """More than 128 trained positions: an update on the output matrix is C128 over all of them."""
    lane, config = make_lane(), a_config(("lm_head",))
    model = open_model(qwen3, lane).model
    trained = TrainExample(token_ids=list(range(90)) * 4, loss_mask=[False, *[True] * 359])
    (example,) = read([trained])
    adapter = random_adapter(Trainer.plan_for(model, config).shapes)
    _, sliced = gradients_of(model, lane, config, adapter, [example])

    micro = pack([example], 0)
    assert len(micro.slices) == 3
    values = {key: lane.from_host(value) for key, value in adapter.items()}
    adapted = model.adapted(make_loras(lane, Trainer.plan_for(model, config), values))
    cache, whole = model.new_cache(micro.blocks), {}
    hidden = adapted.head.embed(ForwardPass(lane, micro.batch, cache))
    for layer in adapted.layers:
        hidden = layer.forward(ForwardPass(lane, micro.batch, cache), hidden)
    run = TrainingPass(
        lane, micro.batch, cache, micro.rows, gradient=lambda name, made: whole.update({name: made[0]})
    )
    _, dlogits = lane.cross_entropy(
        adapted.head.logits(run, lane.take_rows(hidden, micro.batch.logit_rows)),
        np.array(example.token_ids[1:], np.int32),
        name="loss",
    )
    adapted.head.backward(run, dlogits)
    if isinstance(lane, RowTrainingLane):
        assert all(np.allclose(sliced[name], whole[name], rtol=1e-4, atol=1e-5) for name in whole)
    else:
        assert all(sliced[name].tobytes() == lane.to_host(whole[name]).tobytes() for name in whole)


class Dropping(RowTrainingLane):
    """Writes down which random words were asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def dropout(self, x, rate, key, positions, examples, *, name):
        self.asked.append((key, tuple(positions.tolist()), tuple(examples.tolist())))
        return super().dropout(x, rate, key, positions, examples, name=name)


def test_dropout_is_told_seed_step_matrix_position_and_example(qwen3):
    lane = Dropping()
    trainer = a_trainer(
        qwen3, lane, a_config(("q_proj", "lm_head"), dropout=0.5, seed=2**40), micro_batch_size=2
    )
    examples = read(some_examples((4, 6, 5)))
    for _ in range(2):
        finish(trainer.train_step(examples))
    assert {(key.seed, key.step) for key, _, _ in lane.asked} == {(2**40, 0), (2**40, 1)}
    assert {key.layer for key, _, _ in lane.asked} == {0, 1, 2}
    of_layers = {(positions, of) for key, positions, of in lane.asked if key.layer == 1}
    rows = [example.rows for example in examples]
    assert of_layers == {
        ((*range(rows[0]), *range(rows[1])), (*[0] * rows[0], *[1] * rows[1])),
        (tuple(range(rows[2])), tuple([2] * rows[2])),
    }
    of_head = {(positions, of) for key, positions, of in lane.asked if key.layer == 0}
    assert of_head == {
        (
            tuple(t - 1 for e in pair for t in examples[e].trained),
            tuple(e for e in pair for _ in examples[e].trained),
        )
        for pair in ((0, 1), (2,))
    }


# --- what does -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 8},
        {"rank": 5},
        {"alpha": 9.0},
        {"rank_stabilised": True},
        {"dropout": 0.1},
        {"learning_rate": 2e-2},
        {"beta1": 0.8},
        {"beta2": 0.9},
        {"eps": 1e-3},
        {"weight_decay": 0.1},
        {"max_gradient_norm": 0.01},
        {"schedule": Schedule(warmup_steps=5)},
        {"schedule": Schedule(kind="linear", total_steps=3)},
        {"schedule": Schedule(kind="cosine", total_steps=3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_each_setting_is_felt(qwen3, other):
    lane = RowTrainingLane()
    base = steps(a_trainer(qwen3, lane, a_config(("q_proj", "up_proj"))), 2)
    changed = steps(a_trainer(qwen3, lane, a_config(("q_proj", "up_proj"), **other)), 2)
    assert base[-1].adapter_digest != changed[-1].adapter_digest


def test_the_order_of_examples_is_the_tree_s(qwen3):
    examples = read(some_examples(LENGTHS))
    one, other = (
        finish(a_trainer(qwen3, RowTrainingLane()).train_step(order)) for order in (examples, examples[::-1])
    )
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    assert one.adapter_digest != other.adapter_digest


# --- training is serving -----------------------------------------------------------------------


def logits_of(model, ids) -> bytes:
    made = model.forward(Sequences().step([(0, ids)], all_logits=True), model.new_cache(4))
    assert made.faults == ()
    return np.ascontiguousarray(model.ops.to_host(made.logits), "<f4").tobytes()


def test_a_new_adapter_gives_exactly_the_base_s_bytes(model_dir, make_lane):
    lane = make_lane()
    model = open_model(model_dir, lane).model
    trainer = Trainer(model, lane, a_config())
    ids = list(range(90)) * 2
    assert logits_of(trainer.model, ids) == logits_of(model, ids)


class NegativeZeros(RowTrainingLane):
    """A lane whose `o_proj` makes -0, as a product that is flushed does."""

    def linear(self, x, weight, *, name):
        y = super().linear(x, weight, name=name)
        if name.endswith("o_proj"):
            y[:, ::2] = -0.0
        self.made = {**getattr(self, "made", {}), name: y}
        return y

    def add(self, a, b, *, name):
        self.seen = {**getattr(self, "seen", {}), name: b}
        return super().add(a, b, name=name)


def test_a_zero_update_leaves_negative_zeros_alone(qwen3):
    lane = NegativeZeros()
    trainer = a_trainer(qwen3, lane, a_config(("o_proj",)))
    logits_of(trainer.model, [1, 2, 3])
    attended = lane.seen["layers.0.attention_residual"]
    assert np.signbit(attended[:, ::2]).all(), "+0 was added to -0"


def test_logits_in_training_are_those_of_serving_the_same_adapter(model_dir, make_lane):
    import hashlib

    lane = make_lane()
    trainer = a_trainer(model_dir, lane)
    steps(trainer, 2)
    examples = some_examples((140, 9))
    scores = finish(trainer.evaluate(read(examples), digests=True))
    for example, score in zip(examples, scores, strict=True):
        assert hashlib.sha256(logits_of(trainer.model, example.token_ids)).hexdigest() == score.logits_digest
    plain = finish(trainer.evaluate(read(examples), digests=False))
    assert [score.loss for score in plain] == [score.loss for score in scores]


def test_the_loss_of_a_step_is_that_of_an_evaluation_before_it(qwen3, make_lane):
    trainer = a_trainer(qwen3, make_lane())
    steps(trainer, 1)
    examples = read(some_examples((20,)))
    (score,) = finish(trainer.evaluate(examples, digests=False))
    outcome = finish(trainer.train_step(examples))
    exact = Fraction(float(score.loss)) / len(examples[0].trained)
    assert outcome.loss == np.float32(float(exact))


def test_the_digest_is_that_of_the_tensors(qwen3):
    trainer = a_trainer(qwen3, RowTrainingLane())
    before = trainer.adapter_digest
    outcome = steps(trainer, 1)[0]
    assert outcome.adapter_digest == trainer.adapter_digest != before
    assert adapter_digest(trainer.state().parameters) == outcome.adapter_digest


# --- going on --------------------------------------------------------------------------------


def test_a_trainer_made_of_a_state_goes_on_to_the_same_bytes(model_dir, make_lane):
    config = a_config(dropout=0.1, schedule=Schedule(kind="cosine", warmup_steps=2, total_steps=6))
    whole = steps(a_trainer(model_dir, make_lane(), config), 5)
    first = a_trainer(model_dir, make_lane(), config)
    steps(first, 2)
    second = a_trainer(model_dir, make_lane(), config, state=first.state())
    assert steps(second, 3, first=2) == whole[2:]


# --- all or nothing ----------------------------------------------------------------------------


class Faulty(RowTrainingLane):
    """Says of one operator that its output was not finite, in given rows."""

    at: str | None = None
    rows: tuple[int, ...] = (0,)

    def _checked(self, name, y):
        if name == self.at:
            self._faults.append(Fault(name, self.rows))
        return super()._checked(name, y)


KEY = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
EMBEDDING_KEY = "base_model.model.model.embed_tokens.lora_embedding_A"


@pytest.mark.parametrize(
    ("at", "rows", "facts"),
    [
        ("embed_tokens", (3,), {"layer": "embedding", "example": 1, "position": 2}),
        ("layers.1.self_attn.attention", (11,), {"layer": 1, "example": 2, "position": 3}),
        ("layers.0.mlp.up_proj.lora_B", (0,), {"layer": 0, "example": 0, "position": 0}),
        ("loss", (0,), {"layer": "head", "example": 0, "position": 0}),
        ("layers.1.mlp.gated.backward", (2,), {"layer": 1, "example": 1, "position": 1}),
        ("layers.1.mlp.up_proj.lora_A.gradient", (1,), {"layer": 1, "example": 1}),
        ("lm_head.lora_B.gradient", (1,), {"layer": "head", "example": 1}),
        ("embed_tokens.lora_A.backward", (2,), {"layer": "embedding", "example": 1, "position": 1}),
        ("embed_tokens.lora_A.gradient", (1,), {"layer": "embedding", "example": 1}),
        (f"{EMBEDDING_KEY}.sum", (0,), {"layer": "embedding"}),
        (f"{KEY}.sum", (0,), {"layer": 1}),
        (f"{KEY}.mean", (0,), {"layer": 1}),
        (KEY, (0,), {"layer": 1}),
    ],
)
def test_what_is_not_finite_is_named_and_the_step_is_not_taken(qwen3, at, rows, facts):
    lane = Faulty()
    trainer = a_trainer(qwen3, lane)
    expected = steps(a_trainer(qwen3, RowTrainingLane()), 3)
    steps(trainer, 1)
    before = copied(trainer.state())
    lane.at, lane.rows = at, rows
    with pytest.raises(BackendError) as caught:
        steps(trainer, 1, first=1)
    error = caught.value.error
    assert error.code == "non-finite"
    assert error.facts == {"operator": at, "step": 2, **facts}
    assert error.message.startswith("step 2 was not taken and the adapter is unchanged")
    after = trainer.state()
    assert same(before, after)
    lane.at = None
    assert steps(trainer, 2, first=1) == expected[1:], "the step can be taken after all"


def copied(state: TrainerState) -> TrainerState:
    """What it is now: the trainer hands out its very tensors, so changes in place would show in both."""

    def copies(tensors):
        return {key: np.array(values) for key, values in tensors.items()}

    return TrainerState(
        step=state.step,
        parameters=copies(state.parameters),
        first_moments=copies(state.first_moments),
        second_moments=copies(state.second_moments),
    )


def same(one: TrainerState, other: TrainerState) -> bool:
    return one.step == other.step and all(
        getattr(one, part)[key].tobytes() == getattr(other, part)[key].tobytes()
        for part in ("parameters", "first_moments", "second_moments")
        for key in one.parameters
    )


@pytest.mark.parametrize("after", [1, 4, 9, 12])
def test_a_step_that_is_left_changes_nothing(qwen3, after):
    trainer = a_trainer(qwen3, RowTrainingLane(), micro_batch_size=4)
    before = copied(trainer.state())
    work = trainer.train_step(read(some_examples(LENGTHS)))
    for _ in range(after):
        next(work)
    work.close()
    assert same(before, trainer.state())
    assert steps(trainer, 1) == steps(a_trainer(qwen3, RowTrainingLane()), 1)


def test_a_gradient_norm_beyond_float32_is_an_error(qwen3):
    class Huge(RowTrainingLane):
        def sum_of_squares(self, x, *, name):
            return np.float32(3e38)

    with pytest.raises(BackendError, match="gradient norm is not finite") as caught:
        steps(a_trainer(qwen3, Huge()), 1)
    assert caught.value.error.facts == {"operator": "gradient norm", "layer": "update", "step": 1}


@pytest.mark.parametrize("lane_name", every_lane.EXACT)
def test_a_run_that_diverges_says_in_which_step_and_layer(qwen3, lane_name, request):
    """A rate that no one should choose: the first layer with an update overflows, and is named."""
    lane = every_lane.make_training_lane(lane_name, request.config)
    config = a_config(("layers.1.self_attn.v_proj", "layers.1.mlp.down_proj"), learning_rate=1e30)
    trainer = a_trainer(qwen3, lane, config)
    with pytest.raises(BackendError) as caught:
        steps(trainer, 4)
    error = caught.value.error
    assert error.code == "non-finite"
    assert (error.facts["step"], error.facts["layer"]) == (2, 1), error
    assert trainer.step == 1


# --- clipping and memory -----------------------------------------------------------------------


def test_clipping_shortens_to_the_limit_and_leaves_less_alone(qwen3):
    lane = RowTrainingLane()
    norm = steps(a_trainer(qwen3, lane, a_config(("q_proj",))), 1)[0].gradient_norm
    clipped = Trainer(open_model(qwen3, lane).model, lane, a_config(("q_proj",), max_gradient_norm=norm / 2))
    free = Trainer(open_model(qwen3, lane).model, lane, a_config(("q_proj",), max_gradient_norm=2 * norm))
    unclipped = Trainer(open_model(qwen3, lane).model, lane, a_config(("q_proj",)))
    for trainer in (clipped, free, unclipped):
        assert steps(trainer, 1)[0].gradient_norm == norm, "the norm is the one before clipping"
    moments = [t.state().first_moments for t in (clipped, free, unclipped)]
    for key in moments[0]:
        assert moments[1][key].tobytes() == moments[2][key].tobytes()
        np.testing.assert_allclose(moments[0][key], moments[2][key] / 2, rtol=1e-6)


class Counting(RowTrainingLane):
    """Knows the rows of the largest thing that the head made, and the layers of each cache."""

    most_logits, cache_layers = 0, 0

    def cross_entropy(self, logits, targets, *, name):
        self.most_logits = max(self.most_logits, len(logits))
        return super().cross_entropy(logits, targets, name=name)

    def new_kv_cache(self, *, layers, kv_heads, head_dim, blocks):
        self.cache_layers = max(self.cache_layers, layers)
        return super().new_kv_cache(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)


def test_logits_exist_for_128_rows_and_keys_for_one_layer(qwen3):
    lane = Counting()
    trainer = a_trainer(qwen3, lane)
    lane.cache_layers = 0
    finish(trainer.train_step(read(some_examples((400, 300, 90, 40)))))
    assert lane.most_logits == 128
    assert lane.cache_layers == 1


# --- against torch ------------------------------------------------------------------------------

RUN_STEPS = 50


def test_fifty_steps_overlay_torch_s_adamw_in_float64(tmp_path):
    """Learning rate, betas and corrections are float32 values in ours: each is off by at most 2^-24.

    A parameter's step is lr * m / (sqrt(v) + eps), so one step of ours differs from torch's by at
    most a few 2^-24 of lr, and 50 steps by 50 times that; curvature between them multiplies the
    difference by less than ten here. The losses follow.
    """
    config = SMALL["qwen3"]
    path, lane = write_model(tmp_path, config, seed=3), Float64TrainingLane()
    run = a_config(LAYER_TARGETS, learning_rate=1e-2, weight_decay=0.01)
    trainer = Trainer(open_model(path, lane).model, lane, run)
    judge = oracle(config, trainer.state().parameters, trainer.plan.matrices[0].scale)
    optimizer = torch.optim.AdamW(
        judge.adapter.values(),
        lr=float(np.float32(1e-2)),
        betas=(float(np.float32(0.9)), float(np.float32(0.999))),
        eps=float(np.float32(1e-8)),
        weight_decay=float(np.float32(0.01)),
    )
    data = [read(some_examples((14, 9, 6), seed=i % 5)) for i in range(RUN_STEPS)]
    ours, theirs, norms = [], [], []
    for examples in data:
        outcome = finish(trainer.train_step(examples))
        ours.append(outcome.loss)
        optimizer.zero_grad()
        loss = judge.mean_loss([(e.token_ids, e.trained) for e in examples])
        loss.backward()
        norm = torch.sqrt(sum(tensor.grad.square().sum() for tensor in judge.adapter.values()))
        norms.append(outcome.gradient_norm / float(norm) - 1)
        optimizer.step()
        theirs.append(float(loss.detach()))
    assert theirs[-5] < theirs[0] - 0.5, "a run that learns nothing proves nothing"
    bound = RUN_STEPS * 1e-2 * 8 * 2.0**-24 * 10
    found = trainer.state().parameters
    worst = max(
        float(np.abs(found[key] - tensor.detach().numpy()).max()) for key, tensor in judge.adapter.items()
    )
    print(f"after {RUN_STEPS} steps the worst parameter is off by {worst:.3g}, allowed {bound:.3g}")
    assert worst < bound
    assert np.abs(norms).max() < 1e-4, "a norm of gradients that were not divided by the trained tokens"
    assert np.abs(np.array(ours) - theirs).max() < bound


def test_the_model_that_is_trained_is_the_base_with_updates(qwen3):
    trainer = a_trainer(qwen3, RowTrainingLane(), a_config(ALL_TARGETS))
    adapted = {name for name, linear in trainer.model.linears.items() if linear.lora is not None}
    assert adapted == set(trainer.model.linears)
    assert trainer.model.head.embedding.lora is not None
    bare = trainer.model.adapted({})
    assert all(linear.lora is None for linear in bare.linears.values())
    assert bare.head.embedding.lora is None
    head = trainer.model.head
    assert dataclasses.replace(bare.head, output=head.output, embedding=head.embedding) == head
