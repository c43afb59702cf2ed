"""Every operator of the contract in plain float64.

What a model's backward does over it is calculus without rounding worth the name, so it can be held
against an outside autograd closely; and what a shipped lane's operator makes can be held against it.
Tensors and rotary angles are float64 throughout; constants that the contract hands over are the
float32 values that they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lanes.numpy_training import NumpyTraining
from mens_core.ops import Ints

_TURN = 1 << 128


class Rotary64:
    """Cosines and sines of exact angles."""

    def __init__(self, frequencies: Sequence[int], factor: tuple[int, int] | None) -> None:
        self._frequencies = frequencies
        self._factor = 1.0 if factor is None else factor[0] / factor[1]

    def at(self, positions: Ints) -> tuple[np.ndarray, np.ndarray]:
        turns = np.array([[p * f % _TURN / _TURN for f in self._frequencies] for p in positions.tolist()])
        angles = 2 * np.pi * turns
        return np.cos(angles) * self._factor, np.sin(angles) * self._factor


class Float64TrainingLane(NumpyTraining):
    float = np.float64

    def rotary_table(self, frequencies, attention_factor):
        return Rotary64(frequencies, attention_factor)
