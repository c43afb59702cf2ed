"""How fast the CPU lane multiplies by quantised weights, against the memory it must read.

    PYTHONPATH=... python bench/quant_gemv.py [--threads 2] [--isa avx512] [--json]

One row (decode) is bound by memory: reported as bytes of packed weights per second, beside a plain
read of that very memory by the same threads in the same run. Eight rows: the same, and how many times
more rows per second than one row gives. Many rows (prefill) are bound by arithmetic: 10^9 operations
per second, a multiply and an add being two. The matrix is larger than the caches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

import numpy as np

from mens_core.ops import StoredTensor
from mens_cpu_ref import quantised
from mens_cpu_ref.library import Library, load_library

FILE_BYTES = {"q8_0": 34, "q5_0": 22, "q4_0": 18, "q4_k": 144, "q5_k": 176, "q6_k": 210}
SCALES_AT = {"q8_0": (0,), "q5_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}


def random_matrix(weight_format, rows: int, columns: int, rng: np.random.Generator) -> StoredTensor:
    """Random blocks with small finite scales."""
    per_block = FILE_BYTES[weight_format]
    blocks = rng.integers(
        0, 256, (rows * columns // quantised.block_of(weight_format), per_block), dtype=np.uint8
    )
    for at in SCALES_AT[weight_format]:
        scales = rng.uniform(-0.01, 0.01, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return StoredTensor(weight_format, weight_format, (rows, columns), memoryview(blocks.reshape(-1)))


def median_seconds(call, repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def fastest_and_median(call, repetitions: int) -> tuple[float, float]:
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def plain_read(memory: np.ndarray, threads: int):
    """A sum over the same memory, split over threads (numpy releases the GIL)."""
    words = memory[: memory.nbytes // 8 * 8].view(np.uint64)
    parts = np.array_split(words, threads)

    def read() -> None:
        workers = [threading.Thread(target=np.add.reduce, args=(part,)) for part in parts[1:]]
        for worker in workers:
            worker.start()
        np.add.reduce(parts[0])
        for worker in workers:
            worker.join()

    return read


def measure(library: Library, weight_format, mib: int, columns: int, threads: int, repetitions: int):
    rng = np.random.default_rng(7)
    per_row = columns // quantised.block_of(weight_format) * FILE_BYTES[weight_format]
    stored = random_matrix(weight_format, (mib << 20) // per_row // 16 * 16, columns, rng)
    start = time.perf_counter()
    weight = quantised.pack_matrix(library.kernels, stored)
    packing = time.perf_counter() - start
    size = weight.packed.nbytes

    def product(matrix: quantised.QuantisedMatrix, rows: int):
        x = rng.standard_normal((rows, columns), dtype=np.float32)
        activations = quantised.quantise(library.kernels, x, matrix.block)
        return lambda: quantised.linear(library.kernels, activations, matrix)

    small = quantised.pack_matrix(library.kernels, random_matrix(weight_format, 1024, columns, rng))
    read = fastest_and_median(plain_read(weight.packed, threads), repetitions)
    one = fastest_and_median(product(weight, 1), repetitions)
    eight = fastest_and_median(product(weight, 8), repetitions)
    many = fastest_and_median(product(small, 384), repetitions)
    operations = 2 * 384 * 1024 * columns
    return {
        "format": weight_format,
        "read_gb_per_s": [size / t / 1e9 for t in read],
        "gemv_gb_per_s": [size / t / 1e9 for t in one],
        "rows8_gb_per_s": [size / t / 1e9 for t in eight],
        "rows8_tokens_per_row1_token": 8 * one[0] / eight[0],
        "gemm384_gop_per_s": [operations / t / 1e9 for t in many],
        "pack_gb_per_s": stored.data.nbytes / packing / 1e9,
        "packed_over_file": size / stored.data.nbytes,
    }


def machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "?")
    return {
        "cpu": model,
        "machine": platform.machine(),
        "logical_cpus": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", default="")
    parser.add_argument("--mib", type=int, default=160, help="size of the file matrix for one row")
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--formats", default=",".join(FILE_BYTES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = load_library()
    if options.isa:
        library.force_isa(options.isa)
    library.set_threads(options.threads)
    report = {"machine": machine(), "isa": library.isa(), "threads": options.threads}
    results = [
        measure(library, name, options.mib, options.columns, options.threads, options.repetitions)
        for name in options.formats.split(",")
    ]
    report["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    report["formats"] = results
    if options.json:
        print(json.dumps(report))
        return 0
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    print(f"isa {report['isa']}, threads {options.threads}; each figure is best / median")
    print(f"{'format':7}{'plain read':>16}{'1 row':>16}{'8 rows':>16}{'':6}{'384 rows':>16}{'size':>7}")
    for row in results:
        cells = [
            f"{row[key][0]:6.1f} /{row[key][1]:6.1f}"
            for key in ("read_gb_per_s", "gemv_gb_per_s", "rows8_gb_per_s")
        ]
        gemm = f"{row['gemm384_gop_per_s'][0]:6.0f} /{row['gemm384_gop_per_s'][1]:6.0f}"
        print(
            f"{row['format']:7}{cells[0]:>16}{cells[1]:>16}{cells[2]:>16}"
            f" x{row['rows8_tokens_per_row1_token']:4.1f}{gemm:>16}{row['packed_over_file']:7.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
