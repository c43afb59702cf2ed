"""A named weight matrix, or a table of rows, and the low-rank update that may lie on it.

The update is two thin products beside the base's and one rounded multiply and add; it is never
folded into the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from mens_core.ops import Matrix

__all__ = ["Embedding", "Linear", "Lora", "adapted"]


@dataclass(frozen=True, slots=True)
class Lora:
    """The update ``scale * (x A^T) B^T`` of one layer.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    a: Matrix
    """[rank, columns]; of an embedding turned, [tokens, rank]: its rows are looked up."""
    b: Matrix
    """[rows, rank]"""
    rank: int
    scale: float
    """alpha / rank, or alpha / sqrt(rank): a float32 value."""
    number: int
    """Of the matrix, in the bytewise order of the adapter's keys: it tells random numbers apart."""
    is_zero: bool
    """A or B is all zeros: the forward leaves the update out.

    Adding its +0 would turn an output of -0 into +0, and a zero adapter must give the base's bytes.
    """


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T, plus the update if there is one."""

    name: str
    """"layers.0.self_attn.q_proj", as the checkpoint has it behind its prefix."""
    weight: Matrix
    shape: tuple[int, int]
    """(rows, columns): outputs and inputs."""
    lora: Lora | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """A row for each token, plus the row of the update if there is one."""

    name: str
    weight: Matrix
    shape: tuple[int, int]
    """(tokens, width)"""
    scale: float | None
    """Multiplies the sum of both; None: 1."""
    lora: Lora | None = None


Adaptable = TypeVar("Adaptable", Linear, Embedding)


def adapted(layer: Adaptable, loras: Mapping[str, Lora]) -> Adaptable:
    """Return the layer with the update that is there for its name, or without one."""
    return replace(layer, lora=loras.get(layer.name))
