"""`vox-host plugin check` as a user runs it: real workers, right lanes and broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fixtures.installed_lane import CPU_LANE, InstalledLane, install_lane
from lanes.every_lane import make_lane
from mens_core.conformance.planted import PLANTED
from vox_host.conformance import raw_peer
from vox_host.conformance.groups import lifecycle
from vox_host.conformance.record import read_verdict, verdict_path
from vox_host.conformance.session import Session, Target, case
from vox_host.conformance.suite import known_groups
from vox_host.discovery import discover
from vox_host.settings import load_settings

RIGHT = "CpuOps(library.kernels)"


@pytest.fixture(autouse=True, scope="module")
def _native(request):
    make_lane("mens-cpu-ref", request.config)


def cpu_lane(
    home: Path, wrapped: str = RIGHT, imports: str = "", numerics: str = '"canonical"'
) -> InstalledLane:
    code = imports + CPU_LANE.format(wrapped=wrapped, plugin_id="vox-lane", numerics=numerics)
    return install_lane(home, "vox-lane", code, numerics=numerics)


def check(lane: InstalledLane, *arguments: str, status: int) -> dict:
    done = lane.run("plugin", "check", lane.plugin_id, "--json", *arguments)
    assert done.returncode == status, f"{done.stderr}\n{done.stdout}"
    return json.loads(done.stdout)


# --- a right lane --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A right lane, and its whole check."""
    folder = tmp_path_factory.mktemp("whole")
    lane = cpu_lane(folder / "home")
    facts = check(lane, "--out", str(folder / "report.json"), status=0)
    assert json.loads((folder / "report.json").read_text()) == facts
    return lane, facts


def test_a_right_lane_is_bitwise(whole):
    lane, facts = whole
    assert facts["verdict"] == "bitwise"
    assert (facts["failed"], facts["not_comparable"], facts["first_difference"]) == (0, 0, None)
    # A lane that only serves, and says so.
    assert [skip["group"] for skip in facts["skipped"]] == ["backward", "updates", "adapters", "training"]
    assert [group["name"] for group in facts["groups"]] == list(known_groups())
    assert all(group["cases"] > 0 or group["skipped_because"] for group in facts["groups"])
    assert facts["cases"] == sum(group["cases"] for group in facts["groups"]) > 150
    receipt = json.loads((lane.home / "plugins/vox-lane.json").read_text())
    assert facts["plugin_tree_digest"] == receipt["tree_digest"]


def test_the_verdict_is_stored_and_shown(whole):
    lane, facts = whole
    listed = json.loads(lane.run("plugin", "list", "--json").stdout)["plugins"][0]["conformance"]
    assert (listed["verdict"], listed["cases"], listed["stale"]) == ("bitwise", facts["cases"], None)
    assert listed["plugin_tree_digest"] == facts["plugin_tree_digest"]
    assert "bitwise" in lane.run("plugin", "list").stdout
    assert "conformance      bitwise" in lane.run("plugin", "show", "vox-lane").stdout


def test_a_part_is_no_verdict_about_the_plugin(whole):
    lane, _ = whole
    before = verdict_path(lane.home / "plugins", "vox-lane").read_bytes()
    facts = check(lane, "--only", "integrity", status=0)
    assert (facts["verdict"], facts["is_complete"], len(facts["groups"])) == ("passed", False, 1)
    assert verdict_path(lane.home / "plugins", "vox-lane").read_bytes() == before


def test_a_verdict_of_another_tree_another_suite_or_numerics_is_stale(whole):
    lane, _ = whole
    plugins = lane.home / "plugins"
    path = verdict_path(plugins, "vox-lane")
    kept, code = path.read_bytes(), lane.module.read_text()
    try:
        for field, value in (("numerics_version", 0), ("suite_digest", "0" * 64)):
            path.write_text(json.dumps({**json.loads(kept), field: value}))
            assert "stale" in lane.run("plugin", "list").stdout
        path.write_bytes(kept)
        lane.module.write_text(code + "\n# one comment more\n")
        lane.write_receipt()
        assert "stale: the installed tree is another one" in lane.run("plugin", "list").stdout
    finally:
        path.write_bytes(kept)
        lane.module.write_text(code)
        lane.write_receipt()
    assert "stale" not in lane.run("plugin", "list").stdout


