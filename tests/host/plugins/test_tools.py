"""Running installers: progress, and what is kept when one fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plugin_toys import make_tools, write_toy_wheel

from vox_host.errors import PluginError, VoxError
from vox_host.installation.tools import find_tools, run_tool


def run_python(program: str, **options: object) -> list[str]:
    lines: list[str] = []
    run_tool(
        [sys.executable, "-c", program],
        "building it",
        environment={},
        report=lines.append,
        **options,  # type: ignore[arg-type]
    )
    return lines


def test_a_tool_that_works_is_silent() -> None:
    assert run_python("print('noise')") == []


def test_a_long_step_says_that_it_still_runs() -> None:
    lines = run_python("import time; time.sleep(0.5)", progress_every_s=0.1)
    assert len(lines) >= 2
    assert all(line.startswith("building it (") for line in lines)


def test_a_failure_keeps_the_last_lines_of_both_streams() -> None:
    program = "import sys; print(*range(100), sep='\\n', flush=True); sys.exit('the reason')"
    with pytest.raises(PluginError) as caught:
        run_python(program)
    output = dict(caught.value.facts)["output"].splitlines()
    assert output[-1] == "the reason"
    assert "99" in output
    assert "0" not in output
    assert "building it failed; nothing was installed" in caught.value.message


def test_death_by_a_signal_is_named() -> None:
    with pytest.raises(PluginError) as caught:
        run_python("import os; os.kill(os.getpid(), 9)")
    assert dict(caught.value.facts)["exit"] == "signal 9"


@pytest.mark.parametrize(
    ("output", "code", "exit_code"),
    [
        ("OSError: [Errno 28] No space left on device", "disk-full", 2),
        ("CMake Error: No CMAKE_CXX_COMPILER could be found.", "no-compiler", 3),
        ("something else", "tool-failed", 3),
    ],
)
def test_a_known_cause_has_its_own_code(output: str, code: str, exit_code: int) -> None:
    with pytest.raises(VoxError) as caught:
        run_python(f"import sys; sys.exit({output!r})")
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code)


def test_a_tool_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        run_tool([tmp_path / "no-such-tool"], "x", environment={}, report=lambda line: None)
    assert caught.value.code == "tool-unusable"
    assert "no-such-tool" in caught.value.message


def test_uv_is_found_on_the_path(tmp_path: Path) -> None:
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    assert find_tools({"PATH": str(tmp_path)})[1] == uv


def test_a_dependency_that_is_nowhere_is_the_tool_s_own_message(tmp_path: Path) -> None:
    tools = make_tools()
    environment = tmp_path / "env"
    tools.create_environment(environment)
    wheel = write_toy_wheel(tmp_path / "wheels", requires=("vox-no-such-distribution==3",))
    with pytest.raises(PluginError) as caught:
        tools.install_wheels(environment, [wheel])
    assert "vox-no-such-distribution" in dict(caught.value.facts)["output"]


@pytest.mark.parametrize("which", ["uv", "pip"])
def test_a_rebuilt_wheel_of_the_same_version_replaces_the_cached_one(tmp_path: Path, which: str) -> None:
    tools = make_tools(which, find_links=(tmp_path / "wheels",))
    user = write_toy_wheel(tmp_path, "vox-user", requires=("vox-rebuilt==1.0.0",))
    for text in ("first\n", "second\n"):
        write_toy_wheel(tmp_path / "wheels", "vox-rebuilt", files={"vox_rebuilt/text.txt": text})
        environment = tmp_path / text.strip()
        tools.create_environment(environment)
        tools.install_wheels(environment, [user])
        [installed] = environment.glob("lib/python*/site-packages/vox_rebuilt/text.txt")
        assert installed.read_text() == text
