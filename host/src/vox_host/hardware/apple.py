"""Memory and GPU of a Mac: vm_stat and sysctl.

Budgets come from pages that can be had now, not from the nameplate: sizing by hw.memsize is
how a Mac starts to swap with the desktop open.
"""

from __future__ import annotations

import re

from vox_host.hardware.record import Cpu, Device, Memory, Problem
from vox_host.hardware.system import System

__all__ = ["describe_mac", "gpu_refusal", "parse_sysctl", "parse_vm_stat", "probe_apple"]

SYSCTL_NAMES = (
    "hw.memsize", "hw.pagesize", "hw.logicalcpu", "machdep.cpu.brand_string", "sysctl.proc_translated",
    "iogpu.wired_limit_mb", "hw.optional.arm.FEAT_DotProd", "hw.optional.avx2_0", "hw.optional.fma",
    "hw.model", "kern.hv_vmm_present", "kern.osversion",
)  # fmt: skip


def parse_sysctl(text: str) -> dict[str, str]:
    """Return `name: value` lines as a dict."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def parse_vm_stat(text: str, sysctl: dict[str, str]) -> tuple[Memory | None, int | None, list[Problem]]:
    """Return memory and the bytes that are free outright, from vm_stat's page counts.

    Reclaimable at once: free, speculative and purgeable pages, and those inactive pages that
    are backed by files; inactive anonymous pages would have to be compressed first.
    """
    header = re.search(r"page size of (\d+) bytes", text)
    page_size = int(header[1]) if header else int(sysctl.get("hw.pagesize", "0") or 0)
    total = int(sysctl.get("hw.memsize", "0") or 0)
    if page_size == 0 or total == 0:
        missing = "page size" if page_size == 0 else "hw.memsize"
        detail = f"vm_stat and sysctl do not tell the {missing}; memory is unknown"
        return None, None, [Problem(source="vm_stat", detail=detail)]
    pages = {
        name.strip(): int(count) for name, count in re.findall(r"^([^:\n]+):\s+(\d+)\.$", text, re.MULTILINE)
    }
    if "Pages free" not in pages:
        detail = "vm_stat tells no free pages; how much memory can be had is unknown and counts as none"
        memory = Memory(total_bytes=total, available_bytes=0, source="hw.memsize; vm_stat tells nothing")
        return memory, None, [Problem(source="vm_stat", detail=detail)]
    free = pages["Pages free"]
    inactive_files = min(pages.get("Pages inactive", 0), pages.get("File-backed pages", 0))
    ready = free + pages.get("Pages speculative", 0) + pages.get("Pages purgeable", 0) + inactive_files
    memory = Memory(
        total_bytes=total,
        available_bytes=min(total, ready * page_size),
        source=f"vm_stat: free, speculative, purgeable and inactive file pages of {page_size} bytes",
    )
    return memory, free * page_size, []


def working_set_limit_bytes(sysctl: dict[str, str], total_bytes: int) -> int:
    """Return what the GPU may wire: the user's iogpu.wired_limit_mb, else the system's default.

    The default is about two thirds of main memory up to 36 GiB and three quarters above; the
    worker replaces this estimate by Metal's recommendedMaxWorkingSetSize.
    """
    set_by_user = int(sysctl.get("iogpu.wired_limit_mb", "0") or 0) * 2**20
    default = total_bytes * 2 // 3 if total_bytes <= 36 * 2**30 else total_bytes * 3 // 4
    return min(total_bytes, set_by_user or default)


def gpu_refusal(sysctl: dict[str, str]) -> str | None:
    """Return why no plugin can use this Mac's GPU, as far as the system tells; the worker asks torch."""
    if sysctl.get("sysctl.proc_translated") == "1":
        return "this Python runs under Rosetta; install a Python for arm64"
    model = sysctl.get("hw.model", "")
    if sysctl.get("kern.hv_vmm_present") == "1" or model.startswith("VirtualMac"):
        return "this is a virtual machine, whose GPU is paravirtual; run on macOS itself"
    return None


def describe_mac(system: System) -> dict[str, str]:
    """Return what a certificate must say of this Mac: chip, model, and the system's build, which is the
    version of Metal's driver and compiler. What the system does not tell is left out."""
    program = system.find_program("sysctl", also=("usr/sbin",))
    said = parse_sysctl(system.run(program, *SYSCTL_NAMES).text) if program else {}
    names = {"chip": "machdep.cpu.brand_string", "model": "hw.model", "os_build": "kern.osversion"}
    return {what: said[name] for what, name in names.items() if said.get(name)}


def probe_apple(system: System) -> tuple[Cpu, Memory, list[Device], list[Problem]]:
    """Return processor, memory and GPU of this Mac."""
    sysctl: dict[str, str] = {}
    program = system.find_program("sysctl", also=("usr/sbin",))
    if program is not None:
        # One name at a time would cost ten processes; unknown names only print to stderr.
        sysctl = parse_sysctl(system.run(program, *SYSCTL_NAMES).text)
    vm_stat = system.find_program("vm_stat", also=("usr/bin",))
    memory, _, problems = parse_vm_stat(system.run(vm_stat).text if vm_stat else "", sysctl)
    memory = memory or Memory(total_bytes=0, available_bytes=0, source="unknown")
    translated = sysctl.get("sysctl.proc_translated") == "1"
    is_arm = system.arch == "aarch64" or translated
    isa: list[str] = []
    if system.arch == "aarch64":
        isa = ["neon", *(["dotprod"] if sysctl.get("hw.optional.arm.FEAT_DotProd") == "1" else [])]
    elif sysctl.get("hw.optional.avx2_0") == "1" and sysctl.get("hw.optional.fma") == "1":
        isa = ["x86-64-v3"]
    brand = sysctl.get("machdep.cpu.brand_string", system.arch)
    cpu = Cpu(
        name=brand,
        isa=tuple(isa),
        usable_threads=int(sysctl.get("hw.logicalcpu", "1") or 1),
        is_emulated=translated,
    )
    devices: list[Device] = []
    if is_arm and memory.total_bytes:
        limit = working_set_limit_bytes(sysctl, memory.total_bytes)
        build = sysctl.get("kern.osversion")
        devices = [
            Device(
                kind="apple",
                index=0,
                name=brand,
                total_bytes=limit,
                free_bytes=min(limit, memory.available_bytes),
                is_unified=True,
                # Metal's driver and compiler come with the system: its build is their version.
                driver=f"macOS build {build}" if build else None,
                refusal=gpu_refusal(sysctl),
            )
        ]
    return cpu, memory, devices, problems
