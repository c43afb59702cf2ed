"""`vox-host parity` between the CPU and the CUDA lane on models of real size, a certificate for each case.

    python bench/gpu_parity.py [--cases 0.6b-bf16-long 8b-bf16-64 ...] [--side both|cpu|cuda] [--out FOLDER]

The Python that runs it has vox-host; both plugins are installed (`vox-host plugin install`) or beside it.
Models are drawn here, bit for bit the same on any machine, put into the store as `drawn-...` and taken out
again; `--demo NAME` adds a model that the store has: as it is, and as floats. With `--side cpu` the CPU
lane's answers are recorded (`parity-record-CASE.json` in --records), with `--side cuda` the GPU's are held
against that record: two machines, or two hours of one, will do. Exit status: 0 where all agreed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import ROOT, use_sources

use_sources()
sys.path.insert(0, str(ROOT / "host/src"))

import numpy as np  # noqa: E402

from gpu.drawn_model import QWEN3_8B  # noqa: E402
from gpu.drawn_store import add_drawn_model  # noqa: E402
from gpu.float_copy import add_float_copy  # noqa: E402
from gpu.shape_model import QWEN3_06B  # noqa: E402
from mens_core.philox import STREAM_VECTORS, philox_words  # noqa: E402
from vox_host.settings import load_settings  # noqa: E402

SHAPES: dict[str, tuple[dict[str, Any], int]] = {"0.6b": (QWEN3_06B, 28), "8b": (QWEN3_8B, 36)}
SAMPLED = ("--temperature", "0.8", "--seed", "5")
MIB_PER_BLOCK = {"0.6b": 28, "8b": 36}
"""Of the KV cache, for 128 positions."""
ROOM_BLOCKS = 8


@dataclass(frozen=True)
class Asking:
    """Prompts of some lengths, and how they are continued."""

    lengths: tuple[int, ...]
    max_tokens: int
    at_once: int = 1
    sampled: bool = False

    def blocks(self) -> int:
        """Blocks of the KV cache that all requests of a group need."""
        return self.at_once * -(-(max(self.lengths) + self.max_tokens) // 128) + ROOM_BLOCKS


ASKINGS = {
    "long": Asking((4096, 1000, 129, 3), 32),
    "long-sampled": Asking((4096, 1000, 129, 3), 32, sampled=True),
    "512": Asking((512,), 32),
    "512-sampled": Asking((512,), 32, sampled=True),
    "64": Asking((8,) * 64, 32, at_once=64),
    "64-sampled": Asking((8,) * 64, 32, at_once=64, sampled=True),
    "real": Asking((700, 256, 129, 40, 5), 64, at_once=5),
    "real-sampled": Asking((700, 256, 129, 40, 5), 64, at_once=5, sampled=True),
}
DRAWN = ("long", "long-sampled", "512", "512-sampled", "64", "64-sampled")
CASES = [f"{shape}-{kind}-{asking}" for shape in SHAPES for kind in ("bf16", "q8_0") for asking in DRAWN]
CASES += [f"demo-{kind}-{asking}" for kind in ("file", "float") for asking in ("real", "real-sampled")]


def write_prompts(path: Path, lengths: tuple[int, ...]) -> None:
    """Lines of printable letters drawn by Philox: with a tokenizer of bytes, one token each."""
    words = philox_words(17, STREAM_VECTORS, 3, sum(lengths))
    letters = (words % np.uint32(94) + np.uint32(33)).astype(np.uint8).tobytes().decode("ascii")
    lines, at = [], 0
    for length in lengths:
        lines.append(letters[at : at + length])
        at += length
    path.write_text("\n".join(lines) + "\n", "utf-8")


def run_case(given: argparse.Namespace, case: str, model: str) -> tuple[str, float]:
    """Run one command; return its verdict ("recorded", "bitwise", ...) and seconds."""
    name, asking = case.split("-")[0], ASKINGS[case.split("-", 2)[2]]
    prompts = given.records / f"prompts-{case}.txt"
    write_prompts(prompts, asking.lengths)
    record = given.records / f"parity-record-{case}.json"
    out = given.out / f"parity-cpu-cuda-{case}-{datetime.now(UTC):%Y-%m-%d}.json"
    command = [sys.executable, "-m", "vox_host", "parity", "--model", model, "--prompts", prompts]
    command += ["--max-tokens", asking.max_tokens, "--at-once", asking.at_once]
    command += SAMPLED if asking.sampled else ()
    if name in SHAPES:
        command += ["--kv-cache-mib", asking.blocks() * MIB_PER_BLOCK[name]]
    command += ["--threads", given.threads] if given.threads else ()
    cpu, cuda = ("--plugin", given.cpu_plugin), ("--plugin", given.gpu_plugin)
    if given.side == "cpu":
        out = record
        command += [*cpu, "--record"]
    elif given.side == "cuda":
        command += [*cuda, "--against", record]
    else:
        command += [*cpu, *cuda]
    began = time.perf_counter()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [*map(str, command), "--out", str(out)],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - began
    if done.returncode not in (0, 6):
        print(done.stdout[-2000:])
        return f"exit status {done.returncode}", seconds
    facts = json.loads(out.read_text("utf-8"))
    for difference in facts["differences"]:
        print(json.dumps(difference))
    return facts["verdict"], seconds


def find_model(given: argparse.Namespace, case: str, models: Path) -> str:
    """Return the model of a case, which is in the store; one that is drawn is put there."""
    shape_name, kind, _ = case.split("-", 2)
    if shape_name == "demo":
        if kind == "file":
            return str(given.demo)
        name = f"drawn-float-{given.demo}"
        if not (models / name).exists():
            add_float_copy(models / given.demo, models / name)
        return name
    shape, layers = SHAPES[shape_name]
    layers = given.layers or layers
    name = f"drawn-{shape_name}-{kind}-{layers}-layers"
    if not (models / name).exists():
        began = time.perf_counter()
        add_drawn_model(models, name, shape, kind, layers=layers)
        print(f"{name}: written in {time.perf_counter() - began:.1f} s", flush=True)
    return name


def main() -> int:
    """Run the cases; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", choices=CASES, metavar="CASE", help="; ".join(CASES))
    parser.add_argument("--side", choices=("both", "cpu", "cuda"), default="both")
    parser.add_argument("--demo", help="a model of the store, for the cases demo-...")
    parser.add_argument("--layers", type=int, help="fewer than the shape has: no proof of the whole")
    parser.add_argument("--threads", type=int, help="of the CPU lane; default: all")
    parser.add_argument("--cpu-plugin", default="mens-cpu-ref")
    parser.add_argument("--gpu-plugin", default="mens-torch-cuda")
    parser.add_argument("--records", type=Path, default=Path("bench/results/parity-records"))
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--keep", action="store_true", help="leave the drawn models in the store")
    given = parser.parse_args()
    cases = given.cases or [c for c in CASES if given.demo or not c.startswith("demo")]
    if any(case.startswith("demo") for case in cases) and not given.demo:
        parser.error("the cases demo-... need --demo NAME, a model of the store (`vox-host model list`)")
    given.records.mkdir(parents=True, exist_ok=True)
    given.out.mkdir(parents=True, exist_ok=True)
    models = load_settings().models_dir
    wanted = "recorded" if given.side == "cpu" else "bitwise"
    made: set[str] = set()
    failed = 0
    try:
        for case in cases:
            model = find_model(given, case, models)
            if model.startswith("drawn-"):
                made.add(model)
            verdict, seconds = run_case(given, case, model)
            failed += verdict != wanted
            print(
                f"{'ok    ' if verdict == wanted else 'FAILED'} {case}: {verdict} ({seconds:.1f} s)",
                flush=True,
            )
    finally:
        for name in () if given.keep else made:
            shutil.rmtree(models / name, ignore_errors=True)
    print(f"{'FAILED' if failed else 'PASSED'}: {len(cases) - failed} of {len(cases)} cases {wanted}")
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    raise SystemExit(main())
