"""Losses of a micro-batch, and the gradients of its adapter per example.

Memory is bounded by recomputation: the first pass keeps the input of each layer and, where there is room,
what the layer's second run would make again at the highest price; on the way back one layer at a time runs
again, keeps what its backward needs, and lets go of it. Logits exist for at most `logit_rows_at_once` rows.
Everything here is a generator that yields after each layer, so that a worker can look up between two of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mens_core.micro_batches import HeadSlice, MicroBatch
from mens_core.models.model import Model
from mens_core.models.passes import Dropout, ExampleRows, Gradient, TrainingPass
from mens_core.models.remembered import Remembered, choose_parts
from mens_core.non_finite import not_finite
from mens_core.ops import KvCache, Tensor
from mens_core.training_ops import TrainingOps

__all__ = ["Score", "differentiate", "score"]

Losses = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Score:
    """What an example's tokens cost."""

    loss: np.float32
    """Summed over its trained tokens."""
    logits_digest: str | None


def differentiate(
    model: Model,
    ops: TrainingOps,
    micro: MicroBatch,
    dropout: Dropout | None,
    gradient: Gradient,
    *,
    remember_bytes: int = 0,
) -> Generator[None, None, Losses]:
    """Return the loss of each example [E]; `gradient` gets each parameter's gradients, by example.

    Args:
        remember_bytes: what the layers' outputs may take that are not made twice; no bit depends on it.

    Raises:
        BackendError: `non-finite`, naming operator and example.
    """
    cache = _new_cache(model, ops, micro)
    hidden = model.head.embed(_a_pass(ops, micro, cache, dropout))
    inputs: list[tuple[Tensor, Remembered]] = []
    longest = int(np.diff(micro.rows.starts).max())
    parts = [layer.parts(longest) for layer in model.layers]
    names, _ = choose_parts(parts, len(micro.batch.positions), remember_bytes)
    for number, (layer, wanted) in enumerate(zip(model.layers, names, strict=True), 1):
        remembered = Remembered(wanted)
        inputs.append((hidden, remembered))
        hidden = layer.forward(_a_pass(ops, micro, cache, dropout, remembered=remembered), hidden)
        _look(ops, micro.rows, number, len(model.layers))
        yield
    head = _HeadBackward(model, ops, micro, cache, dropout)
    ops.release_freed()
    for piece in micro.slices:
        head.run(piece, hidden)
        yield
    losses, hidden = head.finish(gradient)
    for number, layer in enumerate(reversed(model.layers), 1):
        x, remembered = inputs.pop()
        run = _a_pass(ops, micro, cache, dropout, gradient, remembered)
        layer.again(run, x)
        hidden = layer.backward(run, hidden)
        _look(ops, micro.rows, number, len(model.layers))
        yield
    model.head.embed_backward(_a_pass(ops, micro, cache, dropout, gradient), hidden)
    _refuse_faults(ops, micro.rows)
    return losses


def score(
    model: Model, ops: TrainingOps, micro: MicroBatch, *, digests: bool
) -> Generator[None, None, list[Score]]:
    """Return each example's loss and, for `digests` of a micro-batch packed whole, that of its logits.

    Raises:
        BackendError: `non-finite`, naming operator and example.
    """
    cache = _new_cache(model, ops, micro)
    run = _a_pass(ops, micro, cache, None)
    hidden = model.head.embed(run)
    for number, layer in enumerate(model.layers, 1):
        hidden = layer.forward(run, hidden)
        _look(ops, micro.rows, number, len(model.layers))
        yield
    found: list[Losses] = []
    ops.release_freed()
    for piece in micro.slices:
        found.append(_losses(model, ops, run, piece, hidden))
        _refuse_faults(ops, piece.rows)
        yield
    sums = _sum_losses(ops, micro, found)
    made: list[str | None] = [None] * len(sums)
    if digests:
        made = yield from _digests(model, ops, micro, run, hidden)
    return [Score(loss, digest) for loss, digest in zip(sums, made, strict=True)]


def _losses(model: Model, ops: TrainingOps, run: TrainingPass, piece: HeadSlice, hidden: Tensor) -> Losses:
    # A function of its own: its logits and their gradient are gone before the next slice's are made.
    logits = model.head.logits(run, ops.take_rows(hidden, piece.hidden_rows))
    losses, _ = ops.cross_entropy(logits, piece.targets, name="loss")
    return ops.to_host(losses).copy()


