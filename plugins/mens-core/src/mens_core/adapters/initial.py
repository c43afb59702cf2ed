"""First values of an adapter: A or B from the seed, the other zero: the first output is the base's."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mens_core.adapters.plan import AdaptedMatrix, AdapterPlan
from mens_core.float32 import nearest_root
from mens_core.normal import normals
from mens_core.philox import STREAM_LORA, philox_words

__all__ = ["initial_tensors"]


def initial_tensors(plan: AdapterPlan, seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Return every tensor by its key (docs/numerics.md), with PEFT's distributions.

    A is uniform between plus and minus 1 / sqrt(columns) and B zero; of an embedding B is normal, of
    variance 1, and A zero.
    """
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for matrix in plan.matrices:
        key_a, key_b = matrix.keys
        a, b = (matrix.rank, matrix.columns), (matrix.rows, matrix.rank)
        if matrix.is_embedding:
            tensors[key_a] = np.zeros(a, np.float32)
            tensors[key_b] = normals(seed, matrix.number, matrix.rows * matrix.rank).reshape(b)
        else:
            tensors[key_a] = _uniform(matrix, seed)
            tensors[key_b] = np.zeros(b, np.float32)
    return tensors


def _uniform(matrix: AdaptedMatrix, seed: int) -> npt.NDArray[np.float32]:
    words = philox_words(seed, STREAM_LORA, matrix.number, matrix.rank * matrix.columns)
    # Odd numerators over 2^24: symmetric, never zero, exact in float32. Only the product rounds.
    numerators = 2 * (words >> np.uint32(8)).astype(np.int64) + 1 - (1 << 24)
    fractions = numerators.astype(np.float32) * np.float32(2.0**-24)
    bound = np.float32(nearest_root(Fraction(1, matrix.columns)))
    return (fractions * bound).reshape(matrix.rank, matrix.columns)