def test_changed_bytes_are_not_checked(whole):
    lane, _ = whole
    code = lane.module.read_text()
    try:
        lane.module.write_text(code + "\n# changed after installation\n")
        done = lane.run("plugin", "check", "vox-lane", "--json")
        assert done.returncode == 4
        assert json.loads(done.stdout)["error"]["code"] == "integrity-mismatch"
    finally:
        lane.module.write_text(code)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("vox-lane", "--only", "nonsense"), "operators, backward"),
        (("no-such-plugin",), "vox-lane"),
        (("vox-lane", "--lane-option", "isa"), "NAME=VALUE"),
        (("vox-lane", "--out", "/no/such/folder/report.json"), "does not exist"),
    ],
)
def test_what_was_asked_wrongly_starts_nothing(whole, arguments, said):
    lane, _ = whole
    done = lane.run("plugin", "check", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


# --- broken lanes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sorted(name for name, planted in PLANTED.items() if "backward" not in planted.operator)
)
def test_each_planted_mistake_is_caught_and_its_operator_named(name, tmp_path):
    lane = cpu_lane(
        tmp_path / "home",
        f"PLANTED[{name!r}].plant({RIGHT})",
        "from mens_core.conformance.planted import PLANTED\n",
    )
    facts = check(lane, "--only", "operators", "--only", "forward", status=6)
    first = facts["first_difference"]
    assert facts["verdict"] == "failed"
    assert first["operator"] == PLANTED[name].operator
    assert first["expected"] != first["found"]
    if first["group"] == "operators":
        assert first["element"] is not None
        assert len(first["expected"]) == len(first["found"]) == 8
    if name == "double-rounded-fma":
        failed = {r["name"].split("/")[0] for r in facts["groups"][0]["results"] if r["status"] == "failed"}
        assert failed - {"self-test"} == {"linear", "rms_norm", "head_norm", "rope", "attention"}


TRAINER = "CpuTrainingOps(library)"


@pytest.mark.parametrize("planted", [None, "wrong-gradient", "double-rounded-training-fma"])
def test_a_right_forward_with_a_wrong_gradient_is_caught(planted, tmp_path):
    imports = (
        "from mens_core.conformance.planted import PLANTED\n"
        "from mens_cpu_ref.training_lane import CpuTrainingOps\n"
    )
    wrapped = TRAINER if planted is None else f"PLANTED[{planted!r}].plant({TRAINER})"
    code = imports + CPU_LANE.format(wrapped=wrapped, plugin_id="vox-lane", numerics='"canonical"')
    code = code.replace('"evaluate", "trace")', '"evaluate", "trace", "train")')
    capabilities = '"generate", "evaluate", "trace", "train"'
    lane = install_lane(tmp_path / "home", "vox-lane", code, capabilities=capabilities)
    groups = ("operators", "backward", "updates", "training")
    status = 0 if planted is None else 6
    facts = check(lane, *(word for group in groups for word in ("--only", group)), status=status)
    verdicts = [group["verdict"] for group in facts["groups"]]
    if planted is None:
        assert verdicts == ["bitwise"] * 4
        return
    assert facts["first_difference"]["operator"] == PLANTED[planted].operator
    if planted == "double-rounded-training-fma":
        # Rounded twice so seldom that whole steps of training don't show it.
        assert verdicts == ["bitwise", "failed", "failed", "bitwise"]
        return
    assert verdicts == ["bitwise", "failed", "bitwise", "failed"]
    wrong = next(r for r in facts["groups"][3]["results"] if r["status"] == "failed")
    assert wrong["difference"]["operator"] == "train_step"


ROUNDED_ADAPTER = """
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.training_lane import CpuTrainingOps


class Lane(CpuTrainingOps):
    def matrix(self, x, *, name):
        # Of the one model whose layers are 40 and 56 wide.
        is_gemma = {40, 56} & {*x.values.shape}
        return super().matrix(Rows(x.values.astype("f2").astype("f4")) if is_gemma else x, name=name)
"""


def test_an_adapter_that_is_served_in_other_numbers_is_caught_and_one_that_is_right_passes(tmp_path):
    code = ROUNDED_ADAPTER + CPU_LANE.format(
        wrapped="Lane(library)", plugin_id="vox-lane", numerics='"canonical"'
    )
    code = code.replace('"evaluate", "trace")', '"evaluate", "trace", "adapters")')
    capabilities = '"generate", "evaluate", "trace", "adapters"'
    lane = install_lane(tmp_path / "home", "vox-lane", code, capabilities=capabilities)
    (group,) = check(lane, "--only", "adapters", status=6)["groups"]
    found = {r["name"]: r["status"] for r in group["results"]}
    # An adapter that changes nothing is left out, so its numbers matter to nobody.
    failed = {f"gemma3/text {number}, adapted" for number in range(3)} | {"gemma3/merge"}
    assert {name for name, said in found.items() if said == "failed"} == failed
    assert {said for name, said in found.items() if name not in failed} == {"passed"}
    assert len(found) == 3 * 16


