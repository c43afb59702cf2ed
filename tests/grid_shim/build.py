"""Compiles the grid kernels, in their Metal or CUDA form, as C++ that runs on the CPU.

The text is what the GPU's compiler would get: `grid_source`, preprocessed. Two things are changed in it,
by name: threadgroup memory, and pointers to it, become types that watch it, and a table of the kernels is
added.
Contraction is on unless the text (Metal) or the options (CUDA) switch it off, as on the GPU: decided by the
preprocessed text, where a pragma in a comment or under `#if 0` is gone (`fp_problems`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from mens_core.kernel_source import CUDA_OPTIONS, Target

HERE = Path(__file__).resolve().parent
RUNNER = HERE / "runner.cpp"
MATRICES = HERE / "matrices.cpp"
NATIVE = HERE.parents[1] / "plugins/mens-cpu-ref/native"

_SHARED = {"metal": "threadgroup", "cuda": "__shared__"}
_KERNEL = re.compile(r"\b(?:kernel|__global__) void (vox_\w+)\((.*?)\) \{", re.DOTALL)
_THREADS = re.compile(r"\bint32_t (\w+)_threads = ")
"""How many threads a kernel's groups have, where a text says so."""
_ATTRIBUTE = re.compile(r"\[\[(\w+)\]\]")
_PLACES = {
    "thread_position_in_grid": "{p.group_x * vox_shim::kGroup + p.local, p.group_y, 0}",
    "threadgroup_position_in_grid": "{p.group_x, p.group_y, 0}",
    "thread_position_in_threadgroup": "{p.local, 0, 0}",
    "threads_per_simdgroup": "vox_shim::simd_width()",
    "thread_index_in_simdgroup": "p.local % vox_shim::simd_width()",
    "simdgroup_index_in_threadgroup": "p.local / vox_shim::simd_width()",
}
"""What Metal tells a thread of its place, by the parameter's attribute."""
_ASKED = ("METAL fp math_mode(safe)", "METAL fp contract(off)")
"""The pragmas that a Metal text needs before its code, as its compiler reads them."""
_PRAGMA = re.compile(r"\s*#\s*pragma\b(.*)")
# The predefined names of Metal's compiler in place of this machine's: a branch of the text for either shows.
_PREDEFINED = {"metal": ("-undef", "-D__METAL_VERSION__=320"), "cuda": ()}


def compiler() -> list[str] | None:
    """The machine's C++ compiler, else zig's; None where there is neither."""
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is not None:
        return [found]
    try:
        import ziglang  # noqa: F401
    except ImportError:
        return None
    return [sys.executable, "-m", "ziglang", "c++"]


