"""How fast the CPU lane multiplies for training: dX = dY W in every format, and a^T b by example.

    PYTHONPATH=... python bench/training_products.py [--threads 2] [--isa avx512] [--json]

Reported as 10^9 float operations per second, a multiply and an add being two, best and median of some
repetitions, beside the forward product with float32 weights of the same shape in the same run. With one
thread the process's CPU time is taken, which a busy machine disturbs less.
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
from quant_gemv import machine, random_matrix

from mens_core.ops import StoredTensor
from mens_core.training_ops import DropoutKey
from mens_cpu_ref import quantised
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.library import load_library
from mens_cpu_ref.update_library import UPDATE_OPERATORS
from mens_cpu_ref.update_ops import UpdateOps

QUANTISED = ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")


def weight(name: str, outputs: int, inputs: int, rng: np.random.Generator) -> StoredTensor:
    """Random weights in a format."""
    if name in QUANTISED:
        return random_matrix(name, outputs, inputs, rng)
    values = rng.standard_normal((outputs, inputs), dtype=np.float32)
    if name == "f16":
        data = values.astype(np.float16).tobytes()
    else:
        data = (
            (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if name == "bf16" else values.tobytes()
        )
    return StoredTensor(name, name, (outputs, inputs), memoryview(data))


def measure(
    ops: UpdateOps, rows: int, outputs: int, inputs: int, repetitions: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Time every product of one linear layer, all of them in each round."""
    rng = np.random.default_rng(7)
    x, dy = (Rows(rng.standard_normal((rows, width), dtype=np.float32)) for width in (inputs, outputs))
    u = Rows(rng.standard_normal((rows, 16), dtype=np.float32))
    whole = 2.0 * rows * outputs * inputs
    starts = np.array([0, rows // 2, rows], np.int32)
    index = np.arange(rows, dtype=np.int32)
    matrices = {
        name: ops.load_matrix(weight(name, outputs, inputs, rng))
        for name in ("f32", "f16", "bf16", *QUANTISED)
        if name not in QUANTISED or inputs % quantised.block_of(name) == 0
    }
    calls: dict[str, tuple[float, Callable[[], Any]]] = {
        "forward f32": (whole, lambda: ops.linear(x, matrices["f32"], name="y")),
        **{
            f"backward {name}": (whole, lambda m=m: ops.linear_backward(dy, m, name="dx"))  # type: ignore[misc]
            for name, m in matrices.items()
        },
        "products full": (whole, lambda: ops.example_products(dy, x, starts, name="dw")),
        "products dA (rank 16)": (
            2.0 * rows * 16 * inputs,
            lambda: ops.example_products(u, x, starts, name="da"),
        ),
        "products dB (rank 16)": (
            2.0 * rows * 16 * outputs,
            lambda: ops.example_products(dy, u, starts, name="db"),
        ),
        "dropout (elements)": (
            1.0 * rows * inputs,
            lambda: ops.dropout(x, 0.1, DropoutKey(1, 2, 3), index, index, name="d"),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, (_, call) in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {
        name: [operations / seconds / 1e9 for seconds in (min(times[name]), statistics.median(times[name]))]
        for name, (operations, _) in calls.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", default="")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--shapes", default="512x640x2048,64x2048x640", help="rows x outputs x inputs, ...")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = load_library()
    if options.isa:
        library.force_isa(options.isa)
    library.set_threads(options.threads)
    ops = UpdateOps({**library.kernels, **library.bind("vox_", UPDATE_OPERATORS)})
    clock = time.process_time if options.threads == 1 else time.perf_counter
    report = {"machine": machine(), "isa": library.isa(), "threads": options.threads, "shapes": {}}
    for shape in options.shapes.split(","):
        rows, outputs, inputs = map(int, shape.split("x"))
        report["shapes"][shape] = measure(ops, rows, outputs, inputs, options.repetitions, clock)
    report["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    if options.json:
        print(json.dumps(report, default=str))
        return 0
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(f"isa {report['isa']}, threads {options.threads}; 10^9 per second, best / median")
    for shape, figures in report["shapes"].items():
        for name, (best, median) in figures.items():
            print(f"{shape:16}{name:24}{best:8.1f} /{median:7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
