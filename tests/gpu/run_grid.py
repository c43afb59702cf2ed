"""Runs every grid kernel on a GPU and compares bytes with vectors of the scalar reference.

    python tests/gpu/run_grid.py VECTORS.npz [--compiler nvrtc|nvcc] [--device N] [--option=--fmad=true]

VECTORS.npz is made by `record_grid.py` on a machine with the CPU lane. Needs Python, numpy, an NVIDIA driver,
and NVRTC (the cuda-bindings package) or nvcc; nothing else of this repository. Prints each kernel with its
number of launches, every launch that differs with its first differing element, and one line of verdict. Exit
status: 0 all bytes equal, 1 some differ, 2 nothing could be run.
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
        self.capability = f"{major.value}{minor.value}"
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
    flags = [f"--gpu-architecture=sm_{capability}".encode(), *(option.encode() for option in options)]
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


def run(vectors: Path, number: int, compiler: str | None, instead: list[str]) -> int:
    """Compile, run, compare, print; return the exit status."""
    file = np.load(vectors)
    about = json.loads(file["about"].tobytes())
    driver = Driver(number)
    print(f"device: {driver.about}")
    start = time.perf_counter()
    replaced = [option.split("=")[0] for option in instead]
    options = [o for o in about["options"] if o.split("=")[0] not in replaced] + instead
    cubin, name = compiled(about["source"], driver.capability, options, compiler)
    print(f"compiled by {name} in {time.perf_counter() - start:.1f} s, {' '.join(options)}")
    module = driver.load(cubin)
    kept: dict[str, Bytes] = {key: file[key] for key in file.files if key != "about"}
    launches, failures = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for launch in about["launches"]:
        kernel = launch["kernel"]
        launches[kernel] += 1
        try:
            found = driver.run(
                driver.function(module, kernel),
                [kept[key] for key in launch["before"]],
                bytes.fromhex(launch["constants"]),
                tuple(launch["threads"]),
                about["group"],
            )
            difference = first_difference(found, [kept[key] for key in launch["after"]])
        except RuntimeError as problem:
            difference = str(problem)
        if difference is not None:
            failures[kernel] += 1
            if failures.total() <= _SHOWN:
                print(f"DIFFERS {launch['case']}, {kernel}: {difference}")
    for kernel, count in sorted(launches.items()):
        print(f"{kernel:24} {count:4} launches, {failures[kernel] or 'none'} differ")
    seconds = time.perf_counter() - start
    verdict = "FAILED" if failures or not launches else "BITWISE"
    print(
        f"{verdict}: numerics {about['numerics']}, {launches.total()} launches of {len(launches)} kernels, "
        f"{failures.total()} differ, {seconds:.1f} s"
    )
    return 1 if failures or not launches else 0


def main() -> int:
    """Read the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vectors", type=Path, help="made by record_grid.py")
    parser.add_argument("--compiler", choices=("nvrtc", "nvcc"), help="default: NVRTC, else nvcc")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="a compiler option in place of the right one, to see the comparison fail: --option=--fmad=true",
    )
    given = parser.parse_args()
    try:
        return run(given.vectors, given.device, given.compiler, given.option)
    except (NotRunError, OSError) as problem:
        print(f"error: {problem}\nno kernel was run", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
