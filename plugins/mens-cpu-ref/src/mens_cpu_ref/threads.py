"""How many threads this process may use: affinity and cgroup quota, not the machine's nameplate."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_threads"]

_CGROUP = Path("/sys/fs/cgroup")


def usable_threads(cgroup: Path = _CGROUP) -> int:
    """Return the number of threads worth starting, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota(cgroup) or allowed))


def _quota(cgroup: Path) -> int | None:
    """Whole CPUs of the cgroup's quota (version 2, then 1), rounded up."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not (limit.isdigit() and period.isdigit() and int(period)):
        return None
    return -(-int(limit) // int(period))