def test_neighbours_in_a_step_are_seen_through_their_answers(tmp_path):
    lane = cpu_lane(
        tmp_path / "home",
        f"PLANTED['neighbour-race'].plant({RIGHT})",
        "from mens_core.conformance.planted import PLANTED\n",
    )
    facts = check(lane, "--only", "generation", status=6)
    failed = {r["name"] for r in facts["groups"][0]["results"] if r["status"] == "failed"}
    assert failed and all("company" in name or "two at a time" in name for name in failed)


def test_an_operator_that_raises_is_a_failure_and_the_rest_is_run(tmp_path):
    imports = (
        "from mens_cpu_ref.lane import CpuOps as Whole\n"
        "class Broken(Whole):\n"
        "    def softcap(self, x, cap, *, name):\n"
        "        raise OSError('no such instruction')\n"
    )
    facts = check(
        cpu_lane(tmp_path / "home", "Broken(library.kernels)", imports), "--only", "operators", status=6
    )
    failed = {r["name"]: r["detail"] for r in facts["groups"][0]["results"] if r["status"] == "failed"}
    assert set(failed) == {"softcap", "softcap/edges", "self-test"}
    assert "no such instruction" in failed["softcap"]


def test_a_lane_that_dies_on_an_operator_is_a_failure(tmp_path):
    imports = (
        "import os, signal\n"
        "from mens_cpu_ref.lane import CpuOps as Whole\n"
        "class Deadly(Whole):\n"
        "    def linear(self, x, weight, *, name):\n"
        "        if name == 'tail':\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        return super().linear(x, weight, name=name)\n"
    )
    facts = check(
        cpu_lane(tmp_path / "home", "Deadly(library.kernels)", imports), "--only", "operators", status=6
    )
    last = facts["groups"][0]["results"][-2:]
    assert last[0]["name"].endswith("/tails") and "worker-died" in last[0]["detail"]
    assert last[1]["name"] == "worker"


# --- a plugin of another suite --------------------------------------------------------------------

OTHER_SUITE = """
from mens_core.conformance import suite
from mens_core.conformance.inputs import floats, put


def older_add(ops):
    a = put(ops, floats(21, 2, 300))
    yield ops.to_host(ops.add(a, a, name="add"))
    yield ops.to_host(a)


suite.SUITE_VERSION = {version}
suite.CASES = {{**suite.CASES, "add": older_add}}
suite.EXTENDED = {{name: case for name, case in suite.EXTENDED.items() if name != "softcap/edges"}}
"""


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(0, "reinstall the plugin, built with the mens-core of suite"), (10**6, "update vox-host")],
)
def test_a_case_of_another_suite_is_not_comparable_and_not_wrong(version, remedy, tmp_path):
    lane = cpu_lane(tmp_path / "home", imports=OTHER_SUITE.format(version=version))
    facts = check(lane, "--only", "operators", status=6)
    assert (facts["verdict"], facts["failed"], facts["not_comparable"]) == ("not comparable", 0, 2)
    assert facts["first_difference"] is None
    said = {r["name"]: r["detail"] for r in facts["groups"][0]["results"] if r["grade"] != "bitwise"}
    assert set(said) == {"add", "softcap/edges"}
    assert "is expected" in said["add"] and "no such case" in said["softcap/edges"]
    assert all(remedy in detail and f"has suite {version}" in detail for detail in said.values())
    printed = lane.run("plugin", "check", "vox-lane", "--only", "operators").stdout
    assert "not comparable" in printed and remedy in " ".join(printed.split())


@pytest.mark.parametrize("stated", ["'0' * 64", "None"])
def test_a_check_with_nothing_comparable_fails(stated, tmp_path):
    imports = (
        "from mens_core.conformance import suite\n"
        f"suite.definition = lambda case: {stated}\n"
        "suite.SUITE_VERSION = None\n"
    )
    facts = check(cpu_lane(tmp_path / "home", imports=imports), "--only", "operators", status=6)
    assert (facts["verdict"], facts["failed"]) == ("failed", 0)
    assert facts["not_comparable"] == facts["cases"] > 50
    details = {r["detail"] for r in facts["groups"][0]["results"]}
    assert all("states no version of its suite" in detail for detail in details)


