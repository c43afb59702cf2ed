"""Runs every grid kernel on a GPU and compares bytes with vectors of the scalar reference.

    python tests/gpu/run_grid.py VECTORS.npz [--compiler nvrtc|nvcc] [--device N] [--planted]

VECTORS.npz is made by `record_grid.py` on a machine with the CPU lane. Needs Python, numpy, an NVIDIA driver,
and NVRTC (the cuda-bindings package) or nvcc; nothing else of this repository. Prints each kernel with its
number of launches, every launch that differs with its first differing element, and one line of verdict. Exit
status: 0 all bytes equal, 1 some differ, 2 nothing could be run. With --planted it is the other way round:
the kernels are compiled with one mistake after the other, and each must make bytes differ.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_MARGIN = 512
"""Bytes before and after each buffer that no kernel may touch."""
_MARK = 0xA5
_SHOWN = 40
"""Differing launches that are printed; the rest is counted."""


class NotRunError(Exception):
    """Nothing was compared."""


class Driver:
    """The CUDA driver's C interface, as far as it is needed here."""

    def __init__(self, number: int) -> None:
        name = os.environ.get("VOX_LIBCUDA", "libcuda.so.1")
        try:
            self._cuda = ctypes.CDLL(name)
        except OSError as problem:
            raise NotRunError(f"no NVIDIA driver here: {problem}") from None
        self.call("cuInit", 0)
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), number)
        text = ctypes.create_string_buffer(200)
        self.call("cuDeviceGetName", text, 200, device)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        # Of Hopper, with the instructions that it alone has, as in the lane.
        self.capability = f"{major.value}{minor.value}{'a' if (major.value, minor.value) == (9, 0) else ''}"
        self.about = (
            f"{text.value.decode()}, compute capability {major.value}.{minor.value}, "
            f"driver API {version.value}"
        )
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; anything but success is raised."""
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: error {code}, {(text.value or b'unknown').decode()}")

    def load(self, cubin: bytes) -> ctypes.c_void_p:
        """Return a module."""
        module = ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(cubin))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """Return a kernel of a module."""
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def run(
        self,
        function: ctypes.c_void_p,
        buffers: list[Bytes],
        constants: bytes,
        threads: tuple[int, int],
        group: int,
    ) -> list[Bytes]:
        """Launch on copies of the buffers; return what is in them afterwards.

        Raises:
            RuntimeError: the launch failed, or a byte beside a buffer changed.
        """
        pointers = []
        try:
            for buffer in buffers:
                pointer = ctypes.c_uint64()
                self.call(
                    "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(buffer.nbytes + 2 * _MARGIN)
                )
                pointers.append(pointer)
                padded = np.full(buffer.nbytes + 2 * _MARGIN, _MARK, np.uint8)
                padded[_MARGIN : _MARGIN + buffer.nbytes] = buffer
                source = ctypes.c_void_p(padded.ctypes.data)
                self.call("cuMemcpyHtoD_v2", pointer, source, ctypes.c_size_t(padded.nbytes))
            values: list[Any] = [ctypes.c_uint64(pointer.value + _MARGIN) for pointer in pointers]
            values.append(ctypes.create_string_buffer(constants, len(constants)))
            parameters = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            grid = (-(-threads[0] // group), threads[1], 1)
            self.call("cuLaunchKernel", function, *grid, group, 1, 1, 0, None, parameters, None)
            self.call("cuCtxSynchronize")
            found = []
            for number, (buffer, pointer) in enumerate(zip(buffers, pointers, strict=True)):
                padded = np.empty(buffer.nbytes + 2 * _MARGIN, np.uint8)
                target = ctypes.c_void_p(padded.ctypes.data)
                self.call("cuMemcpyDtoH_v2", target, pointer, ctypes.c_size_t(padded.nbytes))
                if np.any(padded[:_MARGIN] != _MARK) or np.any(padded[_MARGIN + buffer.nbytes :] != _MARK):
                    raise RuntimeError(f"bytes outside buffer {number} were written")
                found.append(padded[_MARGIN : _MARGIN + buffer.nbytes])
            return found
        finally:
            for pointer in pointers:
                self._cuda.cuMemFree_v2(pointer)


def compile_with_nvrtc(source: str, capability: str, options: list[str]) -> tuple[bytes, str]:
    """Return machine code and the compiler's name, through cuda-bindings."""
    from cuda.bindings import nvrtc

    def check(result: Any) -> Any:
        code, *values = result
        if int(code) != 0:
            raise RuntimeError(f"NVRTC: {code}")
        return values[0] if values else None

    major, minor = nvrtc.nvrtcVersion()[1:]
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"grid.cu", 0, [], []))
    # NVRTC 13.0 keeps machine code within a process by the source and forgets --ftz and --prec-div:
    # what was compiled first came back for the others too.
    uncached = ["--no-cache"] if (major, minor) >= (13, 0) else []
    flags = [f"--gpu-architecture=sm_{capability}".encode()]
    flags += [option.encode() for option in (*options, *uncached)]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(code) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise NotRunError(f"NVRTC {major}.{minor} refused the kernel source:\n{log.decode(errors='replace')}")
    cubin = b" " * check(nvrtc.nvrtcGetCUBINSize(program))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin, f"NVRTC {major}.{minor}"


