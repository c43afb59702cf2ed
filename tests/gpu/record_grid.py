"""Records every launch of the grid kernels, for `run_grid.py` to repeat on a GPU.

    PYTHONPATH=... python tests/gpu/record_grid.py OUT.npz

Each operator runs over the conformance cases and the shapes of `grid_shim`, on the CPU, and its
results must be those of the scalar reference; then every launch on the way is a vector: buffers before and
after. The elementary functions are recorded from the reference itself. The file holds the kernel source too,
so that a machine with a GPU needs nothing of this repository but `run_grid.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from grid_shim.build import build
from grid_shim.check import ALL
from grid_shim.device import ShimDevice, native_angles
from mens_core.grid_device import Launch, constants
from mens_core.grid_training_ops import GridTrainingOps
from mens_core.kernel_source import CUDA_OPTIONS, GROUP, grid_source
from mens_core.numerics import NUMERICS_VERSION
from mens_cpu_ref.library import Library, load_library
from mens_cpu_ref.training_lane import ReferenceTrainingOps

Bytes = npt.NDArray[np.uint8]
FUNCTIONS = ("exp", "log", "silu", "gelu", "tanh")


class Recorder:
    """Launches as plain data; equal buffers are kept once."""

    def __init__(self) -> None:
        self.case = ""
        self.launches: list[dict[str, object]] = []
        self.buffers: dict[str, Bytes] = {}

    def __call__(self, launch: Launch, before: list[Bytes]) -> None:
        after = list(launch.buffers)
        self.launches.append(
            {
                "case": self.case,
                "kernel": launch.kernel,
                "constants": launch.constants.hex(),
                "threads": list(launch.threads),
                "before": [self._kept(buffer) for buffer in before],
                "after": [self._kept(buffer) for buffer in after],
            }
        )

    def _kept(self, buffer: Bytes) -> str:
        key = "b" + hashlib.sha256(buffer.tobytes()).hexdigest()[:20]
        if key not in self.buffers:
            self.buffers[key] = buffer.copy()
        return key


def record(library: Library, folder: Path, cases: Mapping[str, Callable[[Any], Any]] = ALL) -> Recorder:
    """Run the cases; a result that is not the reference's ends it."""
    recorder = Recorder()
    shim = build(folder, grid_source("cuda"), "cuda")
    for name, case in cases.items():
        recorder.case = name
        device = ShimDevice(shim, watch=recorder)
        found = [
            np.asarray(array) for array in case(GridTrainingOps(device, native_angles(library.reference)))
        ]
        expected = [np.asarray(array) for array in case(ReferenceTrainingOps())]
        if [a.tobytes() for a in found] != [a.tobytes() for a in expected]:
            raise SystemExit(f"error: {name} differs from the reference on the CPU; nothing was recorded")
    for which, name in enumerate(FUNCTIONS):
        recorder.case = f"function/{name}"
        x = domain(name)
        out = np.empty_like(x)
        library.reference["function"](which, x.ctypes.data, len(x), out.ctypes.data)
        before = [x.view(np.uint8), np.zeros(out.nbytes, np.uint8)]
        after = (x.view(np.uint8), out.view(np.uint8))
        recorder(Launch("vox_function", after, constants(len(x), which), (len(x), 1)), before)
    return recorder


def domain(name: str, step: int = 32771) -> npt.NDArray[np.float32]:
    """Every `step`th bit pattern on which a function is defined."""
    x = np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    if name == "exp":
        x = x[x <= 88]
    if name == "log":
        x = x[x >= np.float32(2**-126)]
    return np.ascontiguousarray(x)


def write(recorder: Recorder, out: Path) -> None:
    """Write what `run_grid.py` reads."""
    about = {
        "numerics": NUMERICS_VERSION,
        "group": GROUP,
        "options": list(CUDA_OPTIONS),
        "source": grid_source("cuda"),
        "launches": recorder.launches,
    }
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(out, about=text, **recorder.buffers)


def main() -> int:
    """Record and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        recorder = record(load_library(), Path(folder))
    write(recorder, out)
    kernels = {launch["kernel"] for launch in recorder.launches}
    print(
        f"{out}: {len(recorder.launches)} launches of {len(kernels)} kernels, {out.stat().st_size >> 10} KiB"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
