"""How fast the CPU lane multiplies by quantised weights, against the memory it must read.

    PYTHONPATH=... python bench/quant_gemv.py [--threads 2] [--isa avx512] [--json]

One row (decode) is bound by memory: reported as bytes of packed weights per second, beside a plain
read of the same amount of memory by the same threads in the same run. Many rows (prefill) are bound
by arithmetic: operations per second, a multiply and an add being two. Median of several repetitions,
each over a matrix larger than the caches (or the model's own small shapes, read in rotation).
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


def read_bandwidth(threads: int, size: int, repetitions: int) -> float:
    """Bytes per second of a plain sum over memory, split over threads (numpy releases the GIL)."""
    memory = np.ones(size // 8, np.uint64)
    parts = np.array_split(memory, threads)

    def read() -> None:
        workers = [threading.Thread(target=np.add.reduce, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    read()
    return memory.nbytes / median_seconds(read, repetitions)


def measure(library: Library, weight_format, rows: int, columns: int, batch: int, repetitions: int):
    """Seconds per product, packed bytes, and seconds to pack."""
    rng = np.random.default_rng(7)
    stored = random_matrix(weight_format, rows, columns, rng)
    start = time.perf_counter()
    weight = quantised.pack_matrix(library.kernels, stored)
    packing = time.perf_counter() - start
    x = rng.standard_normal((batch, columns), dtype=np.float32)
    activations = quantised.quantise(library.kernels, x, weight.block)
    quantised.linear(library.kernels, activations, weight)
    seconds = median_seconds(lambda: quantised.linear(library.kernels, activations, weight), repetitions)
    return seconds, weight.packed.nbytes, packing, stored.data.nbytes


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
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--formats", default=",".join(FILE_BYTES))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    library = load_library()
    if options.isa:
        library.force_isa(options.isa)
    library.set_threads(options.threads)
    report: dict[str, object] = {"machine": machine(), "isa": library.isa(), "threads": options.threads}
    before = read_bandwidth(options.threads, options.mib << 20, options.repetitions)
    rows_out = []
    columns = 2048
    for weight_format in options.formats.split(","):
        per_row = columns // quantised.block_of(weight_format) * FILE_BYTES[weight_format]
        rows = (options.mib << 20) // per_row // 16 * 16
        one, packed, packing, in_file = measure(library, weight_format, rows, columns, 1, options.repetitions)
        eight, *_ = measure(library, weight_format, rows, columns, 8, 3)
        many, *_ = measure(library, weight_format, 1024, columns, 384, 3)
        rows_out.append(
            {
                "format": weight_format,
                "gemv_gb_per_s": packed / one / 1e9,
                "rows8_gb_per_s": packed / eight / 1e9,
                "gemm384_gop_per_s": 2 * 384 * 1024 * columns / many / 1e9,
                "pack_gb_per_s": in_file / packing / 1e9,
                "packed_over_file": packed / in_file,
            }
        )
    after = read_bandwidth(options.threads, options.mib << 20, options.repetitions)
    report["plain_read_gb_per_s"] = [before / 1e9, after / 1e9]
    report["formats"] = rows_out
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{report['machine']}  isa {report['isa']}  threads {options.threads}")
    print(f"plain read: {before / 1e9:.1f} GB/s before, {after / 1e9:.1f} after")
    print(f"{'format':7} {'1 row':>9} {'of read':>8} {'8 rows':>9} {'384 rows':>10} {'pack':>9} {'size':>7}")
    for row in rows_out:
        print(
            f"{row['format']:7} {row['gemv_gb_per_s']:5.1f}GB/s "
            f"{row['gemv_gb_per_s'] * 1e9 / max(before, after):7.0%} "
            f"{row['rows8_gb_per_s']:5.1f}GB/s {row['gemm384_gop_per_s']:5.0f}GOP/s "
            f"{row['pack_gb_per_s']:5.2f}GB/s {row['packed_over_file']:7.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
