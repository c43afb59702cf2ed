"""What this process holds in memory."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["resident_bytes"]


def resident_bytes() -> int | None:
    """Return this process's resident set in bytes; None where the system doesn't tell (Linux does)."""
    try:
        pages = Path("/proc/self/statm").read_bytes().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