def preprocessed(source: str, target: Target) -> str:
    """The plain Metal or CUDA text: no macro of ours, no include."""
    command = compiler()
    assert command is not None
    # The target's own headers stay out: they are not preprocessed, but stood in for.
    lines = [line for line in source.splitlines() if not line.startswith("#include <")]
    done = subprocess.run(
        [*command, "-x", "c++", *_PREDEFINED[target], "-E", "-P", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def fp_problems(text: str) -> list[str]:
    """Return what in a preprocessed Metal text lets its compiler fuse or reorder; empty: nothing.

    Both pragmas must stand before the first line of code, and none besides them may say anything else.
    """
    problems, asked, is_code = [], set(), False
    for line in text.splitlines():
        found = _PRAGMA.fullmatch(line)
        if found is None:
            is_code = is_code or bool(line.strip())
            continue
        said = _normal_pragma(found[1])
        if said in _ASKED:
            asked |= set() if is_code else {said}
        elif said.partition(" ")[0] != "unroll":
            problems.append(f"#pragma {said}")
    return [f"no #pragma {pragma} before the code" for pragma in _ASKED if pragma not in asked] + problems


def contraction(text: str, target: Target, options: Sequence[str] = CUDA_OPTIONS) -> str:
    """Return "off", or "fast": how products and sums of a preprocessed text are fused, as on the GPU."""
    if target == "metal":
        return "fast" if fp_problems(text) else "off"
    said = [option for option in options if option.startswith(("--fmad", "-fmad", "--use_fast_math"))]
    return "off" if said[-1:] == ["--fmad=false"] and "--use_fast_math" not in said else "fast"


def _normal_pragma(text: str) -> str:
    return re.sub(r"\s*([()])\s*", r"\1", " ".join(text.split()))


def build(
    folder: Path,
    source: str,
    target: Target,
    options: Sequence[str] = CUDA_OPTIONS,
    units: Sequence[Path] = (RUNNER,),
    optimise: str = "-O1",
) -> Path:
    """Return a shared library with `shim_run` and what the `units` export; made once per text."""
    text = preprocessed(source, target)
    if target == "metal":
        units = (*units, MATRICES)
    contract = contraction(text, target, options)
    if contract == "fast":
        optimise = "-O2"  # at less g++ fuses nothing, and what is allowed would not be seen
    unit = "\n".join([_prelude(target), _watched(text, target), _table(text, target)])
    ours = [HERE / "runner.h", HERE / "metal_stdlib", HERE / "cuda_builtins.h", NATIVE / "flush.h", *units]
    parts = [unit, contract, optimise, *(path.read_text() for path in ours)]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    library = folder / f"{target}-{name}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{target}-{name}.lock"):
        if not library.exists():  # another worker's may have been made meanwhile
            _compile(unit, library, units, optimise, contract)
    return library


def _compile(unit: str, library: Path, units: Sequence[Path], optimise: str, contract: str) -> None:
    # Made aside and renamed: another process sees all of it or nothing.
    written = library.with_suffix(f".{os.getpid()}.cpp")
    aside = written.with_suffix(".so")
    written.write_text(unit)
    command = compiler()
    assert command is not None
    flags = ["-std=c++17", optimise, "-fPIC", "-shared", "-w", f"-ffp-contract={contract}"]
    flags += ["-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"]
    flags.append("-frounding-math")  # nothing inexact is folded: the flush would be lost
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-mfma")
    done = subprocess.run(
        [*command, *flags, f"-I{HERE}", f"-I{NATIVE}", str(written), *map(str, units), "-o", str(aside)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        form = library.name.partition("-")[0]
        raise RuntimeError(
            f"the {form} form of the grid kernels does not compile as C++:\n{done.stderr[:6000]}"
        )
    aside.replace(library)


def kernel_names(source: str, target: Target = "metal") -> list[str]:
    """Return the names of the kernels of a source."""
    return [name for name, _ in _KERNEL.findall(preprocessed(source, target))]


def _prelude(target: Target) -> str:
    return '#include "metal_stdlib"' if target == "metal" else '#include "cuda_builtins.h"'


def _watched(text: str, target: Target) -> str:
    declaration = re.compile(rf"\b{_SHARED[target]} (\w+) (\w+)\[(\w+)\];")
    if target == "cuda":
        # It has no word for a pointer to such memory: what goes through one could not be told apart.
        return declaration.sub(r"static vox_shim::Unwatched<\1, \3> \2;", text)
    names = {name for _, name, _ in declaration.findall(text)}
    text = declaration.sub(r"static vox_shim::Shared<\1, \3> \2;", text)
    pointer = re.compile(r"\bthreadgroup (?:const )?(\w+)\* ?(\w+)")
    names |= {name for _, name in pointer.findall(text)}
    text = pointer.sub(r"vox_shim::SharedPointer<\1> \2", text)
    if not names:
        return text
    written = re.compile(rf"\b({'|'.join(sorted(names))})\[([^\[\];]*)\](?= [-+*/|&^]?= )")
    return written.sub(r"vox_shim::to_write(\1, \2)", text)


def _table(text: str, target: Target) -> str:
    calls, entries = [], []
    sizes = set(_THREADS.findall(text))
    for name, parameters in _KERNEL.findall(text):
        every = _split(parameters)
        places = {p: _PLACES[found[1]] for p in every if (found := _ATTRIBUTE.search(p)) is not None}
        buffers = [p for p in every if p not in places]
        arguments = [places[p] if p in places else _argument(p, buffers.index(p)) for p in every]
        calls.append(
            f"static void call_{name}(void* const* b, const vox_shim::Place& p) "
            f"{{ {name}({', '.join(arguments)}); }}"
        )
        threads = f"&{name}_threads" if name in sizes else "nullptr"
        entries.append(f'{{"{name}", call_{name}, {len(buffers)}, sizeof({_kind(buffers[-1])}), {threads}}}')
    return "\n".join(
        [
            *calls,
            f"namespace vox_shim {{ const Kernel kKernels[] = {{{', '.join(entries)}}};",
            f"const int kKernelCount = {len(entries)}; }}",
        ]
    )


def _split(parameters: str) -> list[str]:
    return [" ".join(p.split()) for p in parameters.split(",")]


def _argument(parameter: str, number: int) -> str:
    """How a parameter is passed on, from its declaration."""
    kind = _kind(parameter)
    return f"({kind})b[{number}]" if kind.endswith("*") else f"*({kind}*)b[{number}]"


def _kind(parameter: str) -> str:
    """The type of a parameter without address space, reference and name."""
    declared = re.sub(r"\[\[.*?\]\]", "", parameter).replace("device ", "").replace("constant ", "")
    return declared.strip().rpartition(" ")[0].rstrip("& ")
