"""The operators on an Apple GPU: the grid kernels, and for few rows those that share an output's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_ops import GridOps, GridTensor
from mens_core.kernel_source import GROUP
from mens_core.rotary_blocks import make_angles

__all__ = ["MpsOps"]

_FEW_ROWS = 4
"""A step of more rows has threads enough with one per output and row."""


class MpsOps(GridOps):
    """Grid kernels on a GPU; rotary tables are made on the host by integers."""

    def __init__(self, device: Device, *, simd_width: int, facts: Mapping[str, Any]) -> None:
        """Take a device and the threads of its SIMD groups, which divide a group."""
        super().__init__(device, make_angles)
        self.simd_width = simd_width
        self._outputs_of_group = GROUP // simd_width
        self._facts = dict(facts)

    def facts(self) -> dict[str, Any]:
        """Device, compiler and kernels."""
        return self._facts

    def _launch_linear(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        if rows > _FEW_ROWS:
            return super()._launch_linear(activations, rows, weight, name)
        return self._rows(
            f"vox_chunked_{weight.format}",
            (*activations, weight.buffer),
            (rows, weight.rows),
            constants(weight.rows, weight.columns),
            name,
            across=-(-weight.rows // self._outputs_of_group) * GROUP,
        )
