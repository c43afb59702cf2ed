"""`vox-host plugin check` on workers that misbehave, or never get as far as an operator."""

from __future__ import annotations

import re

import pytest

from fixtures.checked_lane import RIGHT, check, cpu_lane
from fixtures.installed_lane import CPU_LANE, InstalledLane, install_lane
from vox_host.conformance import raw_peer
from vox_host.conformance.groups import lifecycle
from vox_host.conformance.session import Session, Target, case
from vox_host.discovery import discover
from vox_host.settings import load_settings

pytestmark = pytest.mark.usefixtures("native")


# --- workers that misbehave: the library in the plugin's own tree, changed --------------------------


def change_library(lane: InstalledLane, file: str, old: str, new: str) -> None:
    path = lane.module.parents[1] / "vox_plugin_api" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    lane.write_receipt()


def test_a_worker_that_takes_any_host_is_named(tmp_path):
    lane = cpu_lane(tmp_path / "home")
    change_library(lane, "child.py", "if spoken.highest_common(hello.protocol) is None:", "if False:")
    change_library(lane, "child.py", "if plugin.manifest_digest != hello.manifest_digest:", "if False:")
    facts = check(lane, "--only", "protocol", status=6)
    failed = [r["name"] for r in facts["groups"][0]["results"] if r["status"] == "failed"]
    assert failed == ["a host of protocol 0 alone", "a host of protocol 2 alone", "another manifest"]


@pytest.mark.parametrize(
    ("file", "old", "new", "run", "said"),
    [
        ("request_loop.py", "            os._exit(EXIT_PROTOCOL_BREACH)",
         "            threading.Event().wait()",
         lambda session, _: lifecycle.garbage(session, b"no frame"), "goes on after a breach"),
        ("request_loop.py", "        os._exit(EXIT_HOST_GONE)\n\n    def _answer",
         "        return\n\n    def _answer",
         lambda session, _: lifecycle.host_gone(session, b""), "goes on without a host"),
        ("child.py", "    os.dup2(2, 1)\n", "    os.dup2(os.pipe()[1], 1)\n",
         lifecycle.noise, "not the worker's log"),
        ("request_loop.py", "        _close(running.stream)\n        self._fail",
         "        os._exit(1)\n        self._fail",
         lifecycle.cancelled, "worker-died"),
    ],
)  # fmt: skip
async def test_a_worker_that_misbehaves_is_named(file, old, new, run, said, tmp_path, monkeypatch):
    monkeypatch.setattr(raw_peer, "ANSWER_S", 3.0)
    lane = cpu_lane(tmp_path / "home")
    change_library(lane, file, old, new)
    settings = load_settings({"VOX_HOME": str(lane.home)})
    target = Target(settings=settings, candidate=discover(settings.plugins_dir)[0])
    session = Session(target, tmp_path / "models", lambda _: None)
    async with session.worker() as worker:
        await session.load(worker, "gemma3")
        result = await case("it", run(session, worker))
    assert result.is_failed and said in result.detail


def test_a_plugin_that_changes_its_own_tree_is_caught(tmp_path):
    lane = cpu_lane(tmp_path / "home", imports=(
        "import pathlib\n"
        "pathlib.Path(__file__).with_name('cache.bin').write_bytes(b'x')\n"
    ))  # fmt: skip
    done = lane.run("plugin", "check", "vox-lane", "--only", "integrity")
    assert done.returncode == 6, done.stderr
    assert "cache.bin" in done.stdout + done.stderr


# --- starts that come to nothing -------------------------------------------------------------------

STARTS = {
    "exit in the self-test": ("self_test(make_lane)", "__import__('os')._exit(7)", "running the self-test"),
    "exit in the entry point": ("library = load_library()", "__import__('os')._exit(7)", "the entry point"),
    "SystemExit in the entry point": ("library = load_library()", "raise SystemExit(3)", "raised SystemExit"),
    "a hang in the self-test": (
        "self_test(make_lane)",
        "__import__('time').sleep(600)",
        "after 3 s it was still running the self-test",
    ),
}


@pytest.mark.parametrize("name", STARTS)
async def test_a_start_that_comes_to_nothing_is_a_report_that_names_its_stage(name, tmp_path, monkeypatch):
    from vox_host.conformance import session, suite

    monkeypatch.setattr(session, "START_S", 3.0)
    old, new, said = STARTS[name]
    code = CPU_LANE.format(wrapped=RIGHT, plugin_id="vox-lane", numerics='"canonical"')
    assert old in code
    lane = install_lane(tmp_path / "home", "vox-lane", code.replace(old, new))
    settings = load_settings({"VOX_HOME": str(lane.home)})
    target = Target(settings=settings, candidate=discover(settings.plugins_dir)[0])
    report = await suite.check(target)
    start, *others = report.groups
    assert (report.verdict, start.name, start.failed) == ("failed", "start", 1)
    assert said in start.cases[0].detail and "log: " in start.cases[0].detail
    assert "self-test" in start.cases[0].detail or "entry point" in start.cases[0].detail
    assert [group.name for group in others if group.skipped is None] == ["integrity"]


async def test_a_system_exit_in_the_self_test_fails_it_and_operators_are_still_shown(tmp_path):
    code = CPU_LANE.format(wrapped=RIGHT, plugin_id="vox-lane", numerics='"canonical"')
    code = code.replace("lambda: self_test(make_lane)", "lambda: __import__('sys').exit(3)")
    lane = install_lane(tmp_path / "home", "vox-lane", code)
    facts = check(lane, "--only", "operators", status=6)
    failed = [r for r in facts["groups"][0]["results"] if r["status"] == "failed"]
    assert [r["name"] for r in failed] == ["self-test"]
    assert "the self-test raised SystemExit: 3" in failed[0]["detail"]


async def test_the_first_hang_ends_its_group_and_waiting_is_told(tmp_path, monkeypatch):
    from vox_host.conformance import session, suite

    monkeypatch.setattr(suite, "_PROGRESS_S", 0.2)
    monkeypatch.setattr(session, "REQUEST_S", 2.0)
    monkeypatch.setattr(session.in_time, "__defaults__", (2.0,))
    imports = (
        "import time\n"
        "from mens_cpu_ref.lane import CpuOps as Whole\n"
        "class Slow(Whole):\n"
        "    def argmax(self, logits):\n"
        "        time.sleep(600 if logits.values.shape[1] > 1100 or self.__class__.served else 0)\n"
        "        return super().argmax(logits)\n"
        "    served = False\n"
        "    def new_kv_cache(self, **names):\n"
        "        self.__class__.served = names['layers'] != 2 or names['kv_heads'] != 2\n"
        "        return super().new_kv_cache(**names)\n"
    )
    lane = cpu_lane(tmp_path / "home", "Slow(library.kernels)", imports)
    settings = load_settings({"VOX_HOME": str(lane.home)})
    said: list[str] = []
    target = Target(settings=settings, candidate=discover(settings.plugins_dir)[0])
    report = await suite.check(target, only=["generation"], say=said.append)
    hangs = [case for case in report.groups[0].cases if case.is_hang]
    assert len(hangs) == 1 and report.groups[0].cases[-1].name == "worker"
    assert any(re.search(r"\bcases? so far", line) for line in said)
    assert any("given up" in line for line in said)
