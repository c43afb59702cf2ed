"""`vox-host plugin check` on lanes that compute something else: which operator is named."""

from __future__ import annotations

import pytest

from fixtures.checked_lane import RIGHT, check, cpu_lane
from fixtures.installed_lane import CPU_LANE, install_lane
from mens_core.conformance.planted import PLANTED

pytestmark = pytest.mark.usefixtures("native")


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
    assert set(failed) == {"softcap", "softcap/edges", "softcap/flushed", "self-test"}
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
