"""The plugins of docs/writing-a-plugin.md, taken from the page's own code blocks: they do what it says."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from fixtures.installed_lane import InstalledLane, install_lane
from lanes.every_lane import make_lane
from vox_host.conformance.suite import known_groups

PAGE = (Path(__file__).parents[3] / "docs/writing-a-plugin.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Written:
    """A plugin as a reader copies it."""

    plugin_id: str
    entry_point: str
    manifest: str
    code: str


def written(plugin_id: str) -> Written:
    """The three files of a plugin, each a block under its name."""
    files = dict(re.findall(r"^`([\w./-]+)`\n\n```\w+\n(.*?)^```$", _section_of(plugin_id), re.M | re.S))
    package = plugin_id.replace("-", "_")
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["name"] == plugin_id
    return Written(
        plugin_id,
        project["project"]["entry-points"]["vox_host.backends"][plugin_id],
        files[f"src/{package}/Plugin.toml"],
        files[f"src/{package}/__init__.py"],
    )


def _section_of(plugin_id: str) -> str:
    sections = [s for s in re.split(r"^## ", PAGE, flags=re.M) if f'name = "{plugin_id}"' in s]
    assert len(sections) == 1
    return sections[0]


def install(home: Path, plugin: Written, code: str | None = None) -> InstalledLane:
    return install_lane(home, plugin.plugin_id, code or plugin.code, plugin.manifest, plugin.entry_point)


def check(lane: InstalledLane, *arguments: str) -> tuple[int, dict]:
    done = lane.run("plugin", "check", lane.plugin_id, "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(autouse=True, scope="module")
def _native(request):
    make_lane("mens-cpu-ref", request.config)


def test_the_toy_lane_passes(tmp_path):
    status, facts = check(
        install(tmp_path / "home", written("vox-toy-lane")),
        *("--only", "operators", "--only", "forward", "--only", "evaluate"),
    )
    assert (status, facts["verdict"], facts["failed"]) == (0, "bitwise", 0)


@pytest.mark.parametrize(
    ("right", "wrong", "operator"),
    [
        ("made = flushed(a.values + b.values)", "made = a.values + b.values", "add"),
        (
            "x = flushed(np.where(x > 0, x / repetition, x * repetition))\n",
            "x = np.where(x > 0, x / repetition, x.astype(np.float64) * repetition)\n",
            "penalise",
        ),
    ],
)
def test_the_mistakes_that_the_page_proposes_are_named(right, wrong, operator, tmp_path):
    plugin = written("vox-toy-lane")
    assert right in plugin.code
    lane = install(tmp_path / "home", plugin, plugin.code.replace(right, wrong))
    status, facts = check(lane, "--only", "operators")
    assert (status, facts["first_difference"]["operator"]) == (6, operator)


@pytest.mark.parametrize(("planted", "failed"), [("", False), ("double_rounded as ", True)])
def test_the_linear_that_the_page_replaces_is_right_and_its_fma_has_to_be_exact(planted, failed, tmp_path):
    plugin = written("vox-toy-lane")
    (block,) = re.findall(r"^```python\n(from mens_core.conformance.numpy_fma.*?)^```$", PAGE, re.M | re.S)
    code = plugin.code.replace("def backend():", f"{block}\n\ndef backend():").replace(
        "ToyOps()", "WithLinear()"
    )
    code = code.replace("self_test(ToyOps)", "self_test(WithLinear)")
    lane = install(tmp_path / "home", plugin, code.replace("import fma,", f"import {planted}fma,"))
    status, facts = check(lane, "--only", "operators")
    assert (status, facts["failed"] > 0) == (6 if failed else 0, failed)
    if failed:
        assert facts["first_difference"]["operator"] == "linear"


def test_lane_options_are_refused_by_the_template(tmp_path):
    lane = install(tmp_path / "home", written("vox-toy-lane"))
    done = lane.run("plugin", "check", "vox-toy-lane", "--only", "operators", "--lane-option", "tile=8")
    # The user's mistake, and no verdict on the plugin.
    assert done.returncode == 2
    assert "error[lane-option]: no lane option is called 'tile'" in done.stderr
    assert done.stdout == ""


def test_the_output_that_the_page_shows_has_every_group():
    shown = re.findall(
        r"^([\w-]+) +(?:bitwise|passed|skipped) +\d+ +0(?: |$)", _section_of("vox-toy-lane"), re.M
    )
    assert shown == list(known_groups())
    described = re.findall(
        r"^\| ([\w-]+) \|", PAGE.split("## What `plugin check` asks")[1].split("\n## ")[0], re.M
    )
    assert described[1:] == list(known_groups())


def test_the_echo_passes_protocol_and_lifecycle(tmp_path):
    lane = install(tmp_path / "home", written("vox-echo"))
    status, facts = check(lane, "--only", "protocol", "--only", "lifecycle", "--only", "integrity")
    wrong = [r for group in facts["groups"] for r in group["results"] if r["status"] == "failed"]
    assert (status, wrong) == (0, [])


def test_the_echo_is_an_echo(tmp_path):
    status, facts = check(install(tmp_path / "home", written("vox-echo")), "--only", "generation")
    assert (status, facts["verdict"]) == (6, "failed")
    assert facts["first_difference"]["operator"] == "token"
