"""First values of an adapter: A from the seed, B zero, so that the first output is the base's."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import AdaptedMatrix, AdapterPlan
from mens_core.float32 import nearest_root
from mens_core.philox import STREAM_LORA, philox_words

__all__ = ["initial_tensors"]


def initial_tensors(plan: AdapterPlan, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return every tensor by its key (docs/numerics.md).

    A is uniform between plus and minus 1 / sqrt(columns), as PEFT's is.
    """
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for matrix in plan.matrices:
        tensors[parameter_key(f"{matrix.name}.lora_A")] = _uniform(plan.config.rank, matrix, seed)
        tensors[parameter_key(f"{matrix.name}.lora_B")] = np.zeros(
            (matrix.rows, plan.config.rank), np.float32
        )
    return tensors


def _uniform(rank: int, matrix: AdaptedMatrix, seed: int) -> npt.NDArray[np.float32]:
    words = philox_words(seed, STREAM_LORA, matrix.number, rank * matrix.columns)
    # Odd numerators over 2^24: symmetric, never zero, exact in float32. Only the product rounds.
    numerators = 2 * (words >> np.uint32(8)).astype(np.int64) + 1 - (1 << 24)
    fractions = numerators.astype(np.float32) * np.float32(2.0**-24)
    bound = np.float32(nearest_root(Fraction(1, matrix.columns)))
    return (fractions * bound).reshape(rank, matrix.columns)
