"""Parts of fast mode by themselves, each against its definition: what a whole model's tolerance covers."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import a_config
from mens_core.micro_batches import Example
from mens_core.ops import BLOCK, AttentionSpec, Batch
from mens_core.rotary import Rope, frequencies
from mens_core.rotary import table as exact_angles
from mens_core.trainer import Trainer, TrainerState
from mens_core.training_ops import AdamW
from mens_torch_cuda.fast.attention import Places, decode_attention
from mens_torch_cuda.fast.decoder import Decoder
from mens_torch_cuda.fast.dropout import dropped
from mens_torch_cuda.fast.flat_adapter import FlatAdapter
from mens_torch_cuda.fast.groups import Group, Part, Update
from mens_torch_cuda.fast.laid_out import LaidOut
from mens_torch_cuda.fast.loss import losses_and_gradient
from mens_torch_cuda.fast.ops import FastOps
from mens_torch_cuda.fast.recorded import filled_up
from mens_torch_cuda.fast.rotary import FastRotaryTable
from mens_torch_cuda.fast.weights import weight_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("qwen3"), BY_FAMILY["qwen3"], seed=3)


# --- attention of decode steps ------------------------------------------------------------------------


def decoded(window: int | None, *, unseen: float) -> torch.Tensor:
    """One sequence of 3 positions behind 128 others; only keys in its window are 1, and values are places."""
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=1.0, window=window)
    keys, values = torch.zeros(3, 1, BLOCK, 8), torch.full((3, 1, BLOCK, 8), unseen)
    first = 0 if window is None else 131 - window
    for at in range(first, 131):
        values[1 if at < BLOCK else 2, 0, at % BLOCK] = float(at)
    batch = Batch(
        token_ids=np.zeros(1, np.int32),
        positions=np.array([130], np.int32),
        starts=np.array([0, 1], np.int32),
        block_tables=np.array([[1, 2]], np.int32),
        logit_rows=np.zeros(1, np.int32),
    )
    q = torch.ones(1, 16)
    return decode_attention(q, keys, values, Places.of(batch, CPU), spec)


@pytest.mark.parametrize("window", [None, 1, 3, 64, 130])
@pytest.mark.parametrize("unseen", [1e6, torch.inf, torch.nan])
def test_a_decode_row_sees_its_window_and_nothing_that_was_left_around_it(window, unseen):
    """Equal scores: the result is the mean of the places that are seen."""
    seen = range(0 if window is None else 131 - window, 131)
    made = decoded(window, unseen=unseen)
    assert torch.allclose(made, torch.full_like(made, float(np.mean(seen))), rtol=1e-5)


# --- choosing ------------------------------------------------------------------------------------------


def test_what_is_chosen_is_of_these_logits_and_as_they_are_now(model_dir):
    model = open_model(model_dir, FastOps(CPU, facts={})).model
    ops, sequences, cache = model.ops, Sequences(), model.new_cache(4)
    logits = model.forward(sequences.step([(0, [1, 2, 3])]), cache).logits
    (highest,) = ops.argmax(logits).tolist()
    assert highest == int(logits[0].argmax())
    assert ops.argmax(torch.tensor([[0.0, 2.0, 1.0]])).tolist() == [1]
    far = np.array([1e4], np.float32)
    ops.penalise(logits, 0, np.array([highest], np.int32), repetition=np.ones(1, np.float32), subtract=far)
    assert ops.argmax(logits).tolist() == [int(logits[0].argmax())] != [highest]


def test_a_fault_of_the_head_is_of_the_batch_s_row(model_dir):
    model = open_model(model_dir, FastOps(CPU, facts={})).model
    sequences, cache = Sequences(), model.new_cache(4)
    product = model.ops.linear

    def one_infinity(x, weight, *, name):
        made = product(x, weight, name=name)
        if name == "lm_head":
            made[1, 3] = torch.inf
        return made

    model.ops.linear = one_infinity
    # Of five rows the third and the last are asked for.
    result = model.forward(sequences.step([(0, [1, 2, 3]), (1, [4, 5])]), cache)
    assert [(fault.row, fault.name) for fault in result.faults] == [(4, "lm_head")]


def test_filled_up_tables_have_widths_that_many_steps_share():
    for width in range(1, 9):
        batch = Batch(
            token_ids=np.zeros(1, np.int32),
            positions=np.array([128 * width - 1], np.int32),
            starts=np.array([0, 1], np.int32),
            block_tables=np.arange(width, dtype=np.int32)[None],
            logit_rows=np.zeros(1, np.int32),
        )
        tables = filled_up(batch, 99).block_tables
        assert tables.shape[1] == {1: 1, 2: 2, 3: 4, 4: 4}.get(width, 8)
        assert tables[0, :width].tolist() == list(range(width)) and (tables[0, width:] == -1).all()


# --- angles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [None, (5, 4)])
def test_angles_far_along_are_those_of_the_exact_table(factor):
    """In float32 a turn's position would be off by a tenth at position 10^6."""
    turns = frequencies(Rope(theta=Fraction(10**6), head_dim=16))
    table = FastRotaryTable(CPU, turns, factor)
    table.reach(1_000_000)
    far = range(999_990, 1_000_000)
    for found, exact in zip((table.cosines, table.sines), exact_angles(turns, factor, far), strict=True):
        assert np.abs(found[far.start : far.stop].numpy() - exact).max() < 1e-6


