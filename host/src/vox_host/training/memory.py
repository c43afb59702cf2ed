"""Is there room for a run: the worker's estimate against what is free now. Pure but for the last one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vox_host.byte_sizes import byte_size
from vox_host.errors import UsageError
from vox_host.hardware.budget import device_budget_bytes, main_memory_budget_bytes
from vox_host.hardware.record import Machine
from vox_host.training.presets import Vendor

__all__ = ["check_room", "memory_budget", "peak_resident_bytes"]


def memory_budget(
    machine: Machine, vendor: Vendor, *, unified_reserve_bytes: int, vram_safety: float, devices: int = 1
) -> tuple[int | None, str]:
    """Return the bytes that a run may plan with on each device of this kind, and where the number is from.

    Args:
        devices: that the run uses, the first ones that are visible; the one with the least room counts.

    None: the device's memory is not known. Taken before the worker is started, so that its own weights
    are not counted twice.
    """
    if vendor == "cpu":
        memory = machine.memory
        return main_memory_budget_bytes(memory), f"{memory.source}, less a tenth (1 GiB at most)"
    visible = [device for device in machine.devices if device.kind == vendor and device.is_visible]
    if not visible:
        return None, "no such device was seen"
    budgets = [
        device_budget_bytes(device, unified_reserve_bytes=unified_reserve_bytes, vram_safety=vram_safety)
        for device in visible[:devices]
    ]
    known = [budget for budget in budgets if budget is not None]
    least = visible[budgets.index(min(known))] if known else visible[0]
    how = "less the desktop's reserve" if least.is_unified else f"times {vram_safety:g}"
    return min(known, default=None), f"free memory of {least.name}, {how}"


def check_room(estimate: Mapping[str, int], total_bytes: int, budget_bytes: int | None, source: str) -> None:
    """Refuse a run whose estimated peak is more than may be planned with.

    Args:
        estimate: bytes by what they are for.
        total_bytes: the peak of all of it together.
        budget_bytes: None: not known, so nothing can be refused.

    Raises:
        UsageError: it does not fit; the numbers are in it.
    """
    if budget_bytes is None or total_bytes <= budget_bytes:
        return
    parts = [f"{name} {byte_size(size)}" for name, size in estimate.items() if size]
    raise UsageError(
        "insufficient-memory",
        f"this run is estimated to need {byte_size(total_bytes)}, and {byte_size(budget_bytes)} may be "
        "planned with; nothing was started",
        facts=[
            ("needed", f"{total_bytes} bytes: {', '.join(parts)}"),
            ("there is", f"{budget_bytes} bytes: {source}"),
        ],
        remedy="A smaller --micro-batch-size, --max-length or --rank, or fewer --targets, lower it; "
        "the first changes no bit.",
    )


def peak_resident_bytes(pid: int, *, proc: Path = Path("/proc")) -> int | None:
    """Return the most main memory that a process has had at once; None where the system doesn't say."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return None
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    return None
