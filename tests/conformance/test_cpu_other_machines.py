"""The native library on another architecture: cross-compiled with zig, run under qemu."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess

import pytest

from conformance.capture_model import record_answer, record_demo
from conformance.emulated import BUILDS, NATIVE, build, build_arm, missing_for_arm
from conformance.lanes_table import apart, shown
from fixtures.demo_model import demo_gguf
from lanes.tiny_models import GEMMA3, QWEN3, write_model
from mens_core.conformance.inputs import floats, put, weight
from mens_cpu_ref.capture import Capture, CapturingOps

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def arm():
    """How to run an aarch64 program: the emulator and a folder with the programs."""
    if missing := missing_for_arm():
        pytest.skip(f"aarch64 is not checked: {' and '.join(missing)} not found")
    return build_arm()


@pytest.fixture(scope="module")
def here():
    """This machine's programs."""
    programs = build(BUILDS / "here")
    return lambda *command: [programs.with_name(command[0]), *command[1:]]


def run(command, status=0):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def digests_here(library, here):
    return run(here("vox_parity")).stdout


@pytest.mark.parametrize("isa", ["neon", "neon_dot"])
def test_aarch64_gives_the_bytes_of_this_machine(arm, digests_here, isa):
    """Every line is the digest of one operator's outputs; the reference is compared on the way."""
    done = run(arm("vox_parity", isa))
    assert done.stderr == f"instruction set: {isa}\n"
    assert done.stdout == digests_here


def test_every_operator_is_in_the_comparison(digests_here):
    """All that the native library exports for a model's steps."""
    headers = "".join(file.read_text() for file in sorted(NATIVE.glob("*abi.h")))
    operators = set(re.findall(r"VOX_API int64_t prefix##_(\w+)\(", headers))
    source = (NATIVE / "parity/parity.cpp").read_text()
    unused = {
        name for name in operators if not re.search(rf"\bvox_{name}\b|COMPARE\([^;]*?\b{name},", source)
    }
    assert not unused
    assert len(digests_here.splitlines()) > 70


@pytest.mark.parametrize("cpu, isa", [("cortex-a57", "neon"), ("max", "neon_dot")])
def test_the_best_instruction_set_is_chosen(arm, cpu, isa):
    """A Cortex-A57 has no integer dot product; asking for it is refused, not an illegal instruction."""
    assert run(arm("vox_parity", cpu=cpu)).stderr == f"instruction set: {isa}\n"
    if isa == "neon":
        assert "not here" in run(arm("vox_parity", "neon_dot", cpu=cpu), status=2).stderr


def test_the_excluded_interval_just_below_the_smallest_normal(arm, here, library):
    """Arm looks for a tiny result before it rounds, x86 after: the one difference, outside the claim."""
    assert run(arm("vox_parity", "interval")).stdout == "kernel 00000000, reference 00000000\n"
    if platform.machine() in ("x86_64", "AMD64"):
        assert run(here("vox_parity", "interval")).stdout == "kernel 00800000, reference 00800000\n"


# --- whole models ------------------------------------------------------------------------------

ON_X86 = ("avx2", "avx512", "reference")


def can_run(here, isa):
    """Whether this machine has an instruction set; the programs say so."""
    return subprocess.run(here("vox_parity", isa), capture_output=True).returncode != 2


def recomputed(command):
    """What a recompute prints, with the number of operators that differ checked to be none."""
    done = run(command)
    assert re.search(r"^\d+ calls, 0 differ from the capture$", done.stdout, re.MULTILINE), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def demo_capture(library, tmp_path_factory):
    demo_gguf()
    folder = tmp_path_factory.mktemp("demo")
    tokens = record_demo(folder)
    assert tokens == [506, 5279, 529, 506]  # " the capital of the"
    yield folder, tokens
    (folder / "data").unlink()


