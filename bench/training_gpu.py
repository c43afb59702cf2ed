"""Training on the CUDA lane beside `peft` on the same GPU, in one run.

    python bench/training_gpu.py [--shapes 0.6b 8b] [--formats bf16 q8_0] [--peft] [--layers N] [--steps 2]
        [--rounds 2] [--profile] [--least] [--out FILE]

Rank 8 on all linear layers, 4 examples of 1,024 tokens, every token learned. Models of Qwen3's shapes with
weights drawn by Philox; peft's side has the same shape in bf16 with random weights, transformers' own
attention kernels and checkpointing. Sides take turns, `--rounds` times; a side's figure is its median. Memory
is what torch allocated at most; ours stands beside what was planned, with what is free on the GPU at first
to plan with, or nothing beyond the least (`--least`). `--profile` prints where one step's time goes, by
kernel. Exit status 0 where there is no GPU; it says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import use_sources

use_sources()

import numpy as np  # noqa: E402

from gpu.drawn_model import QWEN3_8B, drawn_model, repeated_on_gpu  # noqa: E402
from gpu.shape_model import QWEN3_06B  # noqa: E402
from mens_core.micro_batches import Example  # noqa: E402
from mens_core.trainer import Trainer, TrainerConfig  # noqa: E402
from mens_core.training_plan import plan_step  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from mens_torch_cuda.start import Started, free_memory, start  # noqa: E402
from mens_torch_cuda.training_lane import CudaTrainingOps  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402
from vox_plugin_api.train_messages import (  # noqa: E402
    AdapterConfig,
    OptimizerConfig,
    Schedule,
    TrainPlanParams,
)

SHAPES: dict[str, tuple[dict[str, Any], int]] = {"0.6b": (QWEN3_06B, 28), "8b": (QWEN3_8B, 36)}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXAMPLES, TOKENS, RANK = 4, 1024, 8
PEFT = "peft bf16"
_SHOWN = 24

Step = Callable[[], Any]
Numbers = dict[str, float]
Made = tuple[Step, Numbers]
"""A step, and what is known of its side without running it."""


def drawn_tokens(vocabulary: int) -> list[list[int]]:
    """One token more than is trained, since the first follows nothing."""
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, vocabulary, TOKENS + 1)] for _ in range(EXAMPLES)]


def vox_step(
    started: Started, shape: dict[str, Any], weight_format: str, layers: int, *, is_least: bool
) -> Made:
    """Ours: a whole optimizer step, as `vox-host train` plans it."""
    free, _ = free_memory()
    ops = CudaTrainingOps(started.device, started.lane())
    model = drawn_model(ops, shape, weight_format, layers=layers, on_device=repeated_on_gpu)
    config = TrainerConfig(
        adapter=AdapterConfig(rank=RANK, alpha=16.0, targets=TARGETS),
        optimizer=OptimizerConfig(learning_rate=2e-4),
        schedule=Schedule(),
        seed=7,
    )
    table = model.head.embedding
    shapes = {id(of.weight): of.shape for of in (table, *model.linears.values())}
    memory = plan_step(
        TrainPlanParams(
            adapter=config.adapter,
            longest_example=TOKENS + 1,
            examples=EXAMPLES,
            memory_bytes=None if is_least else free,
        ),
        model,
        ops,
        parameters=sum(rows * columns for rows, columns in shapes.values()),
        process_bytes=None,
    ).memory
    trainer = Trainer(model, ops, config, remember_bytes=memory.remember_bytes)
    examples = [
        Example(tuple(tokens), tuple(range(1, TOKENS + 1))) for tokens in drawn_tokens(shape["vocab_size"])
    ]

    def step() -> Any:
        running = trainer.train_step(examples)
        while True:
            try:
                next(running)
            except StopIteration as stop:
                return stop.value

    return step, {"planned_gib": memory.total / 2**30, "remembered_gib": memory.remember_bytes / 2**30}


def peft_step(shape: dict[str, Any], layers: int) -> Made:
    """Theirs, of the same shape: bf16, checkpointing, AdamW."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    settings = {k: v for k, v in shape.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.Qwen3Config(**{**settings, "num_hidden_layers": layers})
    with torch.device("cuda"):
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    lora = LoraConfig(r=RANK, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    data = torch.tensor([tokens[:TOKENS] for tokens in drawn_tokens(shape["vocab_size"])], device="cuda")

    def step() -> Any:
        loss = model(input_ids=data, labels=data).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, {}


def seconds_of(step: Step, steps: int) -> float:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def measure(make: Callable[[], Made], steps: int, profile: bool) -> Numbers:
    """A side by itself: made, warmed up by one step, measured, gone."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step, known = make()
    first = seconds_of(step, 1)
    seconds = seconds_of(step, steps)
    if profile:
        print_profile(step)
    return {
        "tokens_per_s": EXAMPLES * TOKENS / seconds,
        "step_s": seconds,
        "first_step_s": first,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        **known,
    }


def print_profile(step: Step) -> None:
    """One step's time on the GPU by kernel, and what the GPU waited."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        seconds = seconds_of(step, 1)
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"  one step, profiled: {seconds * 1e3:.1f} ms, of which kernels {total / 1e3:.1f}", flush=True)
    for event in events[:_SHOWN]:
        spent, count = event.self_device_time_total, event.count
        figures = f"{spent / 1e3:9.2f} ms {spent / total:6.1%} {count:6d} x {spent / count:9.1f} us"
        print(f"  {figures}  {event.key[:60]}")


