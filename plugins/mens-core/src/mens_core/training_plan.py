"""What a run will hold in memory, before anything of it is made.

A step and an evaluation are run on tensors without values (`sized_ops`), so the figures follow from
the very code that trains. The longest example stands for every one, and all its tokens but the first
are learned. Saves and resumes are no kind of their own: a save goes to its file tensor by tensor, and
what a resume has read lies beside the new tensors once, where an update makes three times as much.

What is free beyond the least that a run needs may go to outputs of layers that would be made twice
(`models.remembered`); how much is settled here, and stated.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import AdaptedMatrix, AdapterPlan, plan_adapter
from mens_core.differentiate import differentiate, score
from mens_core.example_tree import ExampleTree
from mens_core.micro_batches import Example, cut, pack
from mens_core.models.linear import Lora
from mens_core.models.model import Model
from mens_core.models.passes import Dropout
from mens_core.models.remembered import choose_parts
from mens_core.peers.ranks import in_parts
from mens_core.sized_ops import Kind, Meter, Sized, SizedOps
from mens_core.step_gradients import push_all
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError
from vox_plugin_api.train_messages import TrainMemory, TrainPlanParams

__all__ = ["StepPlan", "plan_step"]


_KINDS: tuple[Kind, ...] = ("adapter", "moments", "gradients", "activations", "logits")
_Moment = dict[Kind, int]
"""Bytes by kind that are held at some moment."""
_RANK_BYTES = 512 << 20
"""What a library takes on a device to carry bytes to other devices."""
_RESERVE_BYTES = 32 << 20
"""For modules that training loads, stacks, and what allocators keep; a sixteenth of the rest comes on top."""
_RESERVE_SHARE = 16
_WHOLE_LOGITS = 3
"""A pass remembers no more than makes it as large as so many logits of all its rows, in float32: a trainer
without slices of the head holds logits, softmax and gradient at once."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """An adapter, and the memory that its training takes at most."""

    adapter: AdapterPlan
    memory: TrainMemory


def asked_of(params: TrainPlanParams, model: Model) -> tuple[AdapterPlan, Example]:
    """Return the adapter that is asked about, and the longest example.

    Raises:
        BackendError: the adapter doesn't fit the model, or an example is longer than its context.
    """
    limit = model.config.context_length
    if params.longest_example > limit:
        raise BackendError(
            "invalid-example",
            f"an example of {params.longest_example} tokens was asked about; the context is {limit}",
            facts={"tokens": params.longest_example, "limit": limit},
        )
    adapter = plan_adapter(params.adapter, model.layer_shapes)
    return adapter, Example((0,) * params.longest_example, tuple(range(1, params.longest_example)))


def plan_step(
    params: TrainPlanParams, model: Model, ops: TrainingOps, *, parameters: int, process_bytes: int | None
) -> StepPlan:
    """Return what a run whose steps have `params.examples` examples of the longest length holds.

    Args:
        model: loaded on `ops`, whose memory is asked about.
        parameters: numbers in all the model's tensors.
        process_bytes: what the worker's process holds now, weights included; None: unknown.

    Raises:
        BackendError: the adapter doesn't fit the model, or an example is longer than its context.
    """
    adapter, example = asked_of(params, model)
    asked = _Asked(params, model, ops, adapter, example, _together(params, ops, example))
    held = {"weights": _weight_bytes(model, parameters)}
    if ops.memory_place == "host" and process_bytes is not None:
        held["process"] = max(0, process_bytes - held["weights"])
    beside = _beside_a_pass(asked)
    least = _micro_batch(asked, 0)
    kinds = held | _kinds(asked, least, beside, 0)
    remember = _worth_remembering(asked, sum(kinds.values()), least, beside)
    if remember:
        kinds = held | _kinds(asked, _micro_batch(asked, remember), beside, remember)
    memory = TrainMemory(
        place=ops.memory_place,
        kinds=kinds,
        total=sum(kinds.values()),
        examples_at_once=asked.together,
        rows_at_once=asked.rows,
        devices=params.devices,
        remember_bytes=remember,
    )
    return StepPlan(adapter, memory)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A run, and its fullest micro-batch."""

    params: TrainPlanParams
    model: Model
    lane: TrainingOps
    adapter: AdapterPlan
    example: Example
    together: int

    @property
    def rows(self) -> int:
        return self.example.rows * self.together


