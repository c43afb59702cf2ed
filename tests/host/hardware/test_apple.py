"""Macs by what sysctl and vm_stat print on them: figures as people recorded them, through the whole probe."""

from __future__ import annotations

import pytest

from vox_host.hardware.apple import SYSCTL_NAMES, describe_mac, gpu_refusal
from vox_host.hardware.budget import device_budget_bytes
from vox_host.hardware.probe import probe_system
from vox_host.hardware.system import System

GIB = 2**30
PAGE = 16384

M4_PRO = """\
hw.memsize: 51539607552
hw.pagesize: 16384
hw.logicalcpu: 14
machdep.cpu.brand_string: Apple M4 Pro
sysctl.proc_translated: 0
iogpu.wired_limit_mb: 0
hw.optional.arm.FEAT_DotProd: 1
hw.model: Mac16,8
kern.hv_vmm_present: 0
kern.osversion: 24F74
"""
BUSY = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    35025.
Pages active:                                1116696.
Pages inactive:                               947360.
Pages speculative:                            171926.
Pages throttled:                                   0.
Pages wired down:                             222249.
Pages purgeable:                                 302.
"Translation faults":                    14110601914.
File-backed pages:                           1319934.
Anonymous pages:                              916048.
Pages stored in compressor:                  1650162.
Pages occupied by compressor:                 591421.
"""
M2 = M4_PRO.replace("51539607552", "17179869184").replace("M4 Pro", "M2").replace("Mac16,8", "Mac14,2")
SMALL = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               19455.
Pages active:                            425314.
Pages inactive:                          425521.
Pages speculative:                          946.
Pages throttled:                              0.
Pages wired down:                        118425.
Pages purgeable:                          23960.
"Translation faults":                3191714332.
Pages stored in compressor:             1189972.
Pages occupied by compressor:            545078.
"""
VIRTUAL = """\
hw.memsize: 7516192768
hw.pagesize: 16384
hw.logicalcpu: 3
machdep.cpu.brand_string: Apple M1 (Virtual)
sysctl.proc_translated: 0
hw.optional.arm.FEAT_DotProd: 1
hw.model: VirtualMac2,1
kern.hv_vmm_present: 1
kern.osversion: 24G90
"""
# To a translated program pages have 4 KiB, and the chip may go by another name.
ROSETTA = (
    M4_PRO.replace("hw.pagesize: 16384", "hw.pagesize: 4096")
    .replace("Apple M4 Pro", "VirtualApple @ 2.50GHz processor")
    .replace("proc_translated: 0", "proc_translated: 1")
)
INTEL = """\
hw.memsize: 17179869184
hw.pagesize: 4096
hw.logicalcpu: 12
machdep.cpu.brand_string: Intel(R) Core(TM) i7-9750H CPU @ 2.60GHz
hw.optional.avx2_0: 1
hw.optional.fma: 1
hw.model: MacBookPro16,1
kern.hv_vmm_present: 0
kern.osversion: 24F74
"""