def medians_of(found: Mapping[str, Sequence[Numbers]]) -> dict[str, Numbers]:
    """The median of each side's rounds, and ours over peft's."""
    medians = {
        side: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for side, rounds in found.items()
    }
    theirs = medians.get(PEFT)
    for side, ours in medians.items():
        if theirs is not None and side != PEFT:
            ours["speed_over_peft"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
            ours["memory_over_peft"] = ours["peak_gib"] / theirs["peak_gib"]
    return medians


def measure_shape(given: argparse.Namespace, started: Started, name: str) -> dict[str, Any]:
    """Every side of one shape, in turn."""
    shape, layers = SHAPES[name][0], given.layers or SHAPES[name][1]
    sides: dict[str, Callable[[], Made]] = {
        f"vox {kind}": partial(vox_step, started, shape, kind, layers, is_least=given.least)
        for kind in given.formats
    }
    if given.peft:
        sides[PEFT] = partial(peft_step, shape, layers)
    found: dict[str, list[Numbers]] = {side: [] for side in sides}
    for number in range(given.rounds):
        for side, make in sides.items():
            found[side].append(measure(make, given.steps, given.profile and number == 0))
            print(f"{name}, {layers} layers, {side}: {json.dumps(found[side][-1])}", flush=True)
    return {"layers": layers, "medians": medians_of(found), "rounds": found}


def main() -> int:
    """Measure; print and write one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--formats", nargs="*", default=["bf16", "q8_0"])
    parser.add_argument("--peft", action="store_true", help="measure peft beside it")
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a try")
    parser.add_argument("--steps", type=int, default=2, help="measured, behind one that isn't")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--least", action="store_true", help="remember nothing: the least memory")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    try:
        find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nnothing was measured")
        return 0
    started = start(os.environ)
    results: dict[str, Any] = {
        "machine": {**started.facts(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "conditions": f"{EXAMPLES} x {TOKENS} tokens, rank {RANK} on all linear layers, {given.steps} steps",
        "shapes": {},
    }
    for name in given.shapes:
        results["shapes"][name] = measure_shape(given, started, name)
        if given.out is not None:
            # What was measured so far is there, whatever happens to the rest.
            given.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(json.dumps({name: of["medians"] for name, of in results["shapes"].items()}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
