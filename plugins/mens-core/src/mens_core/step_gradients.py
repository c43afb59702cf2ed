"""The gradients of a run of neighbouring examples of a step: what one device computes of it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mens_core.adapters.keys import parameter_key
from mens_core.differentiate import differentiate
from mens_core.example_tree import ExampleTree
from mens_core.micro_batches import Example, cut, pack
from mens_core.models.model import Model
from mens_core.models.passes import Dropout
from mens_core.ops import Tensor
from mens_core.training_ops import TrainingOps

__all__ = ["Gradients", "push_all", "sum_gradients"]

T = TypeVar("T", bound=Any)


_RUN = 8
"""Examples whose gradients one `sum_run` takes at most."""


def push_all(tree: ExampleTree[T], ops: TrainingOps, gradients: Sequence[T], *, name: str) -> None:
    """Push the gradients of neighbouring examples, those that make a whole node as one."""
    at = 0
    for size in tree.runs(len(gradients), _RUN):
        tree.push(ops.sum_run(gradients[at : at + size], name=name), size.bit_length() - 1)
        at += size


@dataclass(frozen=True, slots=True)
class Gradients:
    """What some examples give."""

    losses: list[np.float32]
    """Of each example, summed over its trained tokens."""
    trees: dict[str, ExampleTree[Tensor]]
    """By the parameter's key."""


def sum_gradients(
    model: Model,
    ops: TrainingOps,
    keys: Sequence[str],
    examples: Sequence[Example],
    *,
    first: int = 0,
    micro_batch_size: int | None,
    dropout: Dropout | None,
    remember_bytes: int = 0,
) -> Generator[None, None, Gradients]:
    """Return losses and gradients, yielding on the way.

    Args:
        keys: of the adapter's parameters.
        first: number of the first of these examples in the step.
        remember_bytes: as in `differentiate`.

    Raises:
        BackendError: `non-finite`, naming operator and example.
    """

    def a_tree(key: str) -> ExampleTree[Tensor]:
        return ExampleTree(lambda a, b: ops.add(a, b, name=f"{key}.sum"), first=first)

    trees = {key: a_tree(key) for key in keys}
    losses: list[np.float32] = []

    def take(parameter: str, gradients: list[Tensor]) -> None:
        key = parameter_key(parameter)
        push_all(trees[key], ops, gradients, name=f"{key}.sum")

    for together in cut(examples, micro_batch_size, ops.rows_at_once):
        micro = pack(
            examples[together.start : together.stop],
            first + together.start,
            logit_rows=ops.logit_rows_at_once,
        )
        losses.extend(
            (yield from differentiate(model, ops, micro, dropout, take, remember_bytes=remember_bytes))
        )
    return Gradients(losses, trees)