def probe(tmp_path, sysctl, vm_stat, arch="aarch64"):
    """A Mac whose two programs print these; one that was asked for a name it has not says nothing of it."""
    (tmp_path / "sysctl.txt").write_text(sysctl)
    (tmp_path / "vm_stat.txt").write_text(vm_stat)
    for name in ("sysctl", "vm_stat"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\nexec /bin/cat {tmp_path / name}.txt\n")
        program.chmod(0o755)
    system = System(root=tmp_path, environ={"PATH": str(tmp_path)}, os="macos", arch=arch)
    return probe_system(system, use_nvml=False)


def test_a_mac_with_the_desktop_open(tmp_path):
    machine = probe(tmp_path, M4_PRO, BUSY)
    ready = (35025 + 171926 + 302 + 947360) * PAGE
    assert (machine.memory.total_bytes, machine.memory.available_bytes) == (48 * GIB, ready)
    (gpu,) = machine.devices
    assert (gpu.name, gpu.driver, gpu.is_unified) == ("Apple M4 Pro", "macOS build 24F74", True)
    assert (gpu.total_bytes, gpu.free_bytes) == (36 * GIB, ready)
    assert gpu.refusal is None
    assert machine.cpu.isa == ("neon", "dotprod") and not machine.cpu.is_emulated


@pytest.mark.parametrize("said", ["", "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"])
def test_a_vm_stat_that_says_nothing_is_told(tmp_path, said):
    """A Mac with no memory left would look the same."""
    machine = probe(tmp_path, M4_PRO, said)
    assert (machine.memory.total_bytes, machine.memory.available_bytes) == (48 * GIB, 0)
    assert "vm_stat tells no free pages" in next(p for p in machine.problems if p.source == "vm_stat").detail
    assert [device.kind for device in machine.devices] == ["apple"]


def test_a_small_mac_whose_inactive_pages_are_mostly_a_program_s(tmp_path):
    """An older vm_stat says nothing of file-backed pages: none of the inactive ones counts."""
    machine = probe(tmp_path, M2, SMALL)
    assert machine.memory.available_bytes == (19455 + 946 + 23960) * PAGE
    assert machine.devices[0].total_bytes == 16 * GIB * 2 // 3


def test_the_desktop_s_reserve_is_kept_of_all_memory(tmp_path):
    """The GPU's limit leaves a third of a small Mac outside already: the reserve is not taken twice."""
    free = SMALL.replace("19455.", "900000.")
    machine = probe(tmp_path, M2, free)
    budget = device_budget_bytes(
        machine.devices[0], machine.memory, unified_reserve_bytes=12 * GIB, vram_safety=0.88
    )
    assert budget == 4 * GIB
    without = device_budget_bytes(
        machine.devices[0], machine.memory, unified_reserve_bytes=0, vram_safety=0.88
    )
    assert without == machine.devices[0].total_bytes
    large = device_budget_bytes(
        machine.devices[0], machine.memory, unified_reserve_bytes=20 * GIB, vram_safety=0.88
    )
    assert large == 0


def test_what_a_certificate_says_of_a_mac(tmp_path):
    probe(tmp_path, M4_PRO, BUSY)
    system = System(root=tmp_path, environ={"PATH": str(tmp_path)}, os="macos", arch="aarch64")
    assert describe_mac(system) == {"chip": "Apple M4 Pro", "model": "Mac16,8", "os_build": "24F74"}
    nothing = System(root=tmp_path / "none", environ={"PATH": ""}, os="macos", arch="aarch64")
    assert describe_mac(nothing) == {}


def test_a_limit_that_the_user_raised(tmp_path):
    raised = M4_PRO.replace("wired_limit_mb: 0", "wired_limit_mb: 45056")
    assert probe(tmp_path, raised, BUSY).devices[0].total_bytes == 44 * GIB


def test_a_virtual_machine_s_gpu_is_refused(tmp_path):
    machine = probe(tmp_path, VIRTUAL, SMALL)
    (gpu,) = machine.devices
    assert gpu.name == "Apple M1 (Virtual)"
    assert "virtual machine" in gpu.refusal and "paravirtual" in gpu.refusal
    # Each sign is enough.
    assert "paravirtual" in gpu_refusal({"hw.model": "VirtualMac2,1"})
    assert "paravirtual" in gpu_refusal({"kern.hv_vmm_present": "1"})
    assert gpu_refusal({"hw.model": "Mac14,2", "kern.hv_vmm_present": "0"}) is None


def test_a_translated_python_is_told_and_its_pages_are_still_counted_right(tmp_path):
    machine = probe(tmp_path, ROSETTA, BUSY, arch="x86_64")
    (gpu,) = machine.devices
    assert "Rosetta" in gpu.refusal and "arm64" in gpu.refusal
    assert machine.cpu.is_emulated
    # vm_stat's own header counts, not the page size that the translated program is told.
    assert machine.memory.available_bytes == (35025 + 171926 + 302 + 947360) * PAGE


def test_an_intel_mac_has_no_gpu_for_us(tmp_path):
    machine = probe(tmp_path, INTEL, SMALL.replace("16384", "4096"), arch="x86_64")
    assert machine.devices == ()
    assert machine.cpu.isa == ("x86-64-v3",)
    assert machine.memory.available_bytes == (19455 + 946 + 23960) * 4096


@pytest.mark.parametrize("missing", ["hw.memsize", "page size"])
def test_without_a_size_nothing_is_guessed(tmp_path, missing):
    sysctl = M4_PRO if missing == "page size" else M4_PRO.replace("hw.memsize: 51539607552\n", "")
    vm_stat = BUSY
    if missing == "page size":
        sysctl = M4_PRO.replace("hw.pagesize: 16384\n", "")
        vm_stat = BUSY.split("\n", 1)[1]
    machine = probe(tmp_path, sysctl, vm_stat)
    assert machine.devices == ()
    assert missing in machine.problems[0].detail


def test_every_name_that_is_read_is_asked_for():
    used = {line.split(":")[0] for text in (M4_PRO, VIRTUAL, INTEL) for line in text.splitlines()}
    assert used == set(SYSCTL_NAMES)
