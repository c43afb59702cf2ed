"""The machine as probed: plain data that `resolution` reads and `doctor` prints.

Sizes are bytes. None means that nothing reliable was said, never zero.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["Cpu", "Device", "Machine", "Memory", "Problem"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Problem(_Record):
    """Something a probe could not establish; `remedy` is the next thing to try."""

    source: str
    """The probe: nvml, nvidia-smi, sysctl, vm_stat, cgroup, ..."""
    detail: str
    remedy: str | None = None


class Cpu(_Record):
    """The processor this process runs on."""

    name: str
    isa: tuple[str, ...]
    """Levels and features that matter here: x86-64-v3, avx512-vnni, neon, dotprod, ..."""
    usable_threads: int
    """After affinity and cgroup quota."""
    is_emulated: bool = False
    """A Rosetta or qemu translation."""


class Memory(_Record):
    """Main memory."""

    total_bytes: int
    available_bytes: int
    """What a new process may still take: the tightest of the system's and the cgroup's limit."""
    limit_bytes: int | None = None
    """The tightest cgroup limit on the path, if any."""
    source: str
    """Where `available_bytes` comes from, in words."""


class Device(_Record):
    """One accelerator."""

    kind: Literal["nvidia", "apple"]
    index: int
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    is_unified: bool = False
    """Shares main memory, so its pool is not added to it."""
    compute_capability: str | None = None
    driver: str | None = None
    is_visible: bool = True
    """False where CUDA_VISIBLE_DEVICES hides it."""
    refusal: str | None = None
    """Why no plugin can use it, if none can."""
    warning: str | None = None


class Machine(_Record):
    """Everything `resolution` needs to know."""

    os: str
    """linux | macos | anything else platform.system() says, lower case."""
    os_version: str
    arch: str
    """x86_64 | aarch64"""
    python: str
    cpu: Cpu
    memory: Memory
    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def platform(self) -> str:
        """The key of `[artifacts.*]`, like linux-x86_64."""
        return f"{self.os}-{self.arch}"
