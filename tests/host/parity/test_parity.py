"""`vox-host parity` as a user runs it: equal lanes, a broken one, and certificates from elsewhere."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest
import typer

from fixtures.installed_lane import InstalledLane, install_lane
from fixtures.tiny_home import add_tiny_model
from lanes.every_lane import make_lane
from mens_cpu_ref.library import load_library
from vox_host import cli
from vox_host.cli.report_file import show_and_write
from vox_host.errors import UsageError
from vox_host.execution import execution_of
from vox_host.parity.certificate import signed
from vox_host.parity.requests import Asked
from vox_host.parity.training import EXAMPLE_TOKENS, Taken, ask_steps, first_step_apart
from vox_plugin_api.messages import SamplingParams

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
        if name == "played":
            lane.facts = lambda: {"device": "the CPU in a GPU's place"}
            return lane
        return PLANTED[name].plant(lane) if name else lane

    info = BackendInfo("vox-lane", "1.0.0", "cpu", ("canonical",), ("generate", "evaluate", "trace"))
    return MensBackend(info, make_lane, lambda: self_test(make_lane), lane_options={"planted": ()})
"""

TRAINER = (
    CODE.replace("mens_cpu_ref.lane import CpuOps", "mens_cpu_ref.training_lane import CpuTrainingOps")
    .replace("CpuOps(library.kernels)", "CpuTrainingOps(library)")
    .replace('"trace"))', '"trace", "train"))')
    .replace("vox-lane", "vox-trainer")
)


@pytest.fixture(scope="module")
def lane(request, tmp_path_factory) -> InstalledLane:
    make_lane("mens-cpu-ref", request.config)
    home = tmp_path_factory.mktemp("parity") / "home"
    add_tiny_model(home)
    install_lane(
        home,
        "mens-cpu-ref",
        "from mens_cpu_ref.plugin import backend\n",
        capabilities='"generate", "evaluate", "trace", "train", "adapters"',
    )
    return install_lane(home, "vox-lane", CODE)


def has_avx512() -> bool:
    library = load_library()
    try:
        library.force_isa("avx512")
    except ValueError:
        return False
    library.force_isa("")
    return True


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


def test_the_text_says_where_each_side_ran(lane, tmp_path):
    """Also of one whose manifest states no label, though its facts say what its device is."""
    made = tmp_path / "made.json"
    done = lane.run(
        "parity", "--model", "gemma3", "--max-tokens", "1", "--out", str(made),
        "--plugin", "mens-cpu-ref", "--plugin", "vox-lane:planted=played",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    label = "lane cpu (executed on the CPU in a GPU's place)"
    sides = [line for line in done.stdout.splitlines() if "transcript sha256:" in line]
    assert sides[0].startswith("mens-cpu-ref: lane cpu, transcript")
    assert sides[1].startswith(f"vox-lane:planted=played: {label}, transcript")
    verdict = next(line for line in done.stdout.splitlines() if line.startswith("bitwise: "))
    assert f"2 sides (lane cpu, {label})" in verdict
    lanes = [side["lane"] for side in json.loads(made.read_text())["sides"]]
    assert lanes == ["cpu", label.removeprefix("lane ")]


def test_a_check_labels_by_the_facts_too(lane):
    done = lane.run(
        "plugin", "check", "vox-lane", "--lane-option", "planted=played", "--only", "evaluate", "--json"
    )
    assert json.loads(done.stdout)["execution"] == "executed on the CPU in a GPU's place", done.stderr


@pytest.mark.parametrize(
    ("stated", "said", "expected"),
    [
        (None, {"lane": {"device": "Apple M2"}}, None),
        (None, None, None),
        (None, {"lane": "not a table"}, None),
        (None, {"lane": {"device": "the CPU in a GPU's place"}}, "executed on the CPU in a GPU's place"),
        (None, {"lane": {"execution": "on a CPU", "device": "Apple M2"}}, "on a CPU"),
        ("as stated", {"lane": {"execution": "on a CPU"}}, "as stated"),
    ],
)
def test_the_label_is_the_manifest_s_or_what_the_facts_come_to(stated, said, expected):
    assert execution_of(stated, said) == expected


def test_a_certificate_from_elsewhere_is_compared_by_its_hashes(lane, tmp_path):
    elsewhere = tmp_path / "aarch64.json"
    parity(lane, "--plugin", "mens-cpu-ref", "--max-tokens", "3", "--out", elsewhere, status=0)
    ask = ("--plugin", "vox-lane", "--max-tokens", "3", "--against", elsewhere)
    assert parity(lane, *ask, status=0)["verdict"] == "bitwise"

    facts = json.loads(elsewhere.read_text())
    facts["sides"][0]["answers"][1]["token_ids"][2] += 1
    elsewhere.write_text(json.dumps(facts))
    done = lane.run("parity", "--model", "gemma3", *ask)
    assert done.returncode == 4 and "error[certificate-damaged]" in done.stderr
    elsewhere.write_text(json.dumps(signed(facts)))
    (difference,) = parity(lane, *ask, status=6)["differences"]
    assert (difference["request"], difference["what"], difference["position"]) == (2, "token", 2)

    done = lane.run("parity", "--model", "gemma3", *ask[:2], "--max-tokens", "4", "--against", elsewhere)
    assert done.returncode == 2
    assert "it was made with another --max-tokens" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--plugin", "mens-cpu-ref:isa=sse9"), 2, "lane-option"),
        (("--plugin", "mens-cpu-ref:colour=red"), 2, "lane-option"),
        (("--plugin", "mens-cpu-ref:isa"), 2, "ID:NAME=VALUE"),
        (("--plugin", "nobody"), 3, "nobody"),
        (("--plugin", "vox-lane", "--prompts", "/no/such/file"), 2, "No such file"),
    ],
)
def test_what_can_t_be_compared_is_refused(lane, arguments, status, said):
    done = lane.run("parity", "--model", "gemma3", *arguments)
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_options_of_every_side_are_looked_at_before_the_first_one_answers(lane):
    sides = ("--plugin", "vox-lane", "--plugin", "mens-cpu-ref:isa=sse9")
    done = lane.run("parity", "--model", "gemma3", *sides)
    assert done.returncode == 2 and "lane-option" in done.stderr, done.stderr
    assert "vox-lane: " not in done.stderr


