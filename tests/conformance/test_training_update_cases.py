"""The conformance cases of section 13: kernels have the reference's digests, and mistakes have others."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest

from mens_core.conformance.cases_updates import UPDATE_CASES
from mens_core.dropout_rate import DropoutRate
from mens_core.training_ops import DropoutKey
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.training_lane import CpuTrainingOps, ReferenceTrainingOps

OPERATORS = {
    "linear_backward", "matrix", "put_rows", "example_products", "embed_backward", "cross_entropy",
    "example_sums", "scale", "add_scaled", "dropout", "sum_of_squares", "adamw", "updates_not_finite",
}  # fmt: skip


def digest_of(ops, case: str) -> str:
    digest = hashlib.sha256()
    ops.take_faults()
    for array in UPDATE_CASES[case](ops):
        digest.update(np.ascontiguousarray(array).tobytes())
    digest.update(repr(ops.take_faults()).encode())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def expected(library):
    reference = ReferenceTrainingOps()
    return {name: digest_of(reference, name) for name in UPDATE_CASES}


def test_every_operator_has_a_case_and_no_two_are_alike(expected):
    assert {name.split("/")[0] for name in UPDATE_CASES} == OPERATORS
    assert len(set(expected.values())) == len(expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_have_the_references_digests(library, isa, expected, threads):
    library.force_isa(isa)
    library.set_threads(threads)
    try:
        ops = CpuTrainingOps(library)
        assert {name: digest_of(ops, name) for name in UPDATE_CASES} == expected
    finally:
        library.force_isa("")
        library.set_threads(1)


def test_what_is_not_finite_is_named_with_its_row_or_example(library):
    ops = CpuTrainingOps(library)
    list(UPDATE_CASES["updates_not_finite"](ops))
    assert [(f.name, f.rows) for f in ops.take_faults()] == [
        ("scaled", (250,)), ("gradient", (3,)), ("squares", (0,))
    ]  # fmt: skip


# --- planted mistakes: each lane below is the reference but for one plausible error -----------------------


class ChunksOfTheBatch(ReferenceTrainingOps):
    """Chunks of 128 rows of the batch instead of the example: an example over row 256 is cut there."""

    def example_products(self, a, b, starts, *, name):
        whole = super().example_products
        made = []
        for first, last in pairwise(starts.tolist()):
            total = None
            for p, q in pairwise([first, *(c for c in range(0, last, 128) if first < c), last]):
                one = np.array([0, q - p], np.int32)
                (part,) = whole(Rows(a.values[p:q].copy()), Rows(b.values[p:q].copy()), one, name=name)
                total = part if total is None else self.add(total, part, name=name)
            made.append(total)
        return made


class ChunksByIndex(ReferenceTrainingOps):
    """Losses chunked by how many came before, not by position."""

    def example_sums(self, losses, positions, starts):
        counted = np.concatenate([np.arange(n) for n in np.diff(starts)])
        return super().example_sums(losses, counted.astype(np.int32), starts)


class Fused(ReferenceTrainingOps):
    """y + x * factor rounded once."""

    def add_scaled(self, y, x, factor, *, name):
        wide = x.values.astype(np.float64) * factor + y.values
        return Rows(wide.astype(np.float32))


class WordsByRow(ReferenceTrainingOps):
    """The first words for every group of four columns: column k has word k div (columns / 4)."""

    def dropout(self, x, rate, key, positions, examples, *, name):
        groups = -(-x.values.shape[1] // 4)
        wide = np.zeros((len(x.values), 4 * groups), np.float32)
        wide[:, : x.values.shape[1]] = 1
        ones = super().dropout(Rows(wide), rate, key, positions, examples, name=name).values
        mask = ones.reshape(-1, groups, 4).transpose(0, 2, 1).reshape(len(wide), -1) != 0
        kept = x.values * np.float32(DropoutRate.of(rate).factor)
        return Rows(np.where(mask[:, : x.values.shape[1]], kept, np.float32(0)))


class SameForEveryExample(ReferenceTrainingOps):
    """The example takes no part in the counter."""

    def dropout(self, x, rate, key, positions, examples, *, name):
        return super().dropout(x, rate, key, positions, np.zeros_like(examples), name=name)


class StepForgotten(ReferenceTrainingOps):
    """The step takes no part in the counter."""

    def dropout(self, x, rate, key, positions, examples, *, name):
        key = DropoutKey(key.seed, 0, key.layer)
        return super().dropout(x, rate, key, positions, examples, name=name)


class ShiftedLogits(ReferenceTrainingOps):
    """loss = log(S) - (x_t - m): the same number, other roundings."""

    def cross_entropy(self, logits, targets, *, name):
        _, gradients = super().cross_entropy(logits, targets, name=name)
        top = logits.values.max(axis=1)
        ours = self.log_normaliser(Rows(logits.values - top[:, None]))
        at = logits.values[np.arange(len(targets)), targets]
        return Rows(ours - (at - top)), gradients


class AveragedLoss(ReferenceTrainingOps):
    """Divided by the rows at hand."""

    def cross_entropy(self, logits, targets, *, name):
        losses, gradients = super().cross_entropy(logits, targets, name=name)
        return losses, Rows(gradients.values / np.float32(len(targets)))


class ReciprocalRoot(ReferenceTrainingOps):
    """m / c1 times the reciprocal of sqrt(v / c2) + eps."""

    def adamw(self, parameter, gradient, m, v, by, *, name):
        before = parameter.values.copy()
        super().adamw(parameter, gradient, m, v, by, name=name)
        root = np.sqrt(v.values / np.float32(by.correction2)) + np.float32(by.eps)
        step = (m.values / np.float32(by.correction1)) * (np.float32(1) / root)
        parameter.values[...] = before * np.float32(by.decay) - np.float32(by.learning_rate) * step


class OneChunk(ReferenceTrainingOps):
    """A plain sum in float64, as an optimised library might."""

    def sum_of_squares(self, x, *, name):
        return np.float32((x.values.astype(np.float64) ** 2).sum())


class Overwritten(ReferenceTrainingOps):
    """The last row with a token wins."""

    def embed_backward(self, dy, token_ids, starts, rows, *, name):
        made = super().embed_backward(dy, token_ids, starts, rows, name=name)
        for gradient, first, last in zip(made, starts[:-1], starts[1:], strict=True):
            gradient.values[token_ids[first:last]] = dy.values[first:last]
        return made


@pytest.mark.parametrize(
    ("mistaken", "case"),
    [
        (ChunksOfTheBatch, "example_products"), (ChunksByIndex, "example_sums"), (Fused, "add_scaled"),
        (WordsByRow, "dropout"), (SameForEveryExample, "dropout"), (StepForgotten, "dropout"),
        (ShiftedLogits, "cross_entropy"), (AveragedLoss, "cross_entropy"), (ReciprocalRoot, "adamw"),
        (OneChunk, "sum_of_squares"), (Overwritten, "embed_backward"),
    ],
)  # fmt: skip
def test_a_mistake_changes_the_digest(expected, mistaken, case):
    assert digest_of(mistaken(), case) != expected[case]
