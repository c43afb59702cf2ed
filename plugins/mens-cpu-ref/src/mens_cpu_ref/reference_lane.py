"""The scalar reference as a lane: `CpuOps` over the functions that define the bits.

Slow by design; the conformance suite and the tests compare every other lane with it.
"""

from __future__ import annotations

from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import load_library

__all__ = ["ReferenceOps"]


class ReferenceOps(CpuOps):
    """The operators as plain loops."""

    def __init__(self) -> None:
        super().__init__(load_library().reference)
