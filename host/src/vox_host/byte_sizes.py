"""How a number of bytes reads."""

from __future__ import annotations

__all__ = ["byte_size"]


def byte_size(count: int) -> str:
    """Return `count` bytes in the unit that leaves at least one digit before the point: "12.3 KiB"."""
    if count < 1024:
        return f"{count} bytes"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:  # what rounds to 1024.0 is the next unit's
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
