"""Load the native library and give every function its C signature.

One table of operators serves the kernels (`vox_*`) and the scalar reference (`ref_*`), which
share signatures (native/abi.h). Arrays cross as addresses, plain integers: ctypes converts
those fastest, and a decode step makes hundreds of calls. Nothing is loaded on import.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_plugin_api.backend import BackendError

__all__ = ["ABI_VERSION", "Function", "Library", "Signatures", "load_library"]

ABI_VERSION = 7

_P = ctypes.c_void_p
_W = ctypes.c_int32
_I = ctypes.c_int64
_U = ctypes.c_uint64
_F = ctypes.c_float

_OPERATORS: Mapping[str, tuple[Any, ...]] = {
    "pack": (_W, _P, _I, _I, _P),
    "widen": (_W, _P, _I, _W, _P),
    "embed": (_W, _P, _I, _I, _P, _I, _F, _P),
    "linear": (_W, _P, _I, _I, _P, _I, _P),
    "norm": (_P, _P, _I, _I, _I, _F, _P),
    "rotary": (_P, _I, _U, _U, _I, _I, _P),
    "rope": (_P, _I, _I, _I, _P, _P, _I, _P, _P),
    "kv_append": (_P, _P, _I, _I, _I, _P, _P, _P, _I, _I, _I, _P, _P),
    "attention": (_P, _I, _I, _I, _I, _P, _P, _P, _I, _I, _I, _P, _P, _F, _I, _F, _P),
    "add": (_P, _P, _I, _I, _P),
    "silu_gate": (_P, _P, _I, _I, _P),
    "gelu_gate": (_P, _P, _I, _I, _P),
    "softcap": (_P, _I, _I, _F, _P),
    "penalise": (_P, _I, _P, _I, _P, _P),
    "argmax": (_P, _I, _I, _P),
    "token_weights": (_P, _I, _F, _P),
    "log_normaliser": (_P, _I, _I, _P),
    "function": (_W, _P, _I, _P),
}
"""Arguments of each operator after its prefix; all return int64 (native/abi.h)."""

_KERNELS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "replay": (_P, _I, _P, _I, _P, _P, _P, _I, _I, _I),
    "read": (_P, _I, _P),
    "compact_measure": (_P, _I, _I, _P, _P),
    "compact_bytes": (_I, _I, _I),
    "compact_pack": (_P, _I, _I, _P, _P, _P),
}
"""What calls operators, measures, or packs closer: no arithmetic, so the reference has none of them."""

Function = Callable[..., int]
Signatures = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library: operators by name, and its few switches."""

    kernels: Mapping[str, Function]
    reference: Mapping[str, Function]
    bind: Callable[[str, Signatures], dict[str, Function]]
    """Functions of a prefix ("vox_", "ref_") that serving does without, bound when asked for."""
    isa: Callable[[], str]
    force_isa: Callable[[str], None]
    set_threads: Callable[[int], None]


@functools.cache
def load_library(path: Path | None = None) -> Library:
    """Load libvox_cpu, from beside this module unless a path is given.

    Raises:
        BackendError: the library is missing or of another version, or the CPU is too old.
    """
    found = path or _library_path()
    try:
        native = ctypes.CDLL(str(found))
    except OSError as problem:
        raise BackendError(
            "native-library-unloadable",
            f"the CPU lane's native library could not be loaded: {problem}; no model was loaded",
            facts={"file": str(found)},
            remedy="reinstall the plugin: vox-host plugin install --path <mens-cpu-ref>",
        ) from None
    native.vox_abi_version.restype = ctypes.c_int
    if (version := native.vox_abi_version()) != ABI_VERSION:
        raise BackendError(
            "native-library-version",
            "the CPU lane's native library does not belong to this Python code; no model was loaded",
            facts={"file": str(found), "expected": ABI_VERSION, "found": version},
            remedy="rebuild or reinstall the plugin: vox-host plugin install --path <mens-cpu-ref>",
        )
    native.vox_isa.restype = ctypes.c_char_p
    if not native.vox_isa():
        raise BackendError(
            "cpu-too-old",
            "this CPU is below x86-64-v3 (AVX2, FMA, F16C, BMI2 ...), the CPU lane's minimum; "
            "no model was loaded",
            facts={"needed": "x86-64-v3", "found": _cpu_name()},
            remedy="use a machine from about 2013 (Intel Haswell, AMD Excavator) or later",
        )
    quantised, quantised_kernels = _quantised_operators()
    signatures = {**_OPERATORS, **quantised}
    return Library(
        kernels=_bind(native, "vox_", {**signatures, **_KERNELS_ONLY, **quantised_kernels}),
        reference=_bind(native, "ref_", signatures),
        bind=functools.partial(_bind, native),
        isa=lambda: native.vox_isa().decode(),
        force_isa=functools.partial(_force_isa, native),
        set_threads=functools.partial(_set_threads, native),
    )


def _quantised_operators() -> tuple[Signatures, Signatures]:
    """Signatures of the operators, and of what the kernels alone have."""
    try:
        from mens_cpu_ref import quantised
    except ImportError:
        return {}, {}
    return quantised.OPERATORS, quantised.KERNELS_ONLY


def _bind(native: ctypes.CDLL, prefix: str, signatures: Signatures) -> dict[str, Function]:
    return {name: _function(native, prefix + name, types) for name, types in signatures.items()}


def _function(native: ctypes.CDLL, symbol: str, types: tuple[Any, ...]) -> Function:
    function = native[symbol]
    function.restype = ctypes.c_int64
    function.argtypes = types
    return function


def _force_isa(native: ctypes.CDLL, name: str) -> None:
    if native.vox_force_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available here")


def _set_threads(native: ctypes.CDLL, count: int) -> None:
    if native.vox_set_threads(count) != 0:
        raise BackendError(
            "threads-refused",
            f"the system did not grant {count} threads; no model was loaded",
            facts={"threads": count},
            remedy="lower the number of threads, or raise the limit (ulimit -u, cgroup pids.max)",
        )


def _library_path() -> Path:
    return Path(__file__).with_name("libvox_cpu.so")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return os.uname().machine
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