class _HeadBackward:
    """The head, slice by slice: losses and hidden gradients in their order, an update's gradient in sums."""

    def __init__(
        self, model: Model, ops: TrainingOps, micro: MicroBatch, cache: KvCache, dropout: Dropout | None
    ) -> None:
        self._model, self._ops, self._micro = model, ops, micro
        self._cache, self._dropout = cache, dropout
        self._losses: list[Losses] = []
        self._hidden: list[Tensor] = []
        self._sums: dict[str, dict[int, Tensor]] = {}

    def run(self, piece: HeadSlice, hidden: Tensor) -> None:
        ops, head = self._ops, self._model.head

        def take(parameter: str, gradients: list[Tensor]) -> None:
            sums = self._sums.setdefault(parameter, {})
            for owner, gradient in zip(piece.owners, gradients, strict=True):
                # A piece is one chunk: adding them in order is C128's own fold.
                before = sums.get(owner)
                sums[owner] = (
                    gradient if before is None else ops.add(before, gradient, name=f"{parameter}.fold")
                )

        run = TrainingPass(
            ops, self._micro.batch, self._cache, piece.rows, dropout=self._dropout, gradient=take
        )
        logits = head.logits(run, ops.take_rows(hidden, piece.hidden_rows))
        losses, dlogits = ops.cross_entropy(logits, piece.targets, name="loss")
        self._losses.append(ops.to_host(losses).copy())
        self._hidden.append(head.backward(run, dlogits))
        _refuse_faults(ops, piece.rows)

    def finish(self, gradient: Gradient) -> tuple[Losses, Tensor]:
        """Return the losses [E] and the gradient of every row's hidden state [N, D]."""
        for parameter, sums in self._sums.items():
            gradient(parameter, [sums[owner] for owner in sorted(sums)])
        ops, batch = self._ops, self._micro.batch
        taken = self._hidden[0] if len(self._hidden) == 1 else ops.join_rows(self._hidden)
        hidden = ops.put_rows(taken, batch.logit_rows, len(batch.positions))
        return _sum_losses(ops, self._micro, self._losses), hidden


def _sum_losses(ops: TrainingOps, micro: MicroBatch, losses: Sequence[Losses]) -> Losses:
    joined = ops.from_host(np.concatenate(losses))
    return ops.to_host(ops.example_sums(joined, micro.loss_positions, micro.loss_starts)).copy()


def _digests(
    model: Model, ops: TrainingOps, micro: MicroBatch, run: TrainingPass, hidden: Tensor
) -> Generator[None, None, list[str | None]]:
    digests: list[str | None] = []
    starts = micro.rows.starts.tolist()
    for begin, end in pairwise(starts):
        digest = hashlib.sha256()
        for first in range(begin, end, 128):
            rows = np.arange(first, min(first + 128, end), dtype=np.int32)
            logits = ops.to_host(model.head.logits(run, ops.take_rows(hidden, rows)))
            digest.update(np.ascontiguousarray(logits, "<f4").tobytes())
            yield
        digests.append(digest.hexdigest())
    return digests


def _new_cache(model: Model, ops: TrainingOps, micro: MicroBatch) -> KvCache:
    config = model.config
    return ops.new_kv_cache(layers=1, kv_heads=config.kv_heads, head_dim=config.head_dim, blocks=micro.blocks)


def _a_pass(
    ops: TrainingOps,
    micro: MicroBatch,
    cache: KvCache,
    dropout: Dropout | None,
    gradient: Gradient | None = None,
    remembered: Remembered | None = None,
) -> TrainingPass:
    return TrainingPass(
        ops, micro.batch, cache, micro.rows, dropout=dropout, gradient=gradient, remembered=remembered
    )


def _look(ops: TrainingOps, rows: ExampleRows, layers: int, of: int) -> None:
    """After so many layers: look for faults every now and then, and behind the last one."""
    if layers == of or layers % ops.layers_between_looks == 0:
        _refuse_faults(ops, rows)


def _refuse_faults(ops: TrainingOps, rows: ExampleRows) -> None:
    faults = ops.take_faults()
    if not faults:
        return
    name, row = faults[0].name, faults[0].rows[0]
    facts: dict[str, object] = {}
    where = ""
    if name.endswith(".gradient"):
        # A parameter's gradients are numbered by the examples of the pass.
        facts["example"] = int(rows.examples[rows.starts[row]])
        where = f" in example {facts['example']}"
    elif not name.endswith((".sum", ".fold")):
        facts |= {"example": int(rows.examples[row]), "position": int(rows.positions[row])}
        where = f" at position {facts['position']} of example {facts['example']}"
    raise not_finite(name, facts, where)
