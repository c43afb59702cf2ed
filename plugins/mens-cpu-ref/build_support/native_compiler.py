"""Find a C++ compiler for the native library, or put the one in the `ziglang` wheel in its place.

Used by the build backend beside this file and by `build_native.py`.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
from pathlib import Path

__all__ = ["ZIG_REQUIREMENT", "compiler_environment", "has_compiler"]

ZIG_REQUIREMENT = "ziglang>=0.13"

_CANDIDATES = ("c++", "g++", "clang++")


def has_compiler() -> bool:
    """Whether CMake will find a C++ compiler of its own accord."""
    named = os.environ.get("CXX")
    return shutil.which(named.split()[0]) is not None if named else any(map(shutil.which, _CANDIDATES))


def compiler_environment(folder: Path) -> dict[str, str]:
    """Return what to add to the environment of CMake: nothing where there is a compiler.

    Otherwise CXX names a script, written into `folder`, that calls zig's clang.
    """
    if has_compiler():
        return {}
    script = folder / "zig-c++"
    # Without a named CPU zig compiles for the machine it runs on; the library chooses at run time.
    cpu = "x86_64" if platform.machine() in ("x86_64", "AMD64") else "generic"
    script.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -mcpu={cpu} "$@"\n', encoding="utf-8"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return {"CXX": str(script)}
