"""Measures the CUDA lane on this machine's GPU: decode, prefill, many requests at once, beside its limits.

    python bench/inference_gpu.py [--shapes 0.6b 8b] [--formats bf16 q8_0] [--rounds 3] [--transformers]
        [--out FOLDER]

Models of Qwen3's shapes with weights drawn by Philox; nothing is read from a disk. A decode step is one whole
step of the model with the choice of its token, as a worker runs it. The copy bandwidth and, with
`--transformers`, the same shape in bf16 with torch's own kernels are measured in the same run. Exit status 0
where there is no GPU; it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import use_sources

use_sources()

import numpy as np  # noqa: E402

from gpu.drawn_model import QWEN3_8B, drawn_model, repeated_on_gpu, weight_bytes_of  # noqa: E402
from gpu.shape_model import QWEN3_06B  # noqa: E402
from lanes.batches import Sequences  # noqa: E402
from mens_core.engine import Engine  # noqa: E402
from mens_core.models.model import Model  # noqa: E402
from mens_core.scheduler import StepLimits  # noqa: E402
from mens_core.sequence import SequenceRequest  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from mens_torch_cuda.start import Started, start  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402
from vox_plugin_api.messages import SamplingParams  # noqa: E402

COPIED = 2 << 30
CONTEXT, STEPS, VOCABULARY = 160, 32, 151936
SHAPES: dict[str, tuple[dict[str, Any], int]] = {"0.6b": (QWEN3_06B, 28), "8b": (QWEN3_8B, 36)}
PREFILLS = ((1, 512), (4, 2048))
CONCURRENT, ANSWER = 64, 48


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


def drawn_prompts(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, VOCABULARY, length)] for _ in range(count)]


def decode_tokens_per_s(model: Model, batch: int, rounds: int) -> float:
    """The median of the rounds; the first of them warms up."""
    ops, speeds, cache = model.ops, [], model.new_cache(2 * batch)
    for _ in range(rounds + 1):
        sequences = Sequences()
        for number, prompt in enumerate(drawn_prompts(batch, CONTEXT - 3)):
            model.forward(sequences.step([(number, prompt)]), cache)
        tokens = np.zeros(batch, np.int32)
        for step in range(3 + STEPS):
            if step == 3:
                began = time.perf_counter()
            rows = [(number, [int(token)]) for number, token in enumerate(tokens)]
            tokens = ops.argmax(model.forward(sequences.step(rows), cache).logits)
        speeds.append(batch * STEPS / (time.perf_counter() - began))
    return float(np.median(speeds[1:]))


def prefill_tokens_per_s(model: Model, prompts: int, length: int, rounds: int) -> float:
    """All prompts in one step."""
    cache, speeds = model.new_cache(prompts * -(-length // 128)), []
    rows = list(enumerate(drawn_prompts(prompts, length)))
    for _ in range(rounds + 1):
        batch = Sequences().step(rows)
        began = time.perf_counter()
        model.ops.argmax(model.forward(batch, cache).logits)
        speeds.append(prompts * length / (time.perf_counter() - began))
    return float(np.median(speeds[1:]))


def engine_tokens_per_s(model: Model) -> dict[str, float]:
    """Requests at once through the engine: tokens of the answers over the time from first to last."""
    blocks = CONCURRENT * 2
    engine = Engine(
        model,
        model.new_cache(blocks),
        vocab_size=VOCABULARY,
        context_length=256,
        blocks=blocks,
        max_sequences=CONCURRENT,
        limits=StepLimits(rows=2048),
    )
    results: dict[str, float] = {}
    for name in ("warm", "measured"):
        sequences = [
            engine.submit(
                SequenceRequest(
                    token_ids=tuple(prompt), max_tokens=ANSWER, sampling=SamplingParams(temperature=0)
                )
            )
            for prompt in drawn_prompts(CONCURRENT, 64)
        ]
        began, decoding = time.perf_counter(), 0.0
        while not all(sequence.is_done for sequence in sequences):
            engine.step()
            if not decoding and all(sequence.generated for sequence in sequences):
                decoding, made = time.perf_counter(), sum(sequence.generated for sequence in sequences)
            for sequence in sequences:
                sequence.ready.clear()
        ended, total = time.perf_counter(), sum(sequence.generated for sequence in sequences)
        if name == "measured":
            results = {
                "tokens_per_s": total / (ended - began),
                "tokens_per_s_once_all_decode": (total - made) / (ended - decoding),
            }
    return results


def measure(given: argparse.Namespace, started: Started, name: str, weight_format: str, copy: float) -> Any:
    """One shape in one format."""
    import torch

    shape, layers = SHAPES[name]
    layers = given.layers or layers
    ops = started.lane()
    began = time.perf_counter()
    model = drawn_model(ops, shape, weight_format, layers=layers, on_device=repeated_on_gpu)
    torch.cuda.synchronize()
    every, read = weight_bytes_of(model.config, weight_format)
    kv = 2 * layers * model.config.kv_heads * model.config.head_dim * 4 * (CONTEXT + STEPS // 2)
    limit = copy * 1e9 / (read + kv)
    result: dict[str, Any] = {
        "layers": layers,
        "weight_bytes": every,
        "read_bytes_per_token": read + kv,
        "draw_s": round(time.perf_counter() - began, 2),
        "decode_limit_tokens_per_s": limit,
        "decode": {},
        "prefill": {},
    }
    for batch in given.batches:
        result["decode"][str(batch)] = decode_tokens_per_s(model, batch, given.rounds)
    if "1" in result["decode"]:
        result["share_of_limit"] = result["decode"]["1"] / limit
    for prompts, length in PREFILLS:
        if given.no_prefill or (weight_format == "bf16" and length > 512 and not given.transformers):
            continue  # seconds a round, of use beside transformers' alone
        result["prefill"][f"{prompts}x{length}"] = prefill_tokens_per_s(
            model, prompts, length, min(given.rounds, 1)
        )
    if weight_format == "q8_0":
        result[f"engine_{CONCURRENT}_requests"] = engine_tokens_per_s(model)
    del model, ops
    torch.cuda.empty_cache()
    return result


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Ours over theirs in this run; of their ways to decode, over the fastest at that batch."""
    best = {batch: max(decode[batch] for decode in theirs["decode"].values()) for batch in ours["decode"]}
    found = {f"decode {batch}": ours["decode"][batch] / best[batch] for batch in best}
    found |= {
        f"prefill {what}": ours["prefill"][what] / speed
        for what, speed in theirs["prefill"].items()
        if what in ours["prefill"]
    }
    return found


