"""What the CPU lane measures: available memory within the limits of the process's groups."""

from __future__ import annotations

from pathlib import Path

import pytest

main_memory = pytest.importorskip("mens_cpu_ref.main_memory", reason="the CPU lane is not installed")

MEMINFO = "MemTotal: 1000000 kB\nMemFree: 10 kB\nMemAvailable: 500000 kB\n"
AVAILABLE = 500_000 * 1024


def a_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_what_the_kernel_calls_available(tmp_path):
    assert main_memory.free_bytes(a_machine(tmp_path, {})) == AVAILABLE


def test_the_tightest_limit_on_the_path_counts_and_unused_file_cache_is_free(tmp_path):
    group = "sys/fs/cgroup/a"
    machine = a_machine(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        f"{group}/b/memory.max": "max\n", f"{group}/b/memory.current": "99\n",
        f"{group}/memory.max": "1000000\n", f"{group}/memory.current": "700000\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 200000\n",
        "sys/fs/cgroup/memory.max": "800000\n", "sys/fs/cgroup/memory.current": "100000\n",
    })  # fmt: skip
    assert main_memory.free_bytes(machine) == 500_000


def test_version_one_groups_and_a_limit_that_is_used_up(tmp_path):
    machine = a_machine(tmp_path, {
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "300\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400\n",
    })  # fmt: skip
    assert main_memory.free_bytes(machine) == 0


def test_a_limit_above_what_is_there_changes_nothing(tmp_path):
    machine = a_machine(tmp_path, {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400\n",
    })  # fmt: skip
    assert main_memory.free_bytes(machine) == AVAILABLE


def test_where_nothing_is_told_nothing_is_known(tmp_path):
    assert main_memory.free_bytes(tmp_path) is None
