"""The probe as a host calls it: in a child process, within a time limit."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from vox_host import cli
from vox_host.cli import early_probe
from vox_host.hardware import probe
from vox_host.hardware.apple import working_set_limit_bytes
from vox_host.hardware.budget import device_budget_bytes, main_memory_budget_bytes
from vox_host.hardware.linux import parse_cpuinfo
from vox_host.hardware.nvidia import devices_from_rows, parse_smi
from vox_host.hardware.record import Device, Memory
from vox_host.hardware.system import Output

CASES = Path(__file__).parents[2] / "cases"
GIB = 2**30


def test_this_machine_is_probed_in_a_child():
    machine = probe.probe_machine()
    assert machine.platform in {"linux-x86_64", "linux-aarch64", "macos-aarch64", "macos-x86_64"}
    assert 0 < machine.memory.available_bytes <= machine.memory.total_bytes
    assert machine.cpu.usable_threads >= 1
    assert machine.python == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in program replaces nvidia-smi on Linux")
def test_a_hanging_driver_costs_the_devices_and_not_the_host(tmp_path, monkeypatch):
    shutil.copy(CASES / "tools/nvidia-smi", tmp_path / "nvidia-smi")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_SMI_TEXT", "/dev/null")
    monkeypatch.setenv("FAKE_SMI_SLEEP", "60")
    started = time.monotonic()
    machine = probe.probe_machine(timeout_s=1.5, use_nvml=False)
    assert time.monotonic() - started < 10
    assert machine.devices == ()
    assert "did not answer within 1.5 s" in machine.problems[-1].detail
    assert machine.memory.total_bytes > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in program replaces nvidia-smi on Linux")
def test_a_mismatched_driver_is_reported_with_its_own_words(tmp_path, monkeypatch):
    shutil.copy(CASES / "tools/nvidia-smi", tmp_path / "nvidia-smi")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAKE_SMI_TEXT", str(CASES / "hand/memory/M9_driver_mismatch.txt"))
    monkeypatch.setenv("FAKE_SMI_EXIT", "18")
    machine = probe.probe_machine(use_nvml=False)
    assert machine.devices == ()
    assert "Driver/library version mismatch" in machine.problems[0].detail
    assert "reboot" in machine.problems[0].remedy


@pytest.mark.parametrize(
    ("flags", "isa"),
    [
        ("fpu sse2 avx", ()),
        ("avx2 bmi1 bmi2 f16c fma abm movbe", ("x86-64-v3",)),
        (
            "avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512dq avx512vl avx512_vnni",
            ("x86-64-v3", "avx512-vnni"),
        ),
        ("avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512dq avx512vl", ("x86-64-v3",)),
    ],
)
def test_instruction_sets_need_all_of_their_flags(flags, isa):
    assert parse_cpuinfo(f"model name : A CPU\nflags : {flags}\n", "x86_64") == ("A CPU", isa)


def test_arm_features_are_read_from_their_own_line():
    name, isa = parse_cpuinfo("CPU part : 0xd40\nFeatures : fp asimd asimddp\n", "aarch64")
    assert (name, isa) == ("0xd40", ("neon", "dotprod"))


def test_a_mig_card_is_not_sized_by_the_whole_card_without_a_word():
    header = "index, name, memory.total [MiB], memory.free [MiB], mig.mode.current"
    text = f"{header}\n0, NVIDIA H200, 143771 MiB, 9 MiB, Enabled\n"
    rows, _ = parse_smi(Output(0, text))
    device = devices_from_rows(rows, Memory(total_bytes=GIB, available_bytes=GIB, source="test"))[0]
    assert "MIG" in device.warning and not device.is_unified


def test_unified_memory_keeps_the_desktops_reserve_and_discrete_memory_a_fraction():
    unified = Device(
        kind="apple", index=0, name="M", total_bytes=32 * GIB, free_bytes=30 * GIB, is_unified=True
    )
    discrete = Device(kind="nvidia", index=0, name="N", total_bytes=16 * GIB, free_bytes=10 * GIB)
    unknown = Device(kind="nvidia", index=1, name="?")
    budget = {"unified_reserve_bytes": 12 * GIB, "vram_safety": 0.88}
    assert device_budget_bytes(unified, **budget) == 20 * GIB
    assert device_budget_bytes(discrete, **budget) == int(10 * GIB * 0.88)
    assert device_budget_bytes(unknown, **budget) is None
    assert (
        main_memory_budget_bytes(Memory(total_bytes=64 * GIB, available_bytes=40 * GIB, source="t"))
        == 39 * GIB
    )


def test_the_metal_working_set_is_below_the_nameplate_unless_the_user_raised_it():
    assert working_set_limit_bytes({}, 36 * GIB) == 24 * GIB
    assert working_set_limit_bytes({}, 128 * GIB) == 96 * GIB
    assert working_set_limit_bytes({"iogpu.wired_limit_mb": "0"}, 128 * GIB) == 96 * GIB
    assert working_set_limit_bytes({"iogpu.wired_limit_mb": "114688"}, 128 * GIB) == 112 * GIB


def test_a_probe_that_was_started_before_is_taken_over():
    child = probe.start_probe(use_nvml=False)
    machine = probe.probe_machine(child)
    assert machine.cpu == probe.probe_machine(use_nvml=False).cpu
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [
        (["generate", "--model", "absent", "--prompt", "x"], 1),
        (["generate", "--help"], 0),
        (["model", "list"], 0),
    ],
)
def test_commands_that_open_a_model_begin_with_the_probe(tmp_path, monkeypatch, capsys, arguments, begun):
    started = []
    monkeypatch.setenv("VOX_HOME", str(tmp_path))
    monkeypatch.setattr(
        early_probe, "start_probe", lambda: started.append(probe.start_probe()) or started[-1]
    )
    cli.run(arguments)
    assert len(started) == begun
    assert all(child.returncode is not None for child in started), "the command took it over"
    assert early_probe.take() is None
