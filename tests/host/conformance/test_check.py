"""`vox-host plugin check` as a user runs it: what it says of a right lane, stores and refuses."""

from __future__ import annotations

import json

import pytest

from fixtures.checked_lane import check, cpu_lane
from vox_host.conformance.record import read_verdict, verdict_path
from vox_host.conformance.suite import known_groups

pytestmark = pytest.mark.usefixtures("native")


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
    ("arguments", "status", "said"),
    [
        (("vox-lane", "--only", "nonsense"), 2, "operators, backward"),
        (("no-such-plugin",), 3, "vox-lane"),
        (("vox-lane", "--lane-option", "isa"), 2, "NAME=VALUE"),
        (("vox-lane", "--out", "/no/such/folder/report.json"), 2, "does not exist"),
    ],
)
def test_what_was_asked_wrongly_starts_nothing(whole, arguments, status, said):
    lane, _ = whole
    done = lane.run("plugin", "check", *arguments)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_receipt_there_is_no_verdict_to_store(tmp_path):
    assert read_verdict(tmp_path, "vox-lane") is None


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
