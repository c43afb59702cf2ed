"""The scalar reference of section 13 against its text on Python integers, by bytes."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from lanes.update_sides import Side
from mens_core.dropout_rate import DropoutRate
from mens_core.example_tree import ExampleTree
from mens_core.float32 import nearest, nearest_root
from mens_core.ops import StoredTensor
from mens_core.training_ops import AdamW, DropoutKey
from mens_cpu_ref.arrays import Rows
from oracle import quantised_integers
from oracle import update_integers as exact
from oracle.ggml_blocks import BYTES, COLUMNS, FORMATS, random_blocks


@pytest.fixture(scope="module")
def reference(library):
    return Side(library, None)


def spread(rng, *shape, binades=12):
    return np.ldexp(rng.standard_normal(shape), rng.integers(-binades, 3, shape)).astype(np.float32)


def bits(values) -> list:
    """The bits of an array of floats as nested lists of integers."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32).tolist()


def bit(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


# --- products ------------------------------------------------------------------------------------


def test_linear_backward(reference):
    rng = np.random.default_rng(1)
    dy, weight = spread(rng, 2, 300), spread(rng, 300, 5)
    stored = StoredTensor("w", "f32", weight.shape, memoryview(weight.tobytes()))
    (dx,), faults, _ = reference(
        lambda ops: ops.linear_backward(Rows(dy), ops.load_matrix(stored), name="dx")
    )
    assert not faults
    assert bits(dx) == [exact.linear_backward(row, bits(weight)) for row in bits(dy)]


@pytest.mark.parametrize("name", FORMATS)
def test_linear_backward_of_quantised_rows(reference, name):
    rng = np.random.default_rng(2)
    outputs, columns, distinct = 150, COLUMNS[name], 7
    # The rows repeat: spelling a block out with integers is slow.
    blocks = random_blocks(name, distinct, rng)
    file = np.resize(blocks, (outputs, BYTES[name]))
    stored = StoredTensor("w", name, (outputs, columns), memoryview(file.reshape(-1)))
    dy = spread(rng, 1, outputs)
    (dx,), *_ = reference(lambda ops: ops.linear_backward(Rows(dy), ops.load_matrix(stored), name="dx"))
    rows = [quantised_integers.dequantised(name, block.tobytes()) for block in blocks]
    weight = [rows[n % distinct] for n in range(outputs)]
    sample = slice(0, columns, 7)
    expected = exact.linear_backward(bits(dy)[0], [row[sample] for row in weight])
    assert bits(dx)[0][sample] == expected


def test_example_products(reference):
    rng = np.random.default_rng(3)
    starts = np.array([0, 130, 130, 171], np.int32)
    a, b = spread(rng, 171, 3), spread(rng, 171, 4)
    made, *_ = reference(lambda ops: ops.example_products(Rows(a), Rows(b), starts, name="dw"))
    assert bits(made[0]) == exact.example_product(bits(a[:130]), bits(b[:130]))
    assert bits(made[1]) == [[0] * 4] * 3
    assert bits(made[2]) == exact.example_product(bits(a[130:]), bits(b[130:]))


def test_embed_backward(reference):
    rng = np.random.default_rng(4)
    starts = np.array([0, 300, 305], np.int32)
    dy, ids = spread(rng, 305, 2), rng.integers(0, 6, 305).astype(np.int32)
    # Token 0 in the second chunk alone, token 1 in the first and the last: chunks without terms.
    ids[ids < 2] = 5
    ids[[140, 150, 200]] = 0
    ids[[3, 9, 280]] = 1
    made, *_ = reference(lambda ops: ops.embed_backward(Rows(dy), ids, starts, 7, name="de"))
    for gradient, (first, last) in zip(made, pairwise(starts.tolist()), strict=True):
        expected = exact.embed_backward(bits(dy[first:last]), ids[first:last].tolist(), 7, 2)
        assert bits(gradient) == expected


# --- loss ------------------------------------------------------------------------------------------


def test_cross_entropy(reference):
    rng = np.random.default_rng(5)
    logits = np.concatenate([4 * rng.standard_normal((2, 300)), np.full((1, 300), -0.0)]).astype(np.float32)
    logits[1, 17] = 60  # shares near the smallest, and a probability of 1
    targets = np.array([299, 17, 0], np.int32)
    (losses, gradients), *_ = reference(lambda ops: ops.cross_entropy(Rows(logits), targets, name="loss"))
    for row in range(3):
        loss, gradient = exact.cross_entropy(bits(logits[row]), int(targets[row]))
        assert bits(losses)[row] == loss
        assert bits(gradients)[row] == gradient


def test_example_sums(reference):
    rng = np.random.default_rng(6)
    first = [*range(3, 250, 11), 700, 701, 760]
    positions = np.array([*first, *range(5, 140, 9)], np.int32)
    starts = np.array([0, len(first), len(first), len(positions)], np.int32)
    losses = spread(rng, len(positions))
    (sums,), *_ = reference(lambda ops: ops.example_sums(Rows(losses), positions, starts))
    expected = [
        exact.example_sum(bits(losses[a:b]), positions[a:b].tolist()) for a, b in pairwise(starts.tolist())
    ]
    assert bits(sums) == expected
    assert expected[1] == 0


# --- adapters --------------------------------------------------------------------------------------


def test_scale_and_add_scaled(reference):
    rng = np.random.default_rng(7)
    x, y = spread(rng, 1, 500, binades=40), spread(rng, 1, 500)
    factor = float(np.float32(0.1))
    (scaled, added), *_ = reference(
        lambda ops: (
            ops.scale(Rows(x), factor, name="s"),
            ops.add_scaled(Rows(y), Rows(x), factor, name="a"),
        )
    )
    assert bits(scaled)[0] == [exact.multiply(v, bit(factor)) for v in bits(x)[0]]
    assert bits(added)[0] == [
        exact.add_scaled(v, w, bit(factor)) for v, w in zip(bits(y)[0], bits(x)[0], strict=True)
    ]


@pytest.mark.parametrize("rate", [0.0, float(np.float32(0.1)), 0.5, float(np.float32(0.9999))])
def test_dropout(reference, rate):
    rng = np.random.default_rng(8)
    x = spread(rng, 2, 203)
    positions, examples = np.array([0, 2**31 - 1], np.int32), np.array([0, 65535], np.int32)
    key = DropoutKey(seed=0x0123456789ABCDEF, step=2**32 - 1, layer=65535)
    (made,), *_ = reference(lambda ops: ops.dropout(Rows(x), rate, key, positions, examples, name="d"))
    for row in range(2):
        expected = exact.dropout(
            bits(x[row]),
            Fraction(rate),
            key.seed,
            key.step,
            key.layer,
            int(positions[row]),
            int(examples[row]),
        )
        assert bits(made)[row] == expected
    by = DropoutRate.of(rate)
    assert bit(by.factor) == exact.nearest(1 / (1 - Fraction(rate)))
    assert by.threshold == Fraction(rate) * 2**32 // 1


def test_first_values():
    from mens_core.adapters.initial import _uniform
    from mens_core.adapters.plan import AdaptedMatrix

    for columns in (1, 7, 640, 2048):
        made = _uniform(AdaptedMatrix("w", 11, 5, columns, 3, 1.0), seed=2**63 + 5)
        flat = bits(made.reshape(-1))
        for index in range(0, len(flat), 1 + len(flat) // 50):
            assert flat[index] == exact.first_value(2**63 + 5, 11, index, columns)


def test_exact_numbers_are_rounded_once():
    rng = np.random.default_rng(9)
    for _ in range(300):
        numerator, denominator = (int(n) for n in rng.integers(1, 2**40, 2))
        value = Fraction(numerator, denominator) * Fraction(2) ** int(rng.integers(-140, 80))
        assert bit(nearest(value)) == exact.nearest(value)
        assert bit(nearest_root(value)) == exact.nearest_root(value)


# --- the update --------------------------------------------------------------------------------------


def test_sum_of_squares(reference):
    x = spread(np.random.default_rng(10), 2, 150)
    (total,), *_ = reference(lambda ops: ops.sum_of_squares(Rows(x), name="squares"))
    assert bits(total)[0] == exact.sum_of_squares(bits(x.reshape(-1)))


def test_adamw(reference):
    rng = np.random.default_rng(11)
    numbers = (3e-4, 0.9, 0.1, 0.999, 1e-3, 1e-8, 1 - 3e-6, 0.1, 1e-3)
    by = AdamW(*(float(np.float32(x)) for x in numbers))
    p, g, m, v = (spread(rng, 1, 400, binades=30) for _ in range(4))
    v = np.abs(v)
    g[0, :3], m[0, :2], v[0, :2] = 0, 0, 0

    def run(ops):
        parameter, first, second = Rows(p.copy()), Rows(m.copy()), Rows(v.copy())
        ops.adamw(parameter, Rows(g), first, second, by, name="w")
        return parameter, first, second

    made, faults, _ = reference(run)
    assert not faults
    constants = exact.Constants(*(bit(x) for x in by.in_order()))
    expected = [
        exact.adamw(*values, constants)
        for values in zip(bits(p)[0], bits(g)[0], bits(m)[0], bits(v)[0], strict=True)
    ]
    assert list(zip(*(bits(x)[0] for x in made), strict=True)) == expected


def test_the_tree_over_examples(reference):
    leaves = spread(np.random.default_rng(12), 11)

    def run(ops):
        tree = ExampleTree(lambda a, b: ops.add(a, b, name="sum"))
        for leaf in leaves:
            tree.push(Rows(np.full((1, 1), leaf, np.float32)))
        return tree.total()

    (total,), *_ = reference(run)
    assert bits(total)[0][0] == exact.tree(bits(leaves))
