"""`vox-host parity` as a user runs it: equal lanes, a broken one, and certificates from elsewhere."""

from __future__ import annotations

import json

import pytest

from fixtures.installed_lane import InstalledLane, install_lane
from fixtures.tiny_home import add_tiny_model
from lanes.every_lane import make_lane

CODE = """
from mens_core.backend import MensBackend
from mens_core.conformance.planted import PLANTED
from mens_core.conformance.quick import self_test
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import load_library
from vox_plugin_api.backend import BackendInfo


def backend():
    library = load_library()
    library.set_threads(1)

    def make_lane(params=None):
        lane = CpuOps(library.kernels)
        name = params.lane_options.get("planted") if params else None
        return PLANTED[name].plant(lane) if name else lane

    info = BackendInfo("vox-lane", "1.0.0", "cpu", ("canonical",), ("generate", "evaluate", "trace"))
    return MensBackend(info, make_lane, lambda: self_test(make_lane))
"""


@pytest.fixture(scope="module")
def lane(request, tmp_path_factory) -> InstalledLane:
    make_lane("mens-cpu-ref", request.config)
    home = tmp_path_factory.mktemp("parity") / "home"
    add_tiny_model(home)
    install_lane(
        home,
        "mens-cpu-ref",
        "from mens_cpu_ref.plugin import backend\n",
        capabilities='"generate", "evaluate", "trace", "train"',
    )
    return install_lane(home, "vox-lane", CODE)


def parity(lane: InstalledLane, *arguments: object, status: int) -> dict:
    done = lane.run("parity", "--model", "gemma3", "--json", *arguments)
    assert done.returncode == status, f"{done.stderr}\n{done.stdout}"
    return json.loads(done.stdout)


def test_two_plugins_and_the_same_one_twice_give_the_same_bytes(lane, tmp_path):
    out = tmp_path / "certificate.json"
    facts = parity(
        lane, "--plugin", "vox-lane", "--plugin", "vox-lane", "--plugin", "mens-cpu-ref",
        "--temperature", "0.9", "--seed", "7", "--out", out, status=0,
    )  # fmt: skip
    assert json.loads(out.read_text()) == facts
    assert (facts["verdict"], facts["differences"], facts["requests"]) == ("bitwise", [], 3)
    assert [side["label"] for side in facts["sides"]] == ["vox-lane", "vox-lane #2", "mens-cpu-ref"]
    assert len({side["transcript_sha256"] for side in facts["sides"]}) == 1
    assert all(len(answer["token_ids"]) > 0 for side in facts["sides"] for answer in side["answers"])
    receipts = [
        json.loads((lane.home / f"plugins/{p}.json").read_text()) for p in ("vox-lane", "mens-cpu-ref")
    ]
    assert {side["plugin_tree_digest"] for side in facts["sides"]} == {r["tree_digest"] for r in receipts}


def test_reference_and_instruction_sets_give_the_same_bytes(lane, tmp_path):
    words = ["mens-cpu-ref:isa=reference", "mens-cpu-ref:isa=avx2", "mens-cpu-ref"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One line.\n\nAnd another, a little longer than the first.\n")
    plugins = [part for word in words for part in ("--plugin", word)]
    facts = parity(lane, *plugins, "--prompts", prompts, "--max-tokens", "6", status=0)
    assert (facts["verdict"], facts["requests"]) == ("bitwise", 2)
    loads = [facts["observation"]["sides"][word]["load"]["lane"]["instruction_set"] for word in words]
    assert loads[:2] == ["reference", "avx2"]


def test_a_broken_lane_parts_at_a_byte_a_request_and_an_operator(lane):
    facts = parity(lane, "--plugin", "vox-lane", "--plugin", "vox-lane:planted=missing-head-norm", status=6)
    assert facts["verdict"] == "failed"
    (difference,) = facts["differences"]
    assert difference["side"] == "vox-lane:planted=missing-head-norm"
    assert (difference["request"], difference["what"]) == (1, "logits")
    assert (difference["operator"], difference["name"]) == ("head_norm", "layers.0.self_attn.q_norm")
    assert difference["byte"] > 0
    assert difference["element"] == 0
    assert difference["expected"] != difference["found"]
    assert len(difference["expected"]) == len(difference["found"]) == 8


def test_bits_that_change_no_token_are_still_a_failure_of_who_promises_bits(lane):
    done = lane.run(
        "parity", "--model", "gemma3", "--max-tokens", "4",
        "--plugin", "vox-lane", "--plugin", "vox-lane:planted=fused-multiply-add",
    )  # fmt: skip
    assert done.returncode == 6
    assert "rope" in done.stdout and "first operator layers.0.self_attn." in done.stdout


def test_a_certificate_from_elsewhere_is_compared_by_its_hashes(lane, tmp_path):
    elsewhere = tmp_path / "aarch64.json"
    parity(lane, "--plugin", "mens-cpu-ref", "--max-tokens", "3", "--out", elsewhere, status=0)
    ask = ("--plugin", "vox-lane", "--max-tokens", "3", "--against", elsewhere)
    assert parity(lane, *ask, status=0)["verdict"] == "bitwise"

    facts = json.loads(elsewhere.read_text())
    facts["sides"][0]["answers"][1]["token_ids"][2] += 1
    elsewhere.write_text(json.dumps(facts))
    (difference,) = parity(lane, *ask, status=6)["differences"]
    assert (difference["request"], difference["what"], difference["position"]) == (2, "token", 2)

    done = lane.run("parity", "--model", "gemma3", *ask[:2], "--max-tokens", "4", "--against", elsewhere)
    assert done.returncode == 2
    assert "another prompts" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--plugin", "mens-cpu-ref:isa=sse9"), 2, "lane-option"),
        (("--plugin", "mens-cpu-ref:colour=red"), 2, "lane-option"),
        (("--plugin", "mens-cpu-ref:isa"), 2, "ID:NAME=VALUE"),
        (("--plugin", "nobody"), 2, "nobody"),
        (("--plugin", "vox-lane", "--prompts", "/no/such/file"), 2, "No such file"),
    ],
)
def test_what_can_t_be_compared_is_refused(lane, arguments, status, said):
    done = lane.run("parity", "--model", "gemma3", *arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
