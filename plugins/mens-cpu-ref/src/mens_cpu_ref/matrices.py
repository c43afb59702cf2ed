"""What the CPU lane keeps of a model: float weights and the KV cache. Quantised weights: `quantised`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["FloatMatrix", "KvCache"]


@dataclass(frozen=True, slots=True, eq=False)
class FloatMatrix:
    """A float weight [rows, columns] in the packing of the functions that made it."""

    number: int
    rows: int
    columns: int
    packed: npt.NDArray[Any]
    address: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.packed.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """Keys [layers, blocks, kv_heads, head_dim, 128], values [layers, blocks, kv_heads, 128, stride]."""

    kv_heads: int
    head_dim: int
    blocks: int
    keys: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    key_addresses: tuple[int, ...]
    value_addresses: tuple[int, ...]
