"""How long the CUDA lane takes to load weights that the page cache holds, beside a plain read of them.

    python bench/load.py [--shape 8b] [--format bf16] [--rounds 3] [--folder FOLDER] [--out FOLDER]

A model of drawn weights is written to --folder and read once. Then, in turns: a plain read of its files by
one thread into one buffer of 16 MiB, and a load in a process of its own, from an opened checkpoint to weights
on the GPU. Memory is what the process has resident beyond the model's mapping and the pages of programs and
libraries (/proc/self/smaps). Goals: 1.5 times the plain read, 2 GB. The Python that runs it has what the CUDA
lane needs, and vox-host. Exit status 0 where there is no GPU; it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import ROOT, use_sources

use_sources()
sys.path.insert(0, str(ROOT / "host/src"))

import numpy as np  # noqa: E402

from gpu.drawn_model import QWEN3_8B  # noqa: E402
from gpu.shape_model import QWEN3_06B  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402

SHAPES: dict[str, tuple[dict[str, Any], int]] = {"0.6b": (QWEN3_06B, 28), "8b": (QWEN3_8B, 36)}
BUFFER = 16 << 20
EVERY_S = 0.05


def plain_read_s(folder: Path) -> float:
    """Seconds to read all weight files, one after the other, into one buffer."""
    buffer = bytearray(BUFFER)
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def own_bytes(folder: Path) -> int:
    """Resident bytes that are neither the model's mapping nor unchanged pages of other files."""
    total, is_model, is_memory = 0, False, False
    for line in Path("/proc/self/smaps").read_text("utf-8", "replace").splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            path = line.split(None, 5)[5:] or [""]
            is_model = path[0].startswith(str(folder))
            # Pinned, or shared with the driver: no file's bytes, though it has a name.
            is_memory = path[0].startswith(("/dev/", "/memfd:", "/SYSV"))
        elif not is_model and name == ("Rss:" if is_memory else "Anonymous:"):
            total += int(rest.split()[0]) << 10
    return total


class Peak:
    """The most of `own_bytes` while it is watched."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.most = own_bytes(folder)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.most = max(self.most, own_bytes(self._folder))


def load_once(folder: Path, way: str) -> dict[str, Any]:
    """Load in this process; `way` "driver" leaves every copy and look to the host, as other lanes do."""
    import torch

    from mens_core.models.load import load_all
    from mens_torch_cuda.device import CudaDevice
    from mens_torch_cuda.start import start
    from vox_plugin_api.checkpoint import Checkpoint, read_json_object
    from vox_plugin_api.families import parse_config

    started = start(os.environ)
    if way == "driver":
        del CudaDevice.put_finite
    config = parse_config(read_json_object(folder / "config.json"))
    checkpoint = Checkpoint.open(folder)
    torch.cuda.synchronize()
    before = own_bytes(folder)
    with Peak(folder) as peak:
        began = time.perf_counter()
        loaded = load_all(config, checkpoint, started.lane())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        loaded.model.new_cache(1)
    return {
        "load_s": seconds,
        "own_bytes_before": before,
        "own_bytes_most": peak.most,
        "own_bytes_after": own_bytes(folder),
        "gpu_bytes": torch.cuda.memory_allocated(),
        "machine": started.facts(),
    }


def main() -> int:
    """Measure; print and write one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", choices=list(SHAPES))
    parser.add_argument("--format", default="bf16", choices=("bf16", "q8_0"))
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="*", default=["pieces"], choices=("pieces", "driver"))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--model", type=Path, help="a model's folder, in place of one that is drawn")
    parser.add_argument("--name", default=f"load-cuda-{datetime.now(UTC):%Y-%m-%d}", help="of the file")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--once", choices=("pieces", "driver"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(load_once(given.model, given.once)))
        return 0
    try:
        find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nnothing was measured")
        return 0
    shape, layers = SHAPES[given.shape]
    layers = given.layers or layers
    folder = given.model or given.folder / f"drawn-load-{given.shape}-{given.format}-{layers}-{os.getpid()}"
    try:
        if given.model is None:
            from gpu.drawn_store import add_drawn_model

            add_drawn_model(given.folder, folder.name, shape, given.format, layers=layers)
        result = measure(given, folder)
    finally:
        if given.model is None:
            shutil.rmtree(folder, ignore_errors=True)
    given.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": f"{given.shape} {given.format}, {layers} layers", **result}, indent=2)
    (given.out / f"{given.name}.json").write_text(text + "\n", "utf-8")
    print(text)
    return 0


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Plain reads and loads in turns; medians."""
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    plain_read_s(folder)
    reads: list[float] = []
    loads: dict[str, list[dict[str, Any]]] = {way: [] for way in given.ways}
    for _ in range(given.rounds):
        reads.append(plain_read_s(folder))
        for way in given.ways:
            command = [sys.executable, __file__, "--once", way, "--model", str(folder)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode != 0:
                print(done.stderr[-3000:], file=sys.stderr)
                raise SystemExit(f"the load ({way}) failed; nothing was written")
            loads[way].append(json.loads(done.stdout.splitlines()[-1]))
    read = float(np.median(reads))
    result: dict[str, Any] = {
        "machine": {
            **loads[given.ways[0]][0]["machine"],
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        },
        "weight_bytes": nbytes,
        "rounds": given.rounds,
        "plain_read_s": read,
        "plain_read_gb_per_s": nbytes / read / 1e9,
    }
    for way, taken in loads.items():
        seconds = float(np.median([one["load_s"] for one in taken]))
        most = max(one["own_bytes_most"] for one in taken)
        result[way] = {
            "load_s": seconds,
            "over_plain_read": seconds / read,
            "own_bytes_before": taken[-1]["own_bytes_before"],
            "own_bytes_most": most,
            "own_bytes_after": taken[-1]["own_bytes_after"],
            "gpu_bytes": taken[-1]["gpu_bytes"],
            "every_load_s": [one["load_s"] for one in taken],
        }
    return result


if __name__ == "__main__":
    raise SystemExit(main())