# --- steps of training ---------------------------------------------------------------------------


def test_steps_of_training_are_the_same_bytes_on_every_way(lane, tmp_path):
    ways = ["isa=reference", "isa=avx2", *(["isa=avx512"] if has_avx512() else [])]
    plugins = [part for way in ways for part in ("--plugin", f"mens-cpu-ref:{way}")]
    ask = ("--max-tokens", "2", "--seed", "3", "--train-steps", "3")
    out = tmp_path / "certificate.json"
    facts = parity(lane, *plugins, *ask, "--out", out, status=0)
    assert (facts["verdict"], facts["training_differences"]) == ("bitwise", [])
    taken = facts["sides"][0]["taken"]
    assert all(side["taken"] == taken for side in facts["sides"])
    assert [step["step"] for step in taken] == [0, 1, 2, 3]
    # Each step moves: values that never change could not differ.
    for field in ("loss", "gradient_norm", "learning_rate"):
        assert len({step[field] for step in taken[1:]}) > 1, field
    assert len({step["adapter_digest"] for step in taken}) == 4

    one = ("--plugin", "mens-cpu-ref:isa=avx2")
    assert parity(lane, *one, *ask, "--against", out, status=0)["verdict"] == "bitwise"
    other_seed = lane.run(
        "parity", "--model", "gemma3", *one, *ask[:3], "4", *ask[4:], "--against", out
    )  # fmt: skip
    assert other_seed.returncode == 2 and "made with another --seed;" in other_seed.stderr
    left = lane.run("parity", "--model", "gemma3", *one, *ask[:4], "--against", out)
    assert left.returncode == 0, left.stderr
    assert "warning: training (3 in certificate.json) is left out" in left.stderr
    assert "0 steps of training, training (3 in certificate.json) left out" in left.stdout
    facts["sides"][1]["taken"][2]["gradient_norm"] = "3f800000"
    out.write_text(json.dumps(signed(facts)))
    (difference,) = parity(lane, *one, *ask, "--against", out, status=6)["training_differences"]
    assert (difference["step"], difference["what"]) == (2, "gradient_norm")
    assert (difference["found"], difference["operator"]) == ("3f800000", None)


def test_a_certificate_without_steps_is_not_compared_with_steps(lane, tmp_path):
    out = tmp_path / "certificate.json"
    ask = ("--plugin", "mens-cpu-ref", "--max-tokens", "2")
    parity(lane, *ask, "--out", out, status=0)
    done = lane.run("parity", "--model", "gemma3", *ask, "--train-steps", "1", "--against", out)
    assert done.returncode == 2
    assert "it holds no training, and --train-steps asks for some" in done.stderr


def test_a_wrong_gradient_parts_at_a_step_and_an_operator(lane):
    install_lane(
        lane.home,
        "vox-trainer",
        TRAINER,
        capabilities='"generate", "evaluate", "trace", "train"',
    )
    ask = ("--max-tokens", "2", "--train-steps", "2", "--plugin", "mens-cpu-ref", "--plugin")
    assert parity(lane, *ask, "vox-trainer", status=0)["verdict"] == "bitwise"
    facts = parity(lane, *ask, "vox-trainer:planted=wrong-gradient", status=6)
    assert (facts["verdict"], facts["differences"]) == ("failed", [])
    (difference,) = facts["training_differences"]
    assert difference["side"] == "vox-trainer:planted=wrong-gradient"
    # The loss is of before the step, so it is the forward's and right.
    assert (difference["step"], difference["what"]) == (1, "gradient_norm")
    assert (difference["operator"], difference["case"]) == ("rms_norm_backward", "rms_norm_backward")
    assert difference["element"] is not None
    assert difference["operator_expected"] != difference["operator_found"]
    printed = lane.run("parity", "--model", "gemma3", *ask, "vox-trainer:planted=wrong-gradient").stdout
    assert "first operator rms_norm_backward" in " ".join(printed.split())