def main() -> int:
    """Measure; print and write one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["bf16", "q8_0"])
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--transformers", action="store_true", help="the same shapes with transformers, bf16")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=["graph", "layers"],
        help="how transformers decodes: graph, layers, compile",
    )
    parser.add_argument("--name", default=f"cuda-{datetime.now(UTC):%Y-%m-%d}", help="of the file")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    given = parser.parse_args()
    try:
        find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nnothing was measured")
        return 0
    started = start(os.environ)
    copy = copy_gb_per_s()
    results: dict[str, Any] = {
        "machine": {**started.facts(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "conditions": f"context {CONTEXT}, {STEPS} steps, median of {given.rounds} rounds",
        "copy_gb_per_s": copy,
        "models": {},
    }
    target = given.out / f"{given.name}.json"
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.shapes:
        for weight_format in given.formats:
            results["models"][f"{name} {weight_format}"] = measure(given, started, name, weight_format, copy)
            # What was measured so far is there, whatever happens to the rest.
            target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
        if given.transformers:
            from gpu_transformers import measure_transformers

            shape, layers = SHAPES[name]
            theirs = measure_transformers(
                shape, given.layers or layers, given.batches, ways=given.ways, rounds=given.rounds
            )
            results["models"][f"{name} transformers bf16"] = theirs
            for weight_format in given.formats:
                ours = results["models"][f"{name} {weight_format}"]
                ours["over_transformers"] = ratios(ours, theirs)
            target.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    print(json.dumps(results, indent=2))
    print(f"written: {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