def _kinds(asked: _Asked, in_pass: _Moment, beside: Sequence[_Moment], remember: int) -> dict[str, int]:
    """Bytes by kind of all that a run makes, at its fullest moment.

    Args:
        in_pass: the fullest moment of a micro-batch that remembers so much.
        beside: the fullest moments of what else a run does.
    """
    params, model, ops, config = asked.params, asked.model, asked.lane, asked.model.config
    fullest = max(in_pass, *beside, key=_size)
    numbers = asked.adapter.parameters
    state: _Moment = {"adapter": 4 * numbers, "moments": 8 * numbers}
    by_kind: dict[str, int] = {kind: state.get(kind, 0) + fullest.get(kind, 0) for kind in _KINDS}
    if remember and fullest is in_pass:
        # Such outputs are activations as any, but for how long they are held.
        by_kind["activations"] -= remember
        by_kind["remembered"] = remember
    work = ops.workspace_bytes(
        lengths=(asked.example.rows,) * asked.together,
        widest=max(max(linear.shape) for name, linear in model.linears.items() if name != "lm_head"),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )
    reserve = _RESERVE_BYTES + (sum(by_kind.values()) + work) // _RESERVE_SHARE
    kinds = {**by_kind, "workspace": work, "reserve": reserve}
    if params.devices > 1:
        kinds["transfer"] = _transfer_bytes(asked.adapter, params.examples)
        kinds["reserve"] += _RANK_BYTES if ops.memory_place == "device" else 0
    return kinds


def _worth_remembering(asked: _Asked, total: int, least: _Moment, beside: Sequence[_Moment]) -> int:
    """What may go to outputs that would be made twice.

    Args:
        total: what a run takes that remembers nothing.
        least: the fullest moment of its micro-batch.
    """
    if asked.params.memory_bytes is None:
        return 0
    # What is remembered has its share of the reserve.
    free = (asked.params.memory_bytes - total) * _RESERVE_SHARE // (_RESERVE_SHARE + 1) - 1
    unused = max(0, max(map(_size, beside)) - _size(least))
    whole = _WHOLE_LOGITS * 4 * asked.rows * asked.model.config.vocab_size
    in_pass = least.get("activations", 0) + least.get("logits", 0)
    adapted, _ = _adapted(Meter(), asked.model, asked.lane, asked.adapter)
    parts = [layer.parts(asked.example.rows) for layer in adapted.layers]
    _, taken = choose_parts(parts, asked.rows, min(free + unused, whole - in_pass))
    return taken


def _together(params: TrainPlanParams, ops: TrainingOps, example: Example) -> int:
    # Of equal examples the first cut is as large as any.
    some = [example] * min(params.examples, _most_at_once(params, ops))
    return len(next(cut(some, params.micro_batch_size, ops.rows_at_once)))


def _most_at_once(params: TrainPlanParams, ops: TrainingOps) -> int:
    return params.micro_batch_size or ops.rows_at_once


def _beside_a_pass(asked: _Asked) -> tuple[_Moment, _Moment]:
    """The fullest moments of an evaluation and of an update."""
    adapter, ops, numbers = asked.adapter, asked.lane, asked.adapter.parameters
    # AdamW works on copies: old and new values, both with their matrices.
    matrices = sum(
        ops.matrix_bytes(*_on_lane(matrix)) + ops.matrix_bytes(matrix.rows, matrix.rank)
        for matrix in adapter.matrices
    )
    # An embedding's A is turned back for the adapter's digest.
    turned = sum(4 * matrix.rank * matrix.columns for matrix in adapter.matrices if matrix.is_embedding)
    in_update: _Moment = {
        "adapter": 4 * numbers + 2 * matrices + turned,
        "moments": 8 * numbers,
        "gradients": 8 * numbers,
    }
    return _evaluation(asked), in_update


def _size(moment: _Moment) -> int:
    return sum(moment.values())