def compile_with_nvcc(source: str, capability: str, options: list[str]) -> tuple[bytes, str]:
    """Return machine code and the compiler's name, through the toolkit's compiler."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as folder:
        file, cubin = Path(folder, "grid.cu"), Path(folder, "grid.cubin")
        file.write_text(source)
        command = [nvcc, "-cubin", f"-arch=sm_{capability}", *options, str(file), "-o", str(cubin)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as problem:
            raise NotRunError(f"nvcc can't be run: {problem}") from None
        if done.returncode != 0:
            raise NotRunError(f"nvcc refused the kernel source:\n{done.stdout}{done.stderr}")
        version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        return cubin.read_bytes(), "nvcc " + version.strip().splitlines()[-1]


def compiled(source: str, capability: str, options: list[str], compiler: str | None) -> tuple[bytes, str]:
    """Compile with the chosen compiler, or with NVRTC, or where that is not there with nvcc."""
    if compiler == "nvcc":
        return compile_with_nvcc(source, capability, options)
    try:
        return compile_with_nvrtc(source, capability, options)
    except NotRunError:
        raise
    except Exception as problem:  # noqa: BLE001 - not installed, or of another interface
        if compiler == "nvrtc":
            raise NotRunError(f"NVRTC can't be used: {type(problem).__name__}: {problem}") from None
        print(f"NVRTC can't be used ({type(problem).__name__}: {problem}); trying nvcc")
        return compile_with_nvcc(source, capability, options)


def first_difference(found: list[Bytes], expected: list[Bytes]) -> str | None:
    """Say which element of which buffer is the first that differs."""
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if a.tobytes() == b.tobytes():
            continue
        at = int(np.flatnonzero(a != b)[0])
        size = 4 if a.nbytes % 4 == 0 else 1
        index = at // size * size
        values = (x[index : index + size].tobytes()[::-1].hex() for x in (a, b))
        count = int(np.count_nonzero((a != b).reshape(-1, size).any(axis=1)))
        return "buffer {}, element {}: {}, expected {}; {} of {} differ".format(
            number, index // size, *values, count, a.nbytes // size
        )
    return None


class Vectors:
    """What `record_grid.py` wrote."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.about = json.loads(file["about"].tobytes())
            self._kept: dict[str, Bytes] = {key: file[key] for key in file.files if key != "about"}
        self.source: str = self.about["source"]
        self.options: list[str] = self.about["options"]

    def differing(self, driver: Driver, module: ctypes.c_void_p) -> Iterator[tuple[str, str, str | None]]:
        """Run every launch; yield its case, its kernel, and how it differs or None."""
        for launch in self.about["launches"]:
            try:
                found = driver.run(
                    driver.function(module, launch["kernel"]),
                    [self._kept[key] for key in launch["before"]],
                    bytes.fromhex(launch["constants"]),
                    tuple(launch["threads"]),
                    self.about["group"],
                )
                difference = first_difference(found, [self._kept[key] for key in launch["after"]])
            except RuntimeError as problem:
                difference = str(problem)
            yield launch["case"], launch["kernel"], difference


