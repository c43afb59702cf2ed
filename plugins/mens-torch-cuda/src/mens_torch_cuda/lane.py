"""The operators on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mens_core.grid_device import Device
from mens_core.grid_ops import GridOps
from mens_core.rotary_blocks import make_angles

__all__ = ["CudaOps"]


class CudaOps(GridOps):
    """The grid kernels on a GPU; rotary tables are made on the host by integers."""

    def __init__(self, device: Device, *, facts: Mapping[str, Any]) -> None:
        super().__init__(device, make_angles)
        self._facts = dict(facts)

    def facts(self) -> dict[str, Any]:
        """Device, compiler and kernels."""
        return self._facts