def _micro_batch(asked: _Asked, remember: int) -> _Moment:
    params, model, lane, adapter = asked.params, asked.model, asked.lane, asked.adapter
    example, together = asked.example, asked.together
    meter = Meter()
    adapted, ops = _adapted(meter, model, lane, adapter)
    partial = _most_partial_sums(params.examples, together)
    if params.devices > 1:
        partial = max(partial, _most_nodes(params.examples))
    trees: dict[str, ExampleTree[Sized]] = {}
    for key, shape in adapter.shapes.items():
        held = [Sized(meter, "gradients", shape) for _ in range(partial)]
        # As many sums as a tree over 2^partial - 1 leaves holds.
        trees[key] = ExampleTree(lambda a, b: ops.add(a, b, name="example.sum"), held)

    def take(parameter: str, gradients: list[Sized]) -> None:
        push_all(trees[parameter_key(parameter)], ops, gradients, name="example.sum")

    micro = pack([example] * together, 0, logit_rows=lane.logit_rows_at_once)
    rate = adapter.dropout
    dropout = Dropout(rate, 0, 0) if rate else None
    _finish(differentiate(adapted, ops, micro, dropout, take, remember_bytes=remember))
    return meter.most_by_kind


def _evaluation(asked: _Asked) -> _Moment:
    """An evaluation is asked for any number of examples, so it may run more at once than a small step."""
    params, lane, example = asked.params, asked.lane, asked.example
    meter = Meter()
    adapted, ops = _adapted(meter, asked.model, lane, asked.adapter)
    some = [example] * _most_at_once(params, lane)
    together = len(next(cut(some, params.micro_batch_size, lane.rows_at_once)))
    micro = pack([example] * together, 0, logit_rows=lane.logit_rows_at_once)
    _finish(score(adapted, ops, micro, digests=False))
    return meter.most_by_kind


def _adapted(meter: Meter, model: Model, lane: TrainingOps, adapter: AdapterPlan) -> tuple[Model, SizedOps]:
    weights = {id(linear.weight): linear.shape for linear in model.linears.values()}
    weights[id(model.head.embedding.weight)] = model.head.embedding.shape
    ops = SizedOps(meter, weights)
    loras = {
        matrix.name: Lora(
            a=_matrix(meter, lane, *_on_lane(matrix)),
            b=_matrix(meter, lane, matrix.rows, matrix.rank),
            rank=matrix.rank,
            scale=matrix.scale,
            number=matrix.number,
            is_zero=False,
        )
        for matrix in adapter.matrices
    }
    return replace(model, ops=ops).adapted(loras), ops


def _on_lane(matrix: AdaptedMatrix) -> tuple[int, int]:
    """The shape of its A there: an embedding's lies turned (`adapters.apply`)."""
    return (matrix.columns, matrix.rank) if matrix.is_embedding else (matrix.rank, matrix.columns)


def _matrix(meter: Meter, lane: TrainingOps, rows: int, columns: int) -> Sized:
    return Sized(meter, "adapter", (rows, columns), lane.matrix_bytes(rows, columns))


def _most_partial_sums(examples: int, together: int) -> int:
    """Sums that a tree holds when the fullest micro-batch of a step begins, at most."""
    last = (examples - 1) // together * together
    return last.bit_length()


def _most_nodes(examples: int) -> int:
    """Sums that a tree over some neighbours of a step holds before the last of them, at most."""
    return max(1, 2 * (examples - 1).bit_length() - 2)


def _transfer_bytes(adapter: AdapterPlan, examples: int) -> int:
    """What crosses at once, and lies beside the sums it is added to."""
    parts = [sum(math.prod(adapter.shapes[key]) for key in keys) for keys in in_parts(adapter.shapes)]
    return 4 * max(parts) * _most_nodes(examples)


def _weight_bytes(model: Model, parameters: int) -> int:
    matrices = {id(linear.weight): linear for linear in model.linears.values()}
    held = sum(int(linear.weight.nbytes) for linear in matrices.values())
    table = model.head.embedding.weight
    if id(table) not in matrices:
        held += int(table.nbytes)
        parameters -= model.config.vocab_size * model.config.hidden_size
    # What is left are vectors, in float32.
    return held + 4 * (parameters - sum(math.prod(linear.shape) for linear in matrices.values()))


def _finish(steps: Generator[None, None, object]) -> None:
    for _ in steps:
        pass
