"""What a lane brings so that its training can run on several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mens_core.ops import Tensor
from mens_core.training_ops import TrainingOps

__all__ = ["Place", "PeerSetup", "Wire"]


class Wire(Protocol):
    """Carries tensors between ranks, bit for bit: there is no way to sum on it."""

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send to a rank that receives as many of the same shapes; returns when they may be changed.

        Raises:
            BackendError: `peer-lost`: the other side is gone or does not take them.
        """

    def receive(self, shapes: Sequence[tuple[int, ...]], source: int) -> list[Tensor]:
        """Return what a rank sends.

        Raises:
            BackendError: `peer-lost`.
        """

    def close(self, *, is_whole: bool) -> None:
        """Let it go; not `is_whole`: some rank is gone, so nobody is waited for."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one training meet."""

    folder: Path
    """Private to this user; it goes with the training."""
    rank: int
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSetup:
    """How a lane's training runs on several devices."""

    entry: str
    """"module:function" that returns the `MensBackend` of another rank, in that rank's process."""
    devices: Callable[[], int]
    """How many this process may use, its own included."""
    environment: Callable[[int], Mapping[str, str]]
    """The variables that give a rank its device."""
    open_wire: Callable[[Place, TrainingOps, Callable[[], None]], Wire]
    """Waits until every rank has called it. The function it is given raises `BackendError` when a rank
    is gone: it is called while a rank is waited for."""
    launched: Callable[[Place], bool] = lambda place: False
    """Whether the other ranks were started already, by a launcher such as torchrun; if so, it tells them."""