# --- memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_what_weights_take_is_told_before_they_are_loaded(tmp_path, tied):
    """Matrices are rounded to two bytes a number; norms stay at four, which are few."""
    folder = write_model(tmp_path, {**BY_FAMILY["qwen3"], "tie_word_embeddings": tied}, seed=3)
    model = open_model(folder, FastOps(CPU, facts={})).model
    matrices = {id(linear.weight): linear.weight.nbytes for linear in model.linears.values()}
    matrices[id(model.head.embedding.weight)] = model.head.embedding.weight.nbytes
    told, held = weight_bytes(folder), sum(matrices.values())
    assert 0 <= told - held < 2000


# --- the head ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_head_s_gradient_is_that_of_its_loss(softcap):
    """By torch's own tape; a cap of 2 bends logits that reach 4."""
    torch.manual_seed(6)
    weight, x = (torch.randn(rows, 8).to(torch.bfloat16) for rows in (11, 5))
    norm = torch.rand(8) + 0.5
    targets = torch.tensor([0, 10, 3, 3, 7])
    decoder = SimpleNamespace(
        head=Group(("lm_head",), (11,), weight), final_norm=norm, eps=1e-6, softcap=softcap
    )
    losses, gradient = losses_and_gradient(decoder, x, targets, backward=True)
    of_x = x.float().requires_grad_()
    logits = of_x * torch.rsqrt(of_x.square().mean(1, keepdim=True) + 1e-6) * norm @ weight.float().t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    right = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    right.sum().backward()
    # The norm's output, the gradient of the logits and what a product makes of it are bfloat16.
    most = of_x.grad.abs().max().item()
    torch.testing.assert_close(losses, right.detach(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(gradient.float(), of_x.grad, rtol=0, atol=0.03 * most)


# --- examples side by side ------------------------------------------------------------------------------


def test_examples_side_by_side_know_whose_row_is_whose_in_the_step():
    examples = [Example((5, 6, 7, 8), (2, 3)), Example((9, 1), (1,))]
    laid = LaidOut.of(examples, 4, CPU)
    # Of the last learned token nothing is run but what precedes it.
    assert laid.rows.token_ids.tolist() == [5, 6, 7, 9]
    assert (laid.wanted.tolist(), laid.targets.tolist()) == ([1, 2, 3], [7, 8, 1])
    places = [laid.place_of(row)[0] for row in range(4)]
    assert [place["example"] for place in places] == [4, 4, 4, 5]
    assert [place["position"] for place in places] == [0, 1, 2, 0]


# --- updates -------------------------------------------------------------------------------------------


def test_adamw_is_its_formula(model_dir):
    model = open_model(model_dir, FastOps(CPU, facts={})).model
    plan = Trainer.plan_for(model, a_config(("q_proj",)))
    rng = np.random.default_rng(4)

    def some() -> dict[str, np.ndarray]:
        return {key: rng.uniform(0.5, 1, shape).astype(np.float32) for key, shape in plan.shapes.items()}

    state = TrainerState(step=3, parameters=some(), first_moments=some(), second_moments=some())
    adapter = FlatAdapter(plan, Decoder.of(model), CPU, state)
    by = AdamW(0.25, 0.75, 0.25, 0.875, 0.125, 0.5, 0.625, 0.5, 0.375)
    gradient = torch.linspace(-1, 1, len(adapter.values))
    p, m, v, g = (x.double() for x in (adapter.values, adapter.first, adapter.second, gradient))
    m, v = 0.75 * m + 0.25 * g, 0.875 * v + 0.125 * g * g
    p = p * 0.625 - 0.25 * (m / 0.5) / ((v / 0.375).sqrt() + 0.5)
    for found, right in zip(adapter.stepped(gradient, by), (p, m, v), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-7)


def test_dropout_keeps_the_mean_and_follows_from_its_key():
    x = torch.ones(200, 50)
    made = dropped(x, 0.25, (7, 0, 3, 0))
    assert set(made.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert made.mean().item() == pytest.approx(1, abs=0.03)
    assert torch.equal(made, dropped(x, 0.25, (7, 0, 3, 0)))
    for other in ((8, 0, 3, 0), (7, 1, 3, 0), (7, 0, 4, 0), (7, 0, 3, 1)):
        assert (made != dropped(x, 0.25, other)).float().mean() > 0.3


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_group_s_gradients_are_those_of_its_forward(is_dropped):
    """By torch's own tape: two layers of one input, each with a rank, a scale and a dropout of its own."""
    torch.manual_seed(5)
    weight, x, dy = torch.randn(11, 6), torch.randn(9, 6), torch.randn(9, 11)
    a, raw = torch.randn(5, 6), [torch.randn(7, 2), torch.randn(4, 3)]
    scales, masks = (0.5, 2.0), {3: torch.rand(9, 6) < 0.5, 8: torch.rand(9, 6) < 0.5}
    b = torch.zeros(11, 5)
    b[:7, :2], b[7:, 2:] = raw[0] * scales[0], raw[1] * scales[1]
    parts = [
        Part(slice(0, 7), slice(0, 2), torch.zeros(7, 2), scales[0], 3),
        Part(slice(7, 11), slice(2, 5), torch.zeros(4, 3), scales[1], 8),
    ]
    group = Group(("q", "k"), (7, 4), weight, Update(a, b, torch.zeros(5, 6), parts))
    if is_dropped:
        group.drop = lambda values, number: torch.where(masks[number], 2 * values, torch.zeros(()))

    of_x, of_a = x.clone().requires_grad_(), a.clone().requires_grad_()
    of_b = [part.clone().requires_grad_() for part in raw]
    made = []
    for part, rows, mine in zip(parts, (weight[:7], weight[7:]), of_b, strict=True):
        seen = torch.where(masks[part.number], 2 * of_x, torch.zeros(())) if is_dropped else of_x
        made.append(of_x @ rows.t() + (seen @ of_a[part.columns].t()) @ mine.t() * part.scale)
    right = torch.cat(made, 1)
    right.backward(dy)

    y, u = group.forward(x)
    torch.testing.assert_close(y, right.detach())
    torch.testing.assert_close(group.backward(dy, x, u), of_x.grad)
    torch.testing.assert_close(group.update.a_gradient, of_a.grad)
    for part, mine in zip(parts, of_b, strict=True):
        torch.testing.assert_close(part.gradient, mine.grad)