def test_a_plugin_that_does_not_train_is_refused_before_anything_runs(lane):
    ask = ("--plugin", "mens-cpu-ref", "--plugin", "vox-lane", "--train-steps", "1")
    done = lane.run("parity", "--model", "gemma3", *ask)
    assert done.returncode == 3
    assert "\"vox-lane\" has no capability 'train', which --train-steps needs" in done.stderr
    assert "nothing was started" in done.stderr
    assert "requests" not in done.stderr + done.stdout


def test_prompts_of_one_token_train_nothing(lane, tmp_path):
    asked = [Asked(1, (5,), 1, SamplingParams(), ())]
    with pytest.raises(UsageError, match="no prompt has two tokens"):
        ask_steps(asked, 1, 0)
    long = Asked(2, tuple(range(200)), 1, SamplingParams(), ())
    (example,) = ask_steps([*asked, long], 1, 0).examples
    assert (len(example.token_ids), sum(example.loss_mask)) == (EXAMPLE_TOKENS, EXAMPLE_TOKENS - 1)


@pytest.mark.parametrize("field", [f for f in Taken.__dataclass_fields__ if f != "step"])
def test_every_value_of_a_step_is_compared(field):
    right = (Taken(0, "", "", "", 0, "a"), Taken(1, "b", "c", "d", 5, "e"), Taken(2, "f", "g", "h", 5, "i"))
    assert first_step_apart(right, right, side="x", against="y") is None
    wrong = (*right[:2], replace(right[2], **{field: 6 if field == "trained_tokens" else "z"}))
    parting = first_step_apart(right, wrong, side="x", against="y")
    assert parting is not None and (parting.step, parting.what) == (2, field)
    short = first_step_apart(right, right[:2], side="x", against="y")
    assert short is not None and (short.what, short.expected, short.found) == ("steps", "3", "2")


# --- files that a user names -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "file", "said"),
    [
        ("--prompts", "/dev/zero", "this is a device or socket"),
        ("--against", "/dev/zero", "this is a device or socket"),
        ("--prompts", "pipe", "this is a pipe"),
        ("--against", "pipe", "this is a pipe"),
        ("--against", "deep.json", "nested too deeply"),
        ("--prompts", "huge", "longer than 64 MiB"),
        ("--out", "mine.txt", "exists and is no whole record or certificate"),
        ("--out", "to-nothing", "this is a symbolic link"),
        ("--out", "to-itself", "this is a symbolic link"),
        ("--out", "to-mine", "this is a symbolic link"),
        ("--out", "looks.json", "exists and is no whole record or certificate"),
        ("--kv-cache-mib", str(10**22), "more memory than this machine has"),
        ("--prompts", "long.txt", "prompt 2 has"),
    ],
)  # fmt: skip
def test_what_a_user_names_is_refused_before_anything_runs(
    lane, tmp_path, monkeypatch, capsys, option, file, said
):
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep.json").write_bytes(b"[" * 100_000)
    (tmp_path / "mine.txt").write_text("mine")
    looks = '{"certificate": 2, "verdict": "mine", "sides": []}'
    (tmp_path / "looks.json").write_text(looks)
    links = {"to-nothing": "absent", "to-itself": "to-itself", "to-mine": "mine.txt"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(target)
    (tmp_path / "long.txt").write_text("short\n" + "a b c d " * 20_000)
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate((64 << 20) + 1)
    monkeypatch.chdir(tmp_path)
    status = cli.run(["parity", "--model", "gemma3", "--plugin", "mens-cpu-ref", option, file])
    told = capsys.readouterr().err
    assert (status, said in told, "nothing was started" in told) == (2, True, True), told
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "looks.json").read_text() == looks
    assert {link: os.readlink(tmp_path / link) for link in links} == links
    assert "error[bug]" not in told


def test_a_full_disk_costs_the_file_and_not_the_verdict(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "keep.json"
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(UsageError, match=f"--out {out} can't be written: No space left") as caught:
        show_and_write(out, {"verdict": "bitwise"}, lambda: print("bitwise: shown"), as_json=False)
    assert caught.value.code == "out-unwritten"
    assert capsys.readouterr().out == "bitwise: shown\n"
    with pytest.raises(typer.Exit) as ended:
        show_and_write(out, {"verdict": "bitwise"}, lambda: None, as_json=True)
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert (ended.value.exit_code, facts["verdict"], facts["error"]["code"]) == (
        2,
        "bitwise",
        "out-unwritten",
    )
    assert str(out) in printed.err and list(tmp_path.iterdir()) == []