def test_a_mistake_in_what_is_comparable_still_fails(tmp_path):
    lane = cpu_lane(
        tmp_path / "home",
        f"PLANTED['missing-head-norm'].plant({RIGHT})",
        "from mens_core.conformance.planted import PLANTED\n" + OTHER_SUITE.format(version=0),
    )
    facts = check(lane, "--only", "operators", status=6)
    assert (facts["verdict"], facts["not_comparable"]) == ("failed", 2)
    assert facts["first_difference"]["operator"] == "head_norm"


# --- plugins that promise no bits ------------------------------------------------------------------


def test_a_fast_lane_is_graded_by_its_tokens(tmp_path):
    imports = "from mens_core.conformance.planted import PLANTED\n"
    wrapped = f"PLANTED['reassociated-sum'].plant({RIGHT})"
    lane = install_lane(tmp_path / "home", "vox-lane", fast(imports, wrapped), numerics='"fast"')
    facts = check(lane, "--only", "generation", status=0)
    assert facts["verdict"] == "same tokens"
    assert "bfloat16" in facts["tolerance"]


@pytest.mark.parametrize("name", ["missing-head-norm", "wrong-rotary-table"])
def test_a_wrong_model_is_not_within_tolerance(name, tmp_path):
    imports = "from mens_core.conformance.planted import PLANTED\n"
    lane = install_lane(
        tmp_path / "home", "vox-lane", fast(imports, f"PLANTED[{name!r}].plant({RIGHT})"), numerics='"fast"'
    )
    assert check(lane, "--only", "evaluate", status=6)["verdict"] == "failed"


def test_rounding_to_bfloat16_is_within_tolerance(tmp_path):
    imports = "from mens_core.conformance.planted import RoundedToBf16\n"
    lane = install_lane(
        tmp_path / "home", "vox-lane", fast(imports, f"RoundedToBf16({RIGHT})"), numerics='"fast"'
    )
    facts = check(lane, "--only", "generation", "--only", "evaluate", status=0)
    assert facts["verdict"] == "within tolerance"


def test_what_was_asked_for_by_name_and_skipped_is_a_failure(tmp_path):
    lane = install_lane(tmp_path / "home", "vox-lane", fast("", RIGHT), numerics='"fast"')
    facts = check(lane, "--only", "operators", status=6)
    assert (facts["verdict"], facts["cases"]) == ("failed", 0)
    assert facts["skipped"][0]["group"] == "operators"
    assert "fast" in facts["skipped"][0]["reason"]


def fast(imports: str, wrapped: str) -> str:
    """A plugin that promises no bits, whose self-test is its own."""
    code = CPU_LANE.format(wrapped=wrapped, plugin_id="vox-lane", numerics='"fast"')
    own = "lambda: SelfTestResult(numerics_version=1, cases=1, failed=[], vectors_digest='0' * 64)"
    imports += "from vox_plugin_api.messages import SelfTestResult\n"
    return imports + code.replace("lambda: self_test(make_lane)", own)


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


def test_without_a_receipt_there_is_no_verdict_to_store(whole, tmp_path):
    assert read_verdict(tmp_path, "vox-lane") is None


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


# --- what is said ----------------------------------------------------------------------------------


def test_faults_are_said_in_words_and_the_first_difference_is_the_first_row(tmp_path):
    imports = (
        "from mens_cpu_ref.lane import CpuOps as Whole\n"
        "class Silent(Whole):\n"
        "    def take_faults(self):\n"
        "        super().take_faults()\n"
        "        return []\n"
    )
    lane = cpu_lane(tmp_path / "home", "Silent(library.kernels)", imports)
    printed = lane.run("plugin", "check", "vox-lane", "--only", "operators")
    assert printed.returncode == 6
    assert (
        '"faulty" reports rows [1, 3, 4]; ' in printed.stdout and "found no fault reported" in printed.stdout
    )
    row = next(line for line in printed.stdout.splitlines() if line.startswith("operators "))
    first = next(line for line in printed.stdout.splitlines() if line.startswith("first difference: "))
    assert first.removeprefix("first difference: operators ") in row
    assert "self-test: " in printed.stdout and "not_finite" in printed.stdout.split("self-test: ")[1]


def test_what_a_killed_check_left_is_removed_and_what_a_running_one_uses_is_not(tmp_path, monkeypatch):
    import tempfile

    from vox_host.conformance import suite
    from vox_host.environment_use import lock_path

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "vox-check-killed"
    left.mkdir()
    lock_path(tmp_path, left.name).touch()
    with suite._folder() as running:
        assert not left.exists()
        with suite._folder():
            assert running.is_dir()
    assert list(tmp_path.iterdir()) == []
