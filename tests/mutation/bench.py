"""Build a mutant, as little of it as needed, and have it judged.

Kernels are compiled for one instruction set at -O1. A mutant whose object files are those of the
unchanged source, byte for byte, is no mutant: its line is not compiled here, or means the same.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mutation.rules import Mutant

__all__ = ["Bench", "Outcome"]

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "plugins/mens-cpu-ref/native"
KERNELS = ROOT / "plugins/mens-core/src/mens_core/kernels"
CORE = ROOT / "plugins/mens-core/src/mens_core"
SOURCES = ("plugin-api/src", "host/src", "plugins/mens-core/src", "plugins/mens-cpu-ref/src")
_V3 = ["-mavx", "-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mlzcnt", "-mmovbe", "-mpopcnt"]
_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-O1",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-frounding-math",
    "-w",
    "-pthread",
]
_AVX2 = [*_V3, "-DVOX_ISA=avx2", "-DVOX_ISA_AVX2", "-fno-exceptions", "-fno-rtti"]
_AVX512 = [
    *_V3,
    *["-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
    *["-DVOX_ISA=avx512", "-DVOX_ISA_AVX512", "-fno-exceptions", "-fno-rtti"],
]
_JUDGE_S = 600  # on a machine that may be busy

State = Literal["killed", "survived", "same code", "not built"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a mutant."""

    mutant: Mutant
    state: State
    by: str
    """The vector that noticed; how it died; or why it was not built."""


@dataclass
class Bench:
    """A folder with the unchanged objects, and copies that are changed one at a time."""

    folder: Path
    compiler: str = os.environ.get("CXX", "g++")
    objects: dict[str, bytes] = field(default_factory=dict)

    def prepare(self) -> None:
        """Compile the unchanged sources and see them pass.

        Raises:
            RuntimeError: they don't; then no mutant means anything.
        """
        self._copy_sources()
        for unit in self._units():
            problem = self._compile(unit)
            if problem:
                raise RuntimeError(problem)
            self.objects[unit] = (self.folder / f"{unit}.o").read_bytes()
            if unit.endswith("_kernels"):
                # Linked, never run and never mutated: the library names both.
                self._compile(unit, _AVX512, f"{unit}-avx512")
        state, by = self._judge(self._link(), CORE.parent)
        if state != "survived":
            raise RuntimeError(f"the unchanged sources do not pass: {by}")

    def try_mutant(self, mutant: Mutant) -> Outcome:
        """Build and judge one; the folder is as before afterwards."""
        if mutant.file.endswith(".py"):
            return self._try_python(mutant)
        path = self._copy_of(mutant.file)
        text = path.read_text()
        path.write_text(mutant.apply(text))
        try:
            changed = []
            for unit in self._units():
                if path.name not in self._includes(unit):
                    continue
                problem = self._compile(unit)
                if problem:
                    return Outcome(mutant, "not built", problem.splitlines()[0][:120])
                if (self.folder / f"{unit}.o").read_bytes() != self.objects[unit]:
                    changed.append(unit)
            if not changed:
                return Outcome(mutant, "same code", "")
            return Outcome(mutant, *self._judge(self._link(), CORE.parent))
        finally:
            path.write_text(text)
            for unit, content in self.objects.items():
                (self.folder / f"{unit}.o").write_bytes(content)

    # --- Python ----------------------------------------------------------------------------

    def _try_python(self, mutant: Mutant) -> Outcome:
        path = self.folder / "python/mens_core" / mutant.file
        text = path.read_text()
        path.write_text(mutant.apply(text))
        try:
            compile(path.read_text(), mutant.file, "exec")
            return Outcome(mutant, *self._judge(self._link(), self.folder / "python"))
        except SyntaxError as error:
            return Outcome(mutant, "not built", str(error))
        finally:
            path.write_text(text)

    # --- compiling -------------------------------------------------------------------------

    def _copy_sources(self) -> None:
        shutil.copytree(NATIVE, self.folder / "native")
        shutil.copytree(KERNELS, self.folder / "kernels")
        ignore = shutil.ignore_patterns("__pycache__", "kernels")
        shutil.copytree(CORE, self.folder / "python/mens_core", ignore=ignore)

    def _copy_of(self, file: str) -> Path:
        return self.folder / ("kernels" if file.endswith(".h") else "native") / file

    def _units(self) -> list[str]:
        return sorted(path.stem for path in (self.folder / "native").glob("*.cpp"))

    def _flags(self, unit: str) -> list[str]:
        flags = [*_FLAGS, f"-I{self.folder / 'kernels'}"]
        if unit.endswith("_kernels"):
            return [*flags, *_AVX2]
        if unit.endswith("reference"):
            return [*_FLAGS, *_V3]  # no include path to the kernels
        return [*flags, "-DVOX_HAS_AVX2", "-DVOX_HAS_AVX512"]

    def _compile(self, unit: str, isa: list[str] | None = None, name: str = "") -> str:
        source, target = self.folder / "native" / f"{unit}.cpp", self.folder / f"{name or unit}.o"
        flags = self._flags(unit) if isa is None else [*_FLAGS, f"-I{self.folder / 'kernels'}", *isa]
        command = [self.compiler, *flags, "-c", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stderr or "the compiler failed"

    def _includes(self, unit: str) -> str:
        source = self.folder / "native" / f"{unit}.cpp"
        command = [self.compiler, *self._flags(unit), "-MM", str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _link(self) -> Path:
        library = self.folder / "libvox_cpu.so"
        objects = sorted(str(path) for path in self.folder.glob("*.o"))
        command = [self.compiler, "-shared", "-pthread", *objects, "-o", str(library)]
        subprocess.run(command, capture_output=True, check=True)
        return library

    # --- judging ---------------------------------------------------------------------------

    def _judge(self, library: Path, core: Path) -> tuple[State, str]:
        path = [str(core), *(str(ROOT / source) for source in SOURCES)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, str(Path(__file__).with_name("judge.py")), str(library)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_JUDGE_S
            )
        except subprocess.TimeoutExpired:
            return "killed", "it does not end"
        if done.returncode == 0:
            return "survived", ""
        if done.returncode == 10:
            return "killed", done.stdout.strip()
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return "killed", f"status {done.returncode}: {last[:100]}"
