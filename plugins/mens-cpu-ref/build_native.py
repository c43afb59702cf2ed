"""Build libvox_cpu in place, into src/mens_cpu_ref, for work on the sources without installing.

    python plugins/mens-cpu-ref/build_native.py [extra cmake arguments]

A second run compiles only what changed. Uses the machine's C++ compiler, else `ziglang`'s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "build_support"))

from native_compiler import compiler_environment  # noqa: E402


def main() -> int:
    """Configure and build; return the exit status."""
    build = HERE / "build" / "native"
    build.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **compiler_environment(build)}
    cmake = shutil.which(
        "cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )
    if cmake is None:
        sys.stderr.write(
            "error: cmake is not installed; nothing was built. Run: python -m pip install cmake ninja\n"
        )
        return 2
    output = f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={HERE / 'src' / 'mens_cpu_ref'}"
    commands = (
        [cmake, "-S", str(HERE / "native"), "-B", str(build), output, *sys.argv[1:]],
        [cmake, "--build", str(build), "--parallel", str(os.cpu_count() or 1)],
    )
    for command in commands:
        done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stdout)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
