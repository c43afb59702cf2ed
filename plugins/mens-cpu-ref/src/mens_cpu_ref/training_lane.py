"""The CPU lane that can also train, and the scalar reference likewise.

Apart from `lane`: a worker that only serves a model as it is binds and imports none of this.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mens_core.training_ops import TrainingOps
from mens_cpu_ref.backward_library import BACKWARD_OPERATORS
from mens_cpu_ref.backward_ops import BackwardOps
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import Library, Signatures, load_library
from mens_cpu_ref.update_library import UPDATE_OPERATORS
from mens_cpu_ref.update_ops import UpdateOps

__all__ = ["CpuTrainingOps", "ReferenceTrainingOps"]

_OPERATORS: Signatures = {**BACKWARD_OPERATORS, **UPDATE_OPERATORS}


_PANEL, _BLOCK, _PASS_BYTES = 16, 128, 64 << 20
"""As the native code has them (definitions.h, kPassFloats of backward_attention.cpp)."""


class _Memory(TrainingOps):
    """What the CPU lane takes beside results."""

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Rows are packed by 16."""
        return 4 * -(-rows // _PANEL) * _PANEL * columns

    def release_freed(self) -> None:
        """Let glibc return freed pages, of which it keeps a hundred megabytes and more in a long run."""
        if sys.platform == "linux":
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
            if trim is not None:
                trim(0)

    def workspace_bytes(self, *, lengths: Sequence[int], widest: int, kv_heads: int, head_dim: int) -> int:
        """The streams of attention's backward, or the codes of a quantised layer's input."""
        stride = -(-head_dim // _PANEL) * _PANEL
        streams = []
        for length in lengths:
            blocks = -(-length // _BLOCK)
            floats = blocks * _BLOCK * (stride + head_dim + 2 * _BLOCK) + 2 * _BLOCK * stride
            streams += [4 * floats] * kv_heads
        attention = min(sum(streams), max(_PASS_BYTES, *streams))
        codes = sum(lengths) * widest * 5 // 4
        return max(attention, codes)


class CpuTrainingOps(BackwardOps, UpdateOps, CpuOps, _Memory, TrainingOps):
    """Every operator of `TrainingOps` over the kernels."""

    def __init__(self, library: Library, *, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__({**library.kernels, **library.bind("vox_", _OPERATORS)}, facts=facts)


class ReferenceTrainingOps(BackwardOps, UpdateOps, CpuOps, _Memory, TrainingOps):
    """The same as plain loops: slow by design, it defines the bits."""

    def __init__(self) -> None:
        library = load_library()
        super().__init__({**library.reference, **library.bind("ref_", _OPERATORS)})
