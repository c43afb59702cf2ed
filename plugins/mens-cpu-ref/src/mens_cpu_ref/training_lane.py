"""The CPU lane that can also train, and the scalar reference likewise.

Apart from `lane`: a worker that only serves a model as it is binds and imports none of this.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class CpuTrainingOps(BackwardOps, UpdateOps, CpuOps, TrainingOps):
    """Every operator of `TrainingOps` over the kernels."""

    def __init__(self, library: Library, *, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__({**library.kernels, **library.bind("vox_", _OPERATORS)}, facts=facts)


class ReferenceTrainingOps(BackwardOps, UpdateOps, CpuOps, TrainingOps):
    """The same as plain loops: slow by design, it defines the bits."""

    def __init__(self) -> None:
        library = load_library()
        super().__init__({**library.reference, **library.bind("ref_", _OPERATORS)})