@pytest.mark.real_model
@pytest.mark.parametrize("isa", ["avx2", "avx512", "reference", "neon", "neon_dot"])
def test_the_demo_model_on_every_instruction_set(request, here, demo_capture, isa):
    """Prompt of 6 tokens, 4 more: every operator's bytes, and so logits and tokens, are those captured."""
    folder, tokens = demo_capture
    if isa in ON_X86:
        if isa != "reference" and not can_run(here, isa):
            pytest.skip(f"this machine has no {isa}")
        found = recomputed(here("vox_recompute", folder, isa))
    else:
        found = recomputed(request.getfixturevalue("arm")("vox_recompute", folder, isa))
    print(f"{isa}:\n{found}")
    assert [int(token) for token in re.findall(r"^token/\d+ \w+ (\d+)$", found, re.MULTILINE)] == tokens
    assert len(set(re.findall(r"^logits/\d+ (\w+)$", found, re.MULTILINE))) == len(tokens)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def tiny_capture(library, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    config = {"qwen3": QWEN3, "gemma3": GEMMA3}[request.param]
    record_answer(folder, write_model(folder / "model", config), list(range(5, 45)), tokens=3)
    return folder


def test_small_models_of_both_families(request, here, tiny_capture):
    expected = recomputed(here("vox_recompute", tiny_capture, "reference"))
    assert expected == recomputed(here("vox_recompute", tiny_capture))
    assert expected == recomputed(request.getfixturevalue("arm")("vox_recompute", tiny_capture))


def copy_with(capture, target, script=None, data=None):
    target.mkdir()
    (target / "script").write_text(script or (capture / "script").read_text())
    (target / "data").write_bytes(data or (capture / "data").read_bytes())
    return target


def test_the_first_operator_that_differs_is_named(here, tiny_capture, tmp_path):
    """A weight with one bit changed: what is computed from it is no longer what was captured."""
    script = (tiny_capture / "script").read_text()
    weight = [line.split() for line in script.splitlines() if line.startswith("weight")][2]
    data = bytearray((tiny_capture / "data").read_bytes())
    data[int(weight[6]) + 1] ^= 0x40
    changed = copy_with(tiny_capture, tmp_path / "weight", data=bytes(data))
    done = run(here("vox_recompute", changed), status=1)
    first = next(
        line for line in script.splitlines() if f" {weight[1]} " in line and line.startswith("linear")
    )
    calls = [
        line
        for line in script.splitlines()
        if line.split()[0] not in ("data", "weight", "show", "vox-capture")
    ]
    assert done.stderr.splitlines()[1] == f"differs: call {calls.index(first) + 1}, linear (code 0)"


def test_a_damaged_capture_is_refused(here, tiny_capture, tmp_path):
    script = (tiny_capture / "script").read_text()
    bad = {
        "other version": script.replace("vox-capture 1", "vox-capture 2"),
        "no calls": "vox-capture 1\n",
        "unknown operator": script.replace("\nrope ", "\nrotate ", 1),
        "beyond the end": re.sub(r"(?m)^(data \d+) \d+", r"\1 999999999", script, count=1),
    }
    for name, text in bad.items():
        assert text != script
        done = run(here("vox_recompute", copy_with(tiny_capture, tmp_path / name, text)), status=2)
        assert done.stderr.splitlines()[-1].startswith("error: "), name
    assert "can't be read" in run(here("vox_recompute", tmp_path / "nowhere"), status=2).stderr


def test_what_is_shown_is_sha256(here, tiny_capture, tmp_path):
    """Of every length about a block's end: certificates hold the same digests."""
    sizes = [1, 55, 56, 57, 63, 64, 65, 119, 120, 128, 1000]
    lines = [f"data {10**9 + size} {size} {size}\nshow size/{size} {10**9 + size}\n" for size in sizes]
    script = (tiny_capture / "script").read_text() + "".join(lines)
    made = recomputed(here("vox_recompute", copy_with(tiny_capture, tmp_path / "sizes", script)))
    data = (tiny_capture / "data").read_bytes()
    found = dict(re.findall(r"^size/(\d+) (\w+)$", made, re.MULTILINE))
    assert found == {str(size): hashlib.sha256(data[size : 2 * size]).hexdigest() for size in sizes}


def test_the_table_of_lanes_names_whoever_differs():
    right = [("a", 1, "f" * 64, (1, 2)), ("b", 1, "f" * 64, (1, 2)), ("a", 2, "e" * 64, (3,))]
    assert apart(right) == []
    wrong = [*right, ("b", 2, "d" * 64, (3,)), ("c", 1, "f" * 64, (1,))]
    assert apart(wrong) == ["b on prompt 2, from a: logits", "c on prompt 1, from a: tokens"]


def test_the_table_reads_what_a_recompute_shows(here, tiny_capture):
    logits, tokens = shown(recomputed(here("vox_recompute", tiny_capture)))
    assert (len(logits), len(tokens)) == (64, 3)


def test_matrices_that_lie_one_after_the_other_are_two(library, here, tmp_path):
    """Of one format and width, packed without a gap: the second is no further piece of the first."""
    capture = Capture(library.kernels, tmp_path)
    ops = CapturingOps(capture)
    matrices = [ops.load_matrix(weight("q4_k", sample, 64, 256)) for sample in range(3)]
    assert matrices[0].address + matrices[0].packed.nbytes == matrices[1].address
    for matrix in matrices:
        y = ops.linear(put(ops, floats(9, 2, 256)), matrix, name="y")
        capture.show("y", ops.to_host(y))
    capture.close()
    made = re.findall(r"^y (\w+)$", recomputed(here("vox_recompute", tmp_path)), re.MULTILINE)
    assert len(set(made)) == 3
