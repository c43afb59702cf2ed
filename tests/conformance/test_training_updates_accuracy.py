"""What section 13 is worth: against float64, torch and finite differences, within derived bounds.

u = 2^-24 is the error of one rounding; a C128 sum of K terms errs by (128 + K / 128) u times the sum
of the terms' magnitudes. The kernels equal the reference (test_training_updates_same_bits), which
equals the page (test_training_updates_by_integers), so the kernels alone are judged.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mens_core.adapters.initial import _uniform
from mens_core.adapters.plan import AdaptedMatrix
from mens_core.ops import StoredTensor
from mens_core.schedule import BetaPowers, adamw_constants
from mens_core.training_ops import DropoutKey
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.training_lane import CpuTrainingOps
from oracle.ggml_blocks import COLUMNS, FORMATS, random_blocks
from vox_plugin_api.train_messages import OptimizerConfig

U = 2.0**-24
TINY = 2.0**-126


@pytest.fixture(scope="module")
def ops(library):
    return CpuTrainingOps(library)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def c128(terms: int) -> float:
    return (128 + terms / 128) * U


def assert_within(found, exact, bound):
    error = np.abs(np.asarray(found, np.float64) - exact)
    assert (error <= bound + TINY).all(), (error / (bound + TINY)).max()
    # A bound that nothing comes near would prove nothing.
    assert error.max() > 0


def stored(values):
    return StoredTensor("w", "f32", values.shape, memoryview(np.ascontiguousarray(values).tobytes()))


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f32", *FORMATS])
def test_linear_backward_errs_as_a_chain_of_128_does(ops, name):
    rng = np.random.default_rng(1)
    outputs, inputs = 1300, 512
    if name == "f32":
        matrix = ops.load_matrix(stored(normal(rng, outputs, inputs)))
    else:
        blocks = random_blocks(name, outputs * inputs // COLUMNS[name], rng)
        matrix = ops.load_matrix(StoredTensor("w", name, (outputs, inputs), memoryview(blocks.reshape(-1))))
    w = ops.embed(matrix, np.arange(outputs, dtype=np.int32), None, name="w").values.astype(np.float64)
    dy = normal(rng, 9, outputs)
    dx = ops.linear_backward(Rows(dy), matrix, name="dx").values
    wide = dy.astype(np.float64)
    assert_within(dx, wide @ w, c128(outputs) * (np.abs(wide) @ np.abs(w)))


def test_example_products_are_products_of_each_example(ops):
    rng = np.random.default_rng(2)
    starts = np.array([0, 300, 301, 700], np.int32)
    a, b = normal(rng, 700, 37), normal(rng, 700, 90)
    made = ops.example_products(Rows(a), Rows(b), starts, name="dw")
    for gradient, (first, last) in zip(made, pairwise(starts.tolist()), strict=True):
        left, right = a[first:last].astype(np.float64), b[first:last].astype(np.float64)
        assert_within(gradient.values, left.T @ right, c128(last - first) * (np.abs(left).T @ np.abs(right)))


def test_embed_backward_is_the_product_with_the_tokens(ops):
    rng = np.random.default_rng(3)
    dy, ids = normal(rng, 400, 20), rng.integers(0, 9, 400).astype(np.int32)
    (gradient,) = ops.embed_backward(Rows(dy), ids, np.array([0, 400], np.int32), 10, name="de")
    taken = np.eye(10)[ids]
    assert_within(gradient.values, taken.T @ dy, c128(400) * (taken.T @ np.abs(dy.astype(np.float64))))
    assert gradient.values[9].tobytes() == bytes(80)


# --- the loss against torch --------------------------------------------------------------------------


def test_cross_entropy_is_torchs_in_float64(ops):
    import torch

    rng = np.random.default_rng(4)
    logits, targets = 3 * normal(rng, 5, 5000), rng.integers(0, 5000, 5).astype(np.int32)
    losses, gradients = ops.cross_entropy(Rows(logits), targets, name="loss")
    x = torch.from_numpy(logits).double().requires_grad_()
    exact = torch.nn.functional.cross_entropy(x, torch.from_numpy(targets).long(), reduction="none")
    exact.sum().backward()
    loss = exact.detach().numpy()
    # S errs by its sum and by exp (2 u, and u |x - m| for the rounded difference); each sum after it by u.
    distance = logits.max(axis=1, keepdims=True) - logits.astype(np.float64)
    of_s = c128(5000) + (2 + distance.max(axis=1)) * U
    size = np.abs(logits).max(axis=1) + np.abs(loss)
    assert_within(losses.values, loss, of_s + 4 * size * U)
    gradient = x.grad.numpy()
    share = gradient.copy()
    share[np.arange(5), targets] += 1
    bound = share * (of_s[:, None] + (distance + 4) * U)
    bound[np.arange(5), targets] += U
    assert_within(gradients.values, gradient, bound)


def test_the_gradient_of_the_loss_is_its_slope(ops):
    rng = np.random.default_rng(5)
    logits, targets = 2 * normal(rng, 1, 40), np.array([7], np.int32)
    h = 2.0**-5
    stepped = np.concatenate([logits + h * np.eye(40), logits - h * np.eye(40)]).astype(np.float32)
    losses, _ = ops.cross_entropy(Rows(stepped), np.repeat(targets, 80), name="loss")
    _, gradient = ops.cross_entropy(Rows(logits), targets, name="loss")
    wide = losses.values.astype(np.float64)
    moved = (stepped[:40] - stepped[40:]).astype(np.float64)[np.arange(40), np.arange(40)]
    slope = (wide[:40] - wide[40:]) / moved
    # The third derivative p (1 - p) (1 - 2 p) is below 0.1; a loss near 5 errs by some 40 u, plus S's error.
    bound = h * h / 6 * 0.1 + 2 * (40 + c128(40) / U) * U / (2 * h)
    assert (np.abs(slope - gradient.values[0]) <= bound).all()
    assert bound < 0.01 * np.abs(gradient.values).max()


# --- an adapter against autograd -----------------------------------------------------------------------


def test_an_adapter_has_the_gradients_of_autograd(ops):
    import torch

    rng = np.random.default_rng(6)
    n, outputs, inputs, rank, scale = 70, 200, 150, 8, float(np.float32(16 / 8**0.5))
    x, dy = normal(rng, n, inputs), normal(rng, n, outputs)
    w, a, b = normal(rng, outputs, inputs), normal(rng, rank, inputs), normal(rng, outputs, rank)
    matrix_a, matrix_b = (ops.matrix(Rows(m), name="m") for m in (a, b))
    u = ops.linear(Rows(x), matrix_a, name="u")
    v = ops.linear(u, matrix_b, name="v")
    y = ops.add_scaled(ops.linear(Rows(x), ops.load_matrix(stored(w)), name="y"), v, scale, name="adapted")
    dv = ops.scale(Rows(dy), scale, name="dv")
    du = ops.linear_backward(dv, matrix_b, name="du")
    starts = np.array([0, n], np.int32)
    (da,) = ops.example_products(du, Rows(x), starts, name="da")
    (db,) = ops.example_products(dv, u, starts, name="db")
    dx = ops.add(
        ops.linear_backward(Rows(dy), ops.load_matrix(stored(w)), name="dx"),
        ops.linear_backward(du, matrix_a, name="update"),
        name="dx",
    )

    tx, tw, ta, tb = (torch.from_numpy(m).double().requires_grad_() for m in (x, w, a, b))
    exact = tx @ tw.T + scale * (tx @ ta.T) @ tb.T
    exact.backward(torch.from_numpy(dy).double())
    ax, ady, aw, aa, ab = (np.abs(m).astype(np.float64) for m in (x, dy, w, a, b))
    # Two sums one after the other, and a few roundings between them.
    twice = 2 * c128(200) + 4 * U
    assert_within(y.values, exact.detach().numpy(), twice * (ax @ aw.T + scale * ax @ aa.T @ ab.T))
    assert_within(da.values, ta.grad.numpy(), twice * ((scale * ady @ ab).T @ ax))
    assert_within(db.values, tb.grad.numpy(), twice * (scale * ady.T @ (ax @ aa.T)))
    assert_within(dx.values, tx.grad.numpy(), twice * (ady @ aw + scale * ady @ ab @ aa))


def test_first_values_are_spread_as_pefts_are():
    import torch

    columns, rank = 640, 64
    made = _uniform(AdaptedMatrix("w", 3, 1, columns, rank, 1.0), seed=1).astype(np.float64)
    theirs = torch.empty(rank, columns, dtype=torch.float64)
    torch.manual_seed(0)
    torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)
    bound = columns**-0.5
    assert np.abs(made).max() <= bound * (1 + U) and float(theirs.abs().max()) <= bound
    assert np.abs(made).max() > 0.999 * bound
    # Five standard errors of the mean and of the variance of a uniform distribution.
    count = rank * columns
    assert abs(made.mean()) < 5 * bound / np.sqrt(3 * count)
    assert abs(made.var() / (bound**2 / 3) - 1) < 5 * np.sqrt(0.8 / count)
    assert len(np.unique(made)) > 0.99 * count


# --- the update against torch --------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_torchs_in_float64(ops, decay):
    import torch

    rng = np.random.default_rng(7)
    options = OptimizerConfig(learning_rate=1e-3, weight_decay=decay, beta1=0.9, beta2=0.999, eps=1e-8)
    names = ("learning_rate", "beta1", "beta2", "eps")
    f = {name: float(np.float32(getattr(options, name))) for name in names}
    start, steps = normal(rng, 3, 50), 20
    parameter, m, v = (Rows(x) for x in (start.copy(), np.zeros_like(start), np.zeros_like(start)))
    theirs = torch.from_numpy(start).double().requires_grad_()
    optimizer = torch.optim.AdamW(
        [theirs], lr=f["learning_rate"], betas=(f["beta1"], f["beta2"]), eps=f["eps"],
        weight_decay=float(np.float32(decay)),
    )  # fmt: skip
    powers = BetaPowers(options, 0)
    for _ in range(steps):
        gradient = normal(rng, 3, 50) * np.float32(1e-3)
        by = adamw_constants(options, f["learning_rate"], powers.next())
        ops.adamw(parameter, Rows(gradient), m, v, by, name="w")
        powers.advance()
        theirs.grad = torch.from_numpy(gradient).double()
        optimizer.step()
    exact = theirs.detach().numpy()
    # A step costs the parameter two roundings of its own size. Its direction m / sqrt(v) errs by some
    # roundings of the greatest gradient, of which sqrt(v) is at least sqrt(1 - beta2), a thirtieth.
    bound = steps * (2 * U * np.abs(start).max() + f["learning_rate"] * 32 * 12 * U)
    assert_within(parameter.values, exact, bound)
    assert bound < 1e-2 * np.abs(exact - start).mean()
    assert not ops.take_faults()


def test_clipping_is_torchs_in_float64(ops):
    import torch

    rng = np.random.default_rng(8)
    tensors = [normal(rng, 8, 640), normal(rng, 300, 8), normal(rng, 1, 1)]
    total = np.float32(0)
    for i, x in enumerate(tensors):
        square = ops.sum_of_squares(Rows(x), name="square")
        total = square if i == 0 else total + square
    norm = np.sqrt(total)
    factor = float(np.float32(np.float64(0.5) / np.float64(norm)))
    theirs = [torch.zeros(x.shape, dtype=torch.float64, requires_grad=True) for x in tensors]
    for parameter, x in zip(theirs, tensors, strict=True):
        parameter.grad = torch.from_numpy(x).double()
    exact = float(torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    # Half of a sum's error, three sums after it, a root; torch adds 1e-6 to the norm.
    relative = c128(5120) / 2 + 8 * U
    assert abs(float(norm) - exact) <= relative * exact
    for parameter, x in zip(theirs, tensors, strict=True):
        ours = ops.scale(Rows(x), factor, name="clipped").values
        expected = parameter.grad.numpy()
        assert_within(ours, expected, np.abs(expected) * (relative + 4 * U + 1e-6 / exact))


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_drops_its_share_and_keeps_the_mean(ops, rate):
    rows, width = 300, 640
    x = np.ones((rows, width), np.float32)
    index = np.arange(rows, dtype=np.int32)
    made = ops.dropout(Rows(x), rate, DropoutKey(9, 0, 0), index, index % 7, name="d").values
    dropped = (made == 0).mean()
    assert abs(dropped - rate) < 5 * np.sqrt(rate * (1 - rate) / made.size)
    assert np.unique(made).tolist() == [0, np.float32(1 / (1 - rate))]
    # Neighbours in every direction fall independently.
    for other in (made[1:], made[:, 1:], made[:, 4:]):
        both = ((made[: other.shape[0], : other.shape[1]] == 0) & (other == 0)).mean()
        assert abs(both - rate**2) < 5 * np.sqrt(rate**2 / other.size)
    for key in (DropoutKey(10, 0, 0), DropoutKey(9, 1, 0), DropoutKey(9, 0, 1)):
        again = ops.dropout(Rows(x), rate, key, index, index % 7, name="d").values
        assert abs(((again == 0) & (made == 0)).mean() - rate**2) < 5 * np.sqrt(rate**2 / made.size)
