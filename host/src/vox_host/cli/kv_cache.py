"""`--kv-cache-mib`: memory for keys and values, which no machine can give more of than it has."""

from __future__ import annotations

import os
from collections.abc import Callable

from vox_host.errors import UsageError
from vox_host.hardware.record import Machine

__all__ = ["kv_cache_bytes"]


def kv_cache_bytes(mib: int | None, probe: Callable[[], Machine]) -> int | None:
    """Return the option in bytes; None: it was not given.

    Args:
        probe: asked only for more than the main memory: an accelerator may have more of its own.

    Raises:
        UsageError: neither main memory nor any accelerator is so large.
    """
    if mib is None or mib << 20 <= _main_memory():
        return None if mib is None else mib << 20
    machine = probe()
    # One worker's devices may hold the cache together.
    own = sum(device.total_bytes or 0 for device in machine.devices if not device.is_unified)
    most = max(machine.memory.total_bytes, own)
    if mib << 20 <= most:
        return mib << 20
    facts = [("asked", f"{mib} MiB"), ("main memory", f"{machine.memory.total_bytes >> 20} MiB")]
    if own:
        facts.append(("accelerators", f"{own >> 20} MiB"))
    raise UsageError(
        "kv-cache-mib",
        f"--kv-cache-mib {mib} is more memory than this machine has; nothing was started",
        facts=facts,
        remedy=f"Give less than {most >> 20}: the model's weights lie beside it. Without the option the "
        "plugin bounds it itself.",
    )


def _main_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
