"""What the compilers of the native library may compute beforehand: nothing whose flush would be lost."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.emulated import NATIVE

_PROGRAM = """
#include <stdio.h>
#include "flush.h"
static float slope(float d, float e) { return 1.0f / d * e; }
int main() {
  volatile float one = 1;
  float bounded = 2;
  {
    vox::FlushScope flush;
    if (one > 0) bounded = slope(1.6e38f, 1.6e38f);
  }
  printf("%g", bounded);
}
"""
"""1 / 1.6e38 is subnormal, so flushed, and the product 0. Folded, it would be about 1."""


@pytest.mark.parametrize("compiler", ["g++", "clang of zig"])
def test_a_subnormal_of_constants_is_flushed_as_any_other(tmp_path, compiler):
    command, known = ["g++"], []
    if shutil.which("g++") is None:
        pytest.skip("there is no g++, which links the program")
    if compiler == "clang of zig":
        if importlib.util.find_spec("ziglang") is None:
            pytest.skip("the ziglang wheel is not here")
        command = [sys.executable, "-m", "ziglang", "c++"]
        # Not tried by CMake, which would link a program first: that takes zig minutes.
        known = ["-DCMAKE_CXX_COMPILER_FORCED=ON", "-DCMAKE_CXX_COMPILER_ID=Clang"]
    flags = _flags_of_the_reference(tmp_path / "build", *known)
    (tmp_path / "fold.cpp").write_text(_PROGRAM)
    made, program = tmp_path / "fold.o", tmp_path / "fold"
    _run(*command, *flags, f"-I{NATIVE}", "-c", tmp_path / "fold.cpp", "-o", made)
    _run("g++", made, "-o", program)
    assert _run(program) == "0"


def _flags_of_the_reference(folder, *options):
    """What CMake compiles the scalar reference with."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    export = "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"
    _run(cmake, "-S", NATIVE, "-B", folder, "-DCMAKE_CXX_COMPILER=g++", export, *options)
    every = json.loads((folder / "compile_commands.json").read_text())
    (unit,) = (each for each in every if each["file"].endswith("/backward_reference.cpp"))
    words = shlex.split(unit["command"])
    return words[1 : words.index("-o")]


def _run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
