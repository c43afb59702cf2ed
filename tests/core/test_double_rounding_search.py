"""The search for operands whose results an fma made of float64 changes (docs/numerics.md, 15), in short."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "plugins/mens-core/tools/double_rounding.cpp"
INCLUDED = (ROOT / "plugins/mens-core/src/mens_core/kernels", ROOT / "plugins/mens-cpu-ref/native")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-frounding-math"]
FUNCTIONS = ("exp", "log", "silu", "gelu", "tanh", "silu_slope", "gelu_slope", "tanh_slope")


@pytest.fixture(scope="module")
def compiler():
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("needs g++ or clang++")
    return found


@pytest.fixture(scope="module")
def build(compiler, tmp_path_factory):
    """Compiles the program's text, changed or not; returns what runs it."""
    folder = tmp_path_factory.mktemp("search")
    machine = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    includes = [part for path in INCLUDED for part in ("-I", str(path))]

    def make(name, text):
        source = folder / f"{name}.cpp"
        source.write_text(text, "utf-8")
        program = folder / name
        subprocess.run([compiler, *FLAGS, machine, *includes, str(source), "-o", str(program)], check=True)
        return lambda *given: subprocess.run(
            [program, *given], capture_output=True, text=True, check=False, timeout=60
        )

    return make


def test_it_tries_every_function_and_finds_none_around_10(build):
    """Where 1 / (1 + exp(88)) is flushed: a compiler that folds it without made all of them differ."""
    done = build("whole", PROGRAM.read_text("utf-8"))("41200000", "4123FFFF")
    assert done.returncode == 0, done.stdout + done.stderr
    tried = [line.split(":")[0] for line in done.stdout.splitlines() if "tried 262144;" in line]
    positive = [f"{name} 41200000..4123FFFF" for name in FUNCTIONS]
    negative = [f"{name} C1200000..C123FFFF" for name in FUNCTIONS if name != "log"]
    assert sorted(tried) == sorted(positive + negative)


def test_it_tells_of_what_differs_and_of_a_build_that_can_t_tell(build):
    text = PROGRAM.read_text("utf-8")
    rounded = "(float)((double)a.value * (double)b.value + (double)c.value)"
    assert text.count(rounded) == 1
    # One more rounding, of the product: the middle and a great deal more differ.
    unfused = build("unfused", text.replace(rounded, "(float)(double)(a.value * b.value) + c.value"))
    done = unfused("3F800000", "3F800FFF", "exp")
    assert done.returncode == 1
    assert "exp of 3F80" in done.stdout
    blind = build("blind", text.replace(rounded, "f_fma(a.value, b.value, c.value)"))
    done = blind("3F800000", "3F800FFF", "exp")
    assert (done.returncode, done.stderr) == (
        2,
        "the middle at 3F800800 was not seen; nothing was searched\n",
    )
