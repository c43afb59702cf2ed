"""How much main memory this process could still take: what the kernel calls available, within its limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["free_bytes"]


def free_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that could be taken now; None where there is no /proc/meminfo (macOS).

    The smaller of MemAvailable and what every memory limit on the process's cgroup path leaves. File cache
    that is not in use counts as free in both: the kernel gives it back before it kills anything.
    """
    available = None
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable" and rest.split()[1:] == ["kB"]:
            available = int(rest.split()[0]) * 1024
    if available is None:
        return None
    return min([available, *_left_by_limits(root)])


def _left_by_limits(root: Path) -> Iterator[int]:
    for folder, limit_name, usage_name in _groups(root):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            yield max(0, limit - max(0, usage - _unused_file_cache(folder)))


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Every level from the process's own cgroup up to the root that is mounted here."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the machine's while the mount shows the container's part of it.
        for level in {own, *own.parents}:
            yield (mount / level, *names)


def _unused_file_cache(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None  # "max": there is no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
