"""Memory, cgroup limits and processor of a Linux machine."""

from __future__ import annotations

import math
import os
from pathlib import PurePosixPath

from vox_host.hardware.record import Cpu, Memory, Problem
from vox_host.hardware.system import System

__all__ = ["parse_cpuinfo", "parse_meminfo", "probe_cpu", "probe_memory"]

X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
AVX512_VNNI = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the fields of /proc/meminfo in bytes."""
    fields: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            fields[name.strip()] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return fields


def probe_memory(system: System) -> tuple[Memory, list[Problem]]:
    """Return what a new process may still take: MemAvailable, or less where a cgroup says so.

    A cgroup's usage is counted without its inactive file cache, which the kernel gives back
    before it kills anything.
    """
    fields = parse_meminfo(system.read("proc/meminfo") or "")
    total = fields.get("MemTotal", 0)
    available = fields.get("MemAvailable", fields.get("MemFree", 0))
    problems = [] if total else [Problem(source="meminfo", detail="/proc/meminfo has no MemTotal")]
    limit, room, where = _tightest_cgroup(system, total)
    if room is not None and room < available:
        return Memory(total_bytes=total, available_bytes=room, limit_bytes=limit, source=where), problems
    return (
        Memory(
            total_bytes=total,
            available_bytes=available,
            limit_bytes=limit,
            source="MemAvailable of /proc/meminfo",
        ),
        problems,
    )


def _tightest_cgroup(system: System, total: int) -> tuple[int | None, int | None, str]:
    """Return limit, remaining room and source of the strictest memory limit on the path."""
    best: tuple[int | None, int | None, str] = (None, None, "")
    for folder, limit_name, usage_name in _cgroup_levels(system):
        limit = _number(system.read(f"{folder}/{limit_name}"))
        if limit is None or limit >= total:
            continue  # "max", version 1's 2^63 - 4096, or more than the machine has
        usage = _number(system.read(f"{folder}/{usage_name}")) or 0
        room = max(0, limit - max(0, usage - _inactive_file(system.read(f"{folder}/memory.stat"))))
        if best[1] is None or room < best[1]:
            best = (limit, room, f"cgroup limit {folder}/{limit_name} minus its usage")
    return best


def _cgroup_levels(system: System) -> list[tuple[str, str, str]]:
    levels: list[tuple[str, str, str]] = []
    for line in (system.read("proc/self/cgroup") or "").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mount, names = "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path names the host's tree while the mount shows our own
        # part of it, so every level up to the mount's root is looked at.
        pure = PurePosixPath(path.lstrip("/"))
        parts = [str(pure), *map(str, pure.parents)] if path.strip("/") else ["."]
        levels += [(mount if part == "." else f"{mount}/{part}", *names) for part in parts]
    return levels


def _number(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _inactive_file(stat: str | None) -> int:
    for line in (stat or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def parse_cpuinfo(text: str, arch: str) -> tuple[str, tuple[str, ...]]:
    """Return the processor's name and the instruction-set levels that the lanes care about."""
    name, flags = "", frozenset[str]()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip().lower()
        if key in ("model name", "cpu part") and not name:
            name = value.strip()
        elif key in ("flags", "features") and not flags:
            flags = frozenset(value.split())
    isa: list[str] = []
    if arch == "x86_64":
        isa += ["x86-64-v3"] if flags >= X86_64_V3 else []
        isa += ["avx512-vnni"] if flags >= AVX512_VNNI else []
    elif arch == "aarch64":
        isa += ["neon"] if "asimd" in flags else []
        isa += ["dotprod"] if "asimddp" in flags else []
    return name or arch, tuple(isa)


def probe_cpu(system: System) -> Cpu:
    """Return the processor and the threads this process may use (affinity and cgroup quota)."""
    name, isa = parse_cpuinfo(system.read("proc/cpuinfo") or "", system.arch)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = (system.read("sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        threads = min(threads, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    emulated = "qemu" in name.lower()
    return Cpu(name=name, isa=isa, usable_threads=threads, is_emulated=emulated)
