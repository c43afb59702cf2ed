"""What a step's operators ask for, noted instead of launched: tensors that have no memory yet, and calls.

While a step is recorded, an operator that a lane knows how to join with others is a `Node`. All are launched
when someone needs the memory of one of their outputs, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mens_core.grid_device import Buffer
from mens_core.grid_tensors import GridTensor
from mens_torch_cuda.code_orders import Order

__all__ = ["Codes", "Node", "Nodes", "Pending", "UnrecordableError"]


class UnrecordableError(Exception):
    """The layers ask for something whose place or value is another one in every step."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A tensor's rows as int8: codes [rows, columns] and scales [rows, columns / 32], in some order."""

    codes: Buffer
    scales: Buffer
    order: Order = Order.ROWS


class Pending:
    """A `GridTensor` whose memory is found when it is asked for."""

    __slots__ = ("_buffer", "_nodes", "codes", "shape")

    def __init__(self, shape: tuple[int, ...], nodes: Nodes) -> None:
        self.shape = shape
        self.codes: Codes | None = None
        """What the kernel that made it wrote beside it."""
        self._nodes = nodes
        self._buffer: Buffer | None = None

    @property
    def buffer(self) -> Buffer:
        """Its memory.

        Raises:
            UnrecordableError: it was made and used inside one kernel, and is asked for once more.
        """
        if self._buffer is None:
            self._nodes.flush()
        if self._buffer is None:
            raise UnrecordableError("a tensor that was never written")
        return self._buffer

    @property
    def is_made(self) -> bool:
        """Whether it has memory."""
        return self._buffer is not None

    def bind(self, buffer: Buffer) -> None:
        """Give it memory."""
        self._buffer = buffer


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operator's call."""

    kind: str
    inputs: tuple[Any, ...]
    """Tensors that it reads."""
    outputs: tuple[Pending, ...]
    run: Callable[[], Sequence[GridTensor]]
    """Launch it by itself; returns what its outputs are."""
    said: dict[str, Any] = field(default_factory=dict)
    """Weights, names and constants, for whoever joins it with others."""

    def launch(self) -> None:
        """Launch it by itself."""
        for output, made in zip(self.outputs, self.run(), strict=True):
            output.bind(made.buffer)


class Nodes:
    """The calls noted so far."""

    def __init__(self, launch: Callable[[list[Node]], None]) -> None:
        """`launch` takes nodes in their order and gives every output that is needed its memory."""
        self._launch = launch
        self._noted: list[Node] = []

    def note(
        self,
        kind: str,
        inputs: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
        run: Callable[[], Sequence[GridTensor]],
        **said: Any,
    ) -> tuple[Pending, ...]:
        """Note a call; return its outputs."""
        outputs = tuple(Pending(shape, self) for shape in shapes)
        self._noted.append(Node(kind, tuple(inputs), outputs, run, said))
        return outputs

    def flush(self) -> None:
        """Launch what was noted."""
        noted, self._noted = self._noted, []
        self._launch(noted)
