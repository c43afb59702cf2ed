"""The recorded outputs of tests/cases that concern memory and devices, with their right answers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from vox_host.hardware.apple import parse_sysctl, parse_vm_stat
from vox_host.hardware.linux import probe_memory
from vox_host.hardware.nvidia import devices_from_rows, parse_smi, visible_uuids
from vox_host.hardware.probe import probe_system
from vox_host.hardware.record import Memory
from vox_host.hardware.system import Output, System

CASES = Path(__file__).parents[2] / "cases"
INDEX = json.loads((CASES / "INDEX.json").read_text())
STAND_IN = CASES / "tools" / "nvidia-smi"


def cases(case_id: str) -> list[object]:
    chosen = [case for case in INDEX if case["id"] == case_id and case["kind"] == "memory"]
    assert chosen, case_id
    return [pytest.param(case, id=Path(case["file"]).stem) for case in chosen]


def place_stand_in(folder: Path) -> None:
    """Put the stand-in into `folder`, run by this interpreter whatever PATH says."""
    folder.mkdir(parents=True, exist_ok=True)
    script = STAND_IN.read_text().split("\n", 1)[1]
    (folder / "nvidia-smi").write_text(f"#!{sys.executable}\n{script}")
    (folder / "nvidia-smi").chmod(0o755)


def fake_system(root: Path, tmp_path: Path, **environ: str) -> System:
    """A Linux machine whose files lie under `root` and whose nvidia-smi is the stand-in."""
    place_stand_in(tmp_path / "bin")
    return System(root=root, environ={"PATH": str(tmp_path / "bin"), **environ}, os="linux", arch="x86_64")


@pytest.mark.parametrize("case", cases("M1"))
def test_unified_boards_are_devices_with_the_machines_memory(case, tmp_path):
    root = CASES / case["file"]
    expected = case["expect"]["value"]
    machine = probe_system(fake_system(root, tmp_path, FAKE_SMI=str(root / "smi.json")), use_nvml=False)
    assert len(machine.devices) == expected["gpus"]
    first = machine.devices[0]
    if "unified" in expected:
        assert first.is_unified == expected["unified"]
        assert first.total_bytes == expected["total_bytes"]
        assert first.free_bytes == expected.get("free_bytes", machine.memory.available_bytes)
    else:
        assert first.total_bytes == expected["gpu0_total_bytes"] and not first.is_unified
        second = machine.devices[1]
        assert second.total_bytes is None and not second.is_unified
        assert "unknown" in second.warning and "only if asked for" in second.warning


@pytest.mark.parametrize("case", cases("M4"))
def test_vm_stat_counts_pages_of_the_size_it_names(case):
    folder = CASES / case["file"]
    expected = case["expect"]["value"]
    sysctl = parse_sysctl((folder / "sysctl.txt").read_text())
    memory, free, problems = parse_vm_stat((folder / "vm_stat.txt").read_text(), sysctl)
    assert not problems
    assert free == expected["free_bytes"]
    assert expected["available_min_bytes"] <= memory.available_bytes <= expected["available_max_bytes"]
    assert str(expected["page_size"]) in memory.source
    assert memory.total_bytes == int(sysctl["hw.memsize"])


def test_vm_stat_without_any_page_size_is_a_problem_not_a_guess():
    memory, free, problems = parse_vm_stat("Pages free:  400000.\n", {"hw.memsize": "38654705664"})
    assert memory is None and free is None
    assert "page size" in problems[0].detail


@pytest.mark.parametrize("case", cases("M5"))
def test_the_tightest_cgroup_limit_counts(case):
    expected = case["expect"]["value"]
    memory, problems = probe_memory(System(root=CASES / case["file"], environ={}, os="linux", arch="x86_64"))
    assert not problems
    assert memory.available_bytes == expected["available_bytes"]
    if "limit_bytes" in expected:
        assert memory.limit_bytes == expected["limit_bytes"]
    assert memory.source.startswith("cgroup" if memory.limit_bytes else "MemAvailable")


def test_a_cgroups_file_cache_is_not_held_against_it(tmp_path):
    root = tmp_path / "root"
    shutil.copytree(CASES / "hand/memory/M5_v2_4g", root)
    (root / "sys/fs/cgroup/memory.stat").write_text("anon 1\ninactive_file 1073741824\n")
    memory, _ = probe_memory(System(root=root, environ={}, os="linux", arch="x86_64"))
    assert memory.available_bytes == 4 * 2**30


@pytest.mark.parametrize(
    "row",
    json.loads((CASES / "hand/memory/M6_cvd.json").read_text())["cases"],
    ids=lambda row: repr(row["value"]),
)
def test_cuda_visible_devices_is_read_as_the_runtime_reads_it(row):
    order = json.loads((CASES / "hand/memory/M6_cvd.json").read_text())["cuda_order"]
    expected = None if row["uuids"] == "ask the runtime" else row["uuids"]
    assert visible_uuids(row["value"], order) == expected


def test_hidden_devices_stay_listed_and_the_order_is_kept(tmp_path):
    file = CASES / "hand/memory/M6_cvd.json"
    machine = probe_system(
        fake_system(CASES / "hand/memory/M1_gb10", tmp_path, FAKE_SMI=str(file), CUDA_VISIBLE_DEVICES="1"),
        use_nvml=False,
    )
    assert [(device.name, device.is_visible) for device in machine.devices] == [
        ("NVIDIA A40", True),
        ("NVIDIA H200", False),
    ]


@pytest.mark.parametrize("case", cases("M9"))
def test_an_error_text_is_never_a_device(case):
    expect = case["expect"]
    output = Output(expect.get("exit", 0), (CASES / case["file"]).read_text())
    rows, problems = parse_smi(output)
    devices = devices_from_rows(rows, Memory(total_bytes=1, available_bytes=1, source="test"))
    value = expect.get("value", {"gpus": expect.get("gpus")})
    assert len(devices) == value["gpus"]
    if "total_bytes" in value:
        assert devices[0].total_bytes == value["total_bytes"]
    for words in expect.get("must_mention", []):
        assert words in problems[0].detail
    assert bool(problems) == bool(expect.get("must_mention") or value.get("warning"))


def test_a_name_with_a_comma_stays_whole():
    rows, _ = parse_smi(Output(0, (CASES / "hand/memory/M9_comma_name.csv").read_text()))
    assert rows[0].get("name") == "Quadro, Special Edition"


def test_a_tool_that_hangs_is_given_up_and_named(tmp_path):
    system = fake_system(
        CASES / "hand/memory/M1_gb10", tmp_path, FAKE_SMI_TEXT="/dev/null", FAKE_SMI_SLEEP="60"
    )
    output = system.run(system.find_program("nvidia-smi"), timeout_s=0.3)
    rows, problems = parse_smi(output)
    assert not rows and "did not answer within 0.3 s" in problems[0].detail


@pytest.mark.parametrize("case", cases("M10"))
def test_wsl_keeps_nvidia_smi_off_the_path(case, tmp_path):
    expected = case["expect"]["value"]
    root = tmp_path / "root"
    shutil.copytree(CASES / case["file"], root)
    place_stand_in(root / "usr/lib/wsl/lib")
    environ = {"PATH": str(tmp_path / "empty"), "FAKE_SMI": str(root / "smi.json")}
    machine = probe_system(System(root=root, environ=environ, os="linux", arch="x86_64"), use_nvml=False)
    assert [(d.total_bytes, d.is_unified) for d in machine.devices] == [
        (expected["total_bytes"], expected["unified"])
    ]
