"""A named weight matrix, and the low-rank update that may lie on it.

The update is two thin products beside the base's and one rounded multiply and add; it is never
folded into the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mens_core.ops import Matrix

__all__ = ["Linear", "Lora", "adapted"]


@dataclass(frozen=True, slots=True)
class Lora:
    """The update ``scale * (x A^T) B^T`` of one linear layer.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1.
    """

    a: Matrix
    """[rank, columns]"""
    b: Matrix
    """[rows, rank]"""
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


def adapted(linear: Linear, loras: Mapping[str, Lora]) -> Linear:
    """Return `linear` with the update that is there for its name, or without one."""
    return replace(linear, lora=loras.get(linear.name))