def compare(vectors: Vectors, driver: Driver, compiler: str | None) -> int:
    """Compile, run, compare, print; return the exit status."""
    start = time.perf_counter()
    cubin, name = compiled(vectors.source, driver.capability, vectors.options, compiler)
    print(f"compiled by {name} in {time.perf_counter() - start:.1f} s, {' '.join(vectors.options)}")
    launches, failures = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for case, kernel, difference in vectors.differing(driver, driver.load(cubin)):
        launches[kernel] += 1
        if difference is not None:
            failures[kernel] += 1
            if failures.total() <= _SHOWN:
                print(f"DIFFERS {case}, {kernel}: {difference}")
    for kernel, count in sorted(launches.items()):
        print(f"{kernel:24} {count:4} launches, {failures[kernel] or 'none'} differ")
    seconds = time.perf_counter() - start
    verdict = "FAILED" if failures or not launches else "BITWISE"
    print(
        f"{verdict}: numerics {vectors.about['numerics']}, {launches.total()} launches of "
        f"{len(launches)} kernels, {failures.total()} differ, {seconds:.1f} s"
    )
    return 1 if failures or not launches else 0


PLANTED_OPTIONS = ("--fmad=true", "--ftz=false", "--prec-div=false")
PLANTED_SOURCE = {
    "a fused operation done in two": (
        "return VOX_FMA(a, b, c);",
        "return a * b + c;",
    ),
    "the device's own exp": (
        "const V magic = F_CONST(V, 0x4B400000u);",
        "return __expf(x); const V magic = F_CONST(V, 0x4B400000u);",
    ),
    "chunks added from the last to the first": (
        "return is_first ? chunk : f_add(total, chunk);",
        "return is_first ? chunk : f_sub(f_add(chunk, f_add(total, total)), total);",
    ),
    "products rounded as TF32 does": (
        "{ return a * b; }",
        "{ return f_from_tf32(a) * f_from_tf32(b); }",
    ),
    "rotary halves exchanged": (
        "rotated(x[first], x[first + args.pairs], cosine, sine)",
        "rotated(x[first + args.pairs], x[first], cosine, sine)",
    ),
}
"""A text of the source, and the mistake in its place."""
_TF32 = (
    "static __device__ float f_from_tf32(float a) "
    "{ return __int_as_float((__float_as_int(a) + 0x1000) & 0xFFFFE000); }\n"
)


def planted(vectors: Vectors, driver: Driver, compiler: str | None) -> int:
    """Compile with one mistake after the other; each must make some launch differ."""
    right, _ = compiled(vectors.source, driver.capability, vectors.options, compiler)
    missed = 0
    for option in PLANTED_OPTIONS:
        options = [o for o in vectors.options if o.split("=")[0] != option.split("=")[0]] + [option]
        missed += not _is_caught(vectors, driver, option, right, compiler, vectors.source, options)
    for name, (old, new) in PLANTED_SOURCE.items():
        if old not in vectors.source:
            raise NotRunError(f"the source has no {old!r} any more: {name!r} can't be planted")
        source = vectors.source.replace(old, new)
        if "f_from_tf32" in new:
            at = source.index("// --- float ---")
            source = source[:at] + _TF32 + source[at:]
        missed += not _is_caught(vectors, driver, name, right, compiler, source, vectors.options)
    count = len(PLANTED_OPTIONS) + len(PLANTED_SOURCE)
    print(f"{'FAILED' if missed else 'ALL CAUGHT'}: {count - missed} of {count} planted mistakes show")
    return 1 if missed else 0


def _is_caught(
    vectors: Vectors,
    driver: Driver,
    name: str,
    right: bytes,
    compiler: str | None,
    source: str,
    options: list[str],
) -> bool:
    cubin, _ = compiled(source, driver.capability, options, compiler)
    found = [item for item in vectors.differing(driver, driver.load(cubin)) if item[2] is not None]
    code = "the same machine code" if cubin == right else "other machine code"
    kernels = sorted({kernel for _, kernel, _ in found})
    print(
        f"planted, {name}: {code}, {len(found)} launches differ{': ' if kernels else ''}{', '.join(kernels)}"
    )
    return bool(found)


def main() -> int:
    """Read the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vectors", type=Path, help="made by record_grid.py")
    parser.add_argument("--compiler", choices=("nvrtc", "nvcc"), help="default: NVRTC, else nvcc")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument(
        "--planted",
        action="store_true",
        help="compile with one mistake after the other, and see each one caught",
    )
    given = parser.parse_args()
    try:
        vectors, driver = Vectors(given.vectors), Driver(given.device)
        print(f"device: {driver.about}")
        return (planted if given.planted else compare)(vectors, driver, given.compiler)
    except (NotRunError, OSError) as problem:
        print(f"error: {problem}\nno kernel was run", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
