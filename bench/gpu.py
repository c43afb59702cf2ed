"""Measures the CUDA lane on this machine's GPU: decode, prefill, beside the copy bandwidth of the same run.

    python bench/gpu.py [--layers 28] [--rounds 3] [--out bench/results]

Models of Qwen3-0.6B's shape with weights drawn by Philox, bf16 and Q8_0. A decode step is one whole step of
the model with the choice of its token, as a worker runs it. Exit status 0 where there is no GPU; it says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import use_sources

use_sources()

import numpy as np  # noqa: E402

from gpu.shape_model import write_shape  # noqa: E402
from lanes.batches import Sequences  # noqa: E402
from lanes.tiny_models import open_model  # noqa: E402
from mens_core.weights_fit import weight_bytes  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from mens_torch_cuda.start import Started, start  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402

COPIED = 2 << 30
CONTEXT, PREFILL, STEPS = 128, 512, 32


def copy_gb_per_s() -> float:
    """Bytes read and written per second by a copy within the GPU's memory, the best of seven."""
    import torch

    source = torch.empty(COPIED, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(8):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * COPIED / (time.perf_counter() - began) / 1e9)
    return best


def measure(path: Path, started: Started, rounds: int, batch: int) -> dict[str, Any]:
    """Tokens per second of decode and prefill, the median of the rounds."""
    ops = started.lane()
    began = time.perf_counter()
    model = open_model(path, ops).model
    load_s = time.perf_counter() - began
    blocks = -(-(PREFILL + 8) // 128) * batch
    decode, prefill = [], []
    rng = np.random.default_rng(3)
    for _ in range(rounds + 1):  # the first warms up
        cache = model.new_cache(blocks)
        sequences = Sequences()
        prompts = [(s, [int(t) for t in rng.integers(0, 151936, CONTEXT)]) for s in range(batch)]
        tokens = ops.argmax(model.forward(sequences.step(prompts), cache).logits)
        began = time.perf_counter()
        for _ in range(STEPS):
            step = sequences.step([(s, [int(token)]) for s, token in enumerate(tokens)])
            tokens = ops.argmax(model.forward(step, cache).logits)
        decode.append(batch * STEPS / (time.perf_counter() - began))
        cache, sequences = model.new_cache(blocks), Sequences()
        step = sequences.step([(0, [int(t) for t in rng.integers(0, 151936, PREFILL)])])
        began = time.perf_counter()
        ops.argmax(model.forward(step, cache).logits)
        prefill.append(PREFILL / (time.perf_counter() - began))
    return {
        "batch": batch,
        "load_s": round(load_s, 2),
        "decode_tokens_per_s": float(np.median(decode[1:])),
        "prefill_tokens_per_s": float(np.median(prefill[1:])),
    }


def main() -> int:
    """Measure; print and write one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    try:
        find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nnothing was measured")
        return 0
    import os

    started = start(os.environ)
    results: dict[str, Any] = {
        "machine": {**started.facts(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "shape": f"Qwen3-0.6B, {given.layers} layers, context {CONTEXT}, {STEPS} steps, prefill {PREFILL}",
        "copy_gb_per_s": copy_gb_per_s(),
        "models": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for weight_format in ("bf16", "q8_0"):
            path = write_shape(Path(folder, weight_format), weight_format, layers=given.layers)
            nbytes = weight_bytes(path)
            runs = [measure(path, started, given.rounds, batch) for batch in given.batches]
            # Tied weights: the table is read whole as the output matrix, so a token reads every byte once.
            limit = results["copy_gb_per_s"] * 1e9 / nbytes
            results["models"][weight_format] = {
                "weight_bytes": nbytes,
                "decode_limit_tokens_per_s": limit,
                "share_of_limit": runs[0]["decode_tokens_per_s"] / limit,
                "runs": runs,
            }
    text = json.dumps(results, indent=2)
    print(text)
    given.out.mkdir(parents=True, exist_ok=True)
    target = given.out / f"cuda-{datetime.now(UTC):%Y-%m-%d}.json"
    target.write_text(text + "\n", "utf-8")
    print(f"written: {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
