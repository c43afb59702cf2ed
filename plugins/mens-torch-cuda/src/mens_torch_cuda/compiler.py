"""Compiles the grid kernels with NVRTC and keeps the machine code on disk.

What is kept is found again by all that decides its bytes: source, options, NVRTC's version, compute
capability. A file is a digest and the code; one that does not match its digest counts as absent.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mens_torch_cuda.ptx import forbidden_instructions
from vox_plugin_api.backend import BackendError

__all__ = ["HOPPER", "Compiler", "Kernels", "Nvrtc", "architecture", "cache_folder", "compile_kernels"]

_DIGEST_BYTES = 32
HOPPER = (9, 0)
"""The compute capability whose own instructions kernels are compiled with."""
_UNCACHED = "--no-cache"
"""NVRTC 13.0 keeps code within a process, and finds that of other `--ftz` and `--prec-div` options too."""
_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Kernels:
    """Machine code of all kernels for one compute capability."""

    cubin: bytes
    compiler: str
    source_digest: str
    cache: str
    """"read", "written", or why it was not written."""


class Compiler(Protocol):
    """A compiler of CUDA C++ from memory."""

    def version(self) -> str:
        """Return its name and version."""
        ...

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """Return machine code and its PTX.

        Raises:
            CompileError: it was refused; the text is the compiler's.
        """
        ...


class CompileError(Exception):
    """What the compiler said."""


class Nvrtc:
    """NVRTC, through cuda-bindings."""

    def version(self) -> str:
        nvrtc = _bindings()
        return "NVRTC {}.{}".format(*_checked(nvrtc.nvrtcVersion()))

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        nvrtc = _bindings()
        program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), b"vox_grid.cu", 0, [], []))
        try:
            flags = [option.encode() for option in options]
            (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            if int(code) != 0:
                log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
                _checked(nvrtc.nvrtcGetProgramLog(program, log))
                raise CompileError(log.rstrip(b"\0 ").decode(errors="replace") or str(code))
            ptx = b" " * _checked(nvrtc.nvrtcGetPTXSize(program))
            _checked(nvrtc.nvrtcGetPTX(program, ptx))
            cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
            _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        return cubin, ptx.rstrip(b"\0").decode()


def architecture(capability: tuple[int, int]) -> str:
    """Return what the compiler is told of a GPU; of Hopper, with the instructions that it alone has."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability == HOPPER else ''}"


def compile_kernels(
    source: str,
    options: tuple[str, ...],
    capability: tuple[int, int],
    compiler: Compiler,
    folder: Path,
    *,
    is_exact: bool = True,
) -> Kernels:
    """Return the kernels, from `folder` where it has them.

    Args:
        is_exact: whether the source is bound to the rules of docs/numerics.md; fast mode's is not.

    Raises:
        BackendError: `kernels-not-built` or `kernels-not-exact`; the lane can't be used.
    """
    every = (f"--gpu-architecture={architecture(capability)}", *options, _UNCACHED)
    digest = hashlib.sha256(source.encode()).hexdigest()
    try:
        version = compiler.version()
    except Exception as problem:  # noqa: BLE001 - whatever keeps the compiler's library from being loaded
        raise _not_built(f"the compiler can't be loaded: {type(problem).__name__}: {problem}", {}) from None
    facts: dict[str, Any] = {"compiler": version, "options": list(every), "source_sha256": digest}
    key = hashlib.sha256("\n".join([digest, version, *every]).encode()).hexdigest()
    path = folder / f"{key}.cubin"
    kept = _read(path)
    if kept is not None:
        return Kernels(kept, version, digest, "read")
    try:
        cubin, ptx = compiler.compile(source, every)
    except CompileError as problem:
        text = "\n".join(str(problem).splitlines()[:_SHOWN_LINES])
        raise _not_built(f"{version} refused the source: {text}", facts) from None
    if is_exact:
        refuse_inexact(ptx, facts)
    return Kernels(cubin, version, digest, _write(path, cubin))


def refuse_inexact(ptx: str, facts: Mapping[str, Any]) -> None:
    """Raise where the code does something that the rules do not allow.

    Raises:
        BackendError: `kernels-not-exact`, with kernels and instructions.
    """
    found = forbidden_instructions(ptx)
    if found:
        kernel, names = next(iter(found.items()))
        raise BackendError(
            "kernels-not-exact",
            f"the compiler put instructions into {len(found)} kernels that are not correctly rounded, "
            f"{', '.join(names)} in {kernel} first; the CUDA lane was not started",
            facts={**facts, "found": {name: list(instructions) for name, instructions in found.items()}},
            remedy="Install the version of cuda-bindings and NVRTC that the plugin was released with.",
        )


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return where machine code is kept, beside what other programs keep."""
    root = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/tmp"), ".cache"))  # noqa: S108
    return Path(root, "mens-torch-cuda", "kernels")


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def _write(path: Path, cubin: bytes) -> str:
    """Write aside and rename: another worker sees all of it or nothing."""
    aside = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        Path(aside).replace(path)
    except OSError as problem:
        if aside is not None:
            Path(aside).unlink(missing_ok=True)
        return f"not written: {problem}"
    return "written"


def _not_built(reason: str, facts: Mapping[str, Any]) -> BackendError:
    return BackendError(
        "kernels-not-built",
        f"the CUDA kernels could not be built: {reason}; the CUDA lane was not started",
        facts=dict(facts),
        remedy="Install the plugin again with its dependencies (cuda-bindings brings NVRTC).",
    )


def _bindings() -> Any:
    from cuda.bindings import nvrtc

    return nvrtc


def _checked(result: Any) -> Any:
    code, *values = result
    if int(code) != 0:
        raise RuntimeError(f"NVRTC: {code}")
    return values[0] if len(values) == 1 else values
