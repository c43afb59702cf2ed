"""`vox-host plugin check` where bytes are not all: another suite's plugins, and those that promise none."""

from __future__ import annotations

import pytest

from fixtures.checked_lane import RIGHT, check, cpu_lane
from fixtures.installed_lane import CPU_LANE, install_lane

pytestmark = pytest.mark.usefixtures("native")


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
