"""How fast attention's backward is on the CPU lane, beside its forward.

    PYTHONPATH=... python bench/training_attention.py [--threads 2] [--isa avx512] [--json]

Reported as 10^9 float operations per second, a multiply and an add being two, over visible pairs alone: two
products a pair in the forward, five in the backward. With one thread the process's CPU time is taken, which a
busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from quant_gemv import machine

from mens_core.ops import AttentionSpec, Batch
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.backward_library import BACKWARD_OPERATORS
from mens_cpu_ref.backward_ops import BackwardOps
from mens_cpu_ref.library import load_library

SHAPES = "1x1024x4x1x256,4x256x4x1x256,1x512x16x8x128,1x2048x8x4x64,1x1024x4x1x256x512"
"""Sequences x positions x query heads x key/value heads x channels, and a window where there is one."""


def measure(
    ops: BackwardOps, shape: list[int], repetitions: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Time forward and backward, one after the other in each round."""
    sequences, length, heads, kv_heads, channels, *window = shape
    spec = AttentionSpec(heads, kv_heads, channels, float(np.float32(channels**-0.5)), *window)
    rows, blocks = sequences * length, -(-length // 128)
    batch = Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.tile(np.arange(length, dtype=np.int32), sequences),
        starts=np.arange(0, rows + 1, length, dtype=np.int32),
        block_tables=np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks),
        logit_rows=np.zeros(0, np.int32),
    )
    rng = np.random.default_rng(7)
    q, dy = (Rows(rng.standard_normal((rows, heads * channels), dtype=np.float32)) for _ in range(2))
    k, v = (Rows(rng.standard_normal((rows, kv_heads * channels), dtype=np.float32)) for _ in range(2))
    cache = ops.new_kv_cache(layers=1, kv_heads=kv_heads, head_dim=channels, blocks=sequences * blocks)
    ops.kv_append(cache, 0, k, v, batch)
    saved = ops.attention_saving(q, cache, 0, batch, spec, name="a")
    pairs = heads * sum(min(position + 1, spec.window or length) for position in batch.positions.tolist())
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "forward": (2, lambda: ops.attention_saving(q, cache, 0, batch, spec, name="a")),
        "backward": (5, lambda: ops.attention_backward(dy, q, saved, cache, 0, batch, spec, name="a")),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, (_, call) in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {
        name: [
            2e-9 * products * pairs * channels / seconds
            for seconds in (min(times[name]), statistics.median(times[name]))
        ]
        for name, (products, _) in calls.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", default="")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = load_library()
    if options.isa:
        library.force_isa(options.isa)
    library.set_threads(options.threads)
    ops = BackwardOps({**library.kernels, **library.bind("vox_", BACKWARD_OPERATORS)})
    clock = time.process_time if options.threads == 1 else time.perf_counter
    report: dict[str, Any] = {"machine": machine(), "isa": library.isa(), "threads": options.threads}
    report["shapes"] = {
        shape: measure(ops, [int(n) for n in shape.split("x")], options.repetitions, clock)
        for shape in options.shapes.split(",")
    }
    report["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    if options.json:
        print(json.dumps(report, default=str))
        return 0
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(f"isa {report['isa']}, threads {options.threads}; 10^9 per second, best / median")
    for shape, figures in report["shapes"].items():
        for name, (best, median) in figures.items():
            print(f"{shape:22}{name:10}{best:8.1f} /{median:7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
