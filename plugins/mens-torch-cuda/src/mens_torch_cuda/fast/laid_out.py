"""Examples of a micro-batch side by side, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mens_core.micro_batches import Example
from mens_torch_cuda.fast.attention import Bounds
from mens_torch_cuda.fast.decoder import Rows

__all__ = ["LaidOut"]


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """Whole examples, the rows that something is learned from, and what."""

    first: int
    """Number of the first example in the step."""
    rows: Rows
    wanted: torch.Tensor
    """[L] rows with a learned token behind them."""
    targets: torch.Tensor
    """[L] those tokens."""
    trained: list[int]
    """Learned tokens of each example."""
    flat: torch.Tensor
    """All index arrays one behind the other."""

    @classmethod
    def of(cls, examples: Sequence[Example], first: int, device: torch.device) -> LaidOut:
        """Lay neighbours of a step side by side; positions behind the last learned token are not run."""
        lengths = [example.rows for example in examples]
        starts = np.cumsum([0, *lengths])
        tokens = np.concatenate([np.array(e.token_ids[: e.rows], np.int64) for e in examples])
        positions = np.concatenate([np.arange(length) for length in lengths])
        trained = [np.array(e.trained, np.int64) for e in examples]
        wanted = np.concatenate([start + at - 1 for start, at in zip(starts, trained, strict=False)])
        targets = np.concatenate(
            [np.array(e.token_ids, np.int64)[at] for e, at in zip(examples, trained, strict=True)]
        )
        flat = torch.from_numpy(np.concatenate([tokens, positions, wanted, targets])).to(device)
        bounds = Bounds(starts)
        bounds.on(device)
        return cls.over(flat, first, bounds, [len(at) for at in trained])

    @classmethod
    def over(cls, flat: torch.Tensor, first: int, bounds: Bounds, trained: list[int]) -> LaidOut:
        """The index arrays as views of `flat`."""
        rows, learned = int(bounds.starts[-1]), sum(trained)
        tokens, positions, wanted, targets = torch.split(flat, [rows, rows, learned, learned])
        return cls(first, Rows(tokens, positions, bounds), wanted, targets, trained, flat)

    @property
    def shape(self) -> tuple[int, ...]:
        """What two of them have in common whose work is launched alike."""
        return (sum(self.trained), *self.rows.bounds.starts.tolist())

    def place_of(self, row: int) -> tuple[dict[str, object], str]:
        """Return facts and words of whose row this is."""
        example = int(np.searchsorted(self.rows.bounds.starts, row, side="right")) - 1
        position = row - int(self.rows.bounds.starts[example])
        number = self.first + example
        return {"example": number, "position": position}, f" at position {position} of example {number}"
