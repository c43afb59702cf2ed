"""How much of a device's memory a job may plan with (pure).

Unified memory keeps a fixed reserve for the desktop; discrete memory keeps a fraction.
"""

from __future__ import annotations

from vox_host.hardware.record import Device, Memory

__all__ = ["device_budget_bytes", "main_memory_budget_bytes"]


def device_budget_bytes(
    device: Device, memory: Memory | None = None, *, unified_reserve_bytes: int, vram_safety: float
) -> int | None:
    """Return the bytes a job may plan with on `device`, or None where its memory is unknown.

    The desktop's reserve is kept out of all memory, not out of the part that the GPU may have: where
    that part is smaller, the reserve lies outside it already.

    Args:
        memory: main memory, of which a unified device may have only a part.
    """
    if device.free_bytes is None or device.total_bytes is None:
        return None
    if device.is_unified:
        whole = memory.total_bytes if memory is not None else device.total_bytes
        return max(0, min(device.free_bytes, device.total_bytes, whole - unified_reserve_bytes))
    return int(device.free_bytes * vram_safety)


def main_memory_budget_bytes(memory: Memory) -> int:
    """Return the bytes a CPU job may plan with: what is available, less a tenth (1 GiB at most)."""
    return max(0, memory.available_bytes - min(2**30, memory.available_bytes // 10))
