"""Angles of the positions reached so far, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

__all__ = ["FastRotaryTable"]

_FIRST = 4096


class FastRotaryTable:
    """Cosines and sines [positions, pairs] in float32, from the model's fixed-point frequencies."""

    def __init__(
        self, device: torch.device, frequencies: Sequence[int], factor: tuple[int, int] | None
    ) -> None:
        self._device = device
        # Of 128 bits of a turn the upper 64: position times the rest is below 2^-33 of a turn.
        self._turns = np.array([frequency >> 64 for frequency in frequencies], np.uint64)
        self._factor = 1.0 if factor is None else factor[0] / factor[1]
        self.cosines = torch.empty(0, len(frequencies), device=device)
        self.sines = self.cosines

    @property
    def size(self) -> int:
        """Positions held: another size lies elsewhere, and what was recorded reads freed memory."""
        return len(self.cosines)

    def reach(self, highest: int) -> None:
        """Hold all positions up to `highest`."""
        if highest < self.size:
            return
        size = max(_FIRST, 1 << highest.bit_length())
        # Modulo one turn by the integers' own overflow.
        turns = np.multiply.outer(np.arange(size, dtype=np.uint64), self._turns)
        angles = turns.astype(np.float64) * (2 * np.pi / 2**64)
        for name, of in (("cosines", np.cos), ("sines", np.sin)):
            values = (of(angles) * self._factor).astype(np.float32)
            setattr(self, name, torch.from_numpy(values).to(self._device))
