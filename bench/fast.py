"""Measures fast mode on this machine's GPU beside transformers and PEFT in the same run, bf16 on both sides.

    python bench/fast.py [--shapes 0.6b 8b] [--what prefill decode training] [--rounds 3] [--no-theirs]
        [--memory-gib 16 26] [--out FILE]

Models of Qwen3's shapes with drawn weights. Prefill: 4 prompts of 2,048 tokens in one step, the last row's
logits of each. Decode: whole steps with the choice of their tokens; theirs with a static cache, its
layers compiled and the step a CUDA graph.
Training: LoRA of rank 8 on all linear layers, steps of 4 x 1,024 tokens, every token learned; theirs with and
without checkpointing of layers; medians. Exit status 0 where there is no GPU; it says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gpu.sources import use_sources

use_sources()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_transformers import decode_theirs  # noqa: E402

from gpu.drawn_model import QWEN3_8B, drawn_model, repeated_on_gpu  # noqa: E402
from gpu.shape_model import QWEN3_06B  # noqa: E402
from lanes.batches import Sequences  # noqa: E402
from mens_core.grid_weights import GridMatrix  # noqa: E402
from mens_core.micro_batches import Example  # noqa: E402
from mens_core.models.model import Model  # noqa: E402
from mens_core.trainer import TrainerConfig  # noqa: E402
from mens_torch_cuda.fast import fused  # noqa: E402
from mens_torch_cuda.fast.ops import FastOps  # noqa: E402
from mens_torch_cuda.fast.trainer import FastTrainer  # noqa: E402
from mens_torch_cuda.fast.weights import FastMatrix  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402
from vox_plugin_api.train_messages import AdapterConfig, OptimizerConfig, Schedule  # noqa: E402

VOCABULARY = 151936
SHAPES: dict[str, tuple[dict[str, Any], int]] = {"0.6b": (QWEN3_06B, 28), "8b": (QWEN3_8B, 36)}
PROMPTS, LENGTH = 4, 2048
CONTEXT, STEPS = 160, 32
EXAMPLES, TOKENS = 4, 1024
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
GIB = 1 << 30


class DrawnOps(FastOps):
    """Takes weights that were drawn on the device."""

    def take_matrix(self, matrix: GridMatrix) -> FastMatrix:
        return FastMatrix(matrix.buffer.view(torch.bfloat16).view(matrix.rows, matrix.columns))


def ours(shape: dict[str, Any], layers: int) -> Model:
    ops = DrawnOps(torch.device("cuda"), facts={})
    return drawn_model(ops, shape, "bf16", layers=layers, on_device=repeated_on_gpu)


def theirs(shape: dict[str, Any], layers: int) -> Any:
    import transformers

    settings = {k: v for k, v in shape.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.Qwen3Config(**{**settings, "num_hidden_layers": layers})
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def let_go() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def drawn(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(0, VOCABULARY, length)] for _ in range(count)]


def timed(call: Any, rounds: int, warm: int = 2) -> float:
    """Median seconds of a call that ends when its work has ended."""
    seconds = []
    for _ in range(warm + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[warm:]))


def profiled(call: Any, rows: int = 14) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        call()
        torch.cuda.synchronize()
    kernels = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    for event in [e for e in kernels if e.self_device_time_total and "CUDA" in str(e.device_type)][:rows]:
        print(f"    {event.self_device_time_total / 1e3:9.3f} ms {event.count:6d} {event.key[:110]}")


# --- prefill and decode ------------------------------------------------------------------------


def prefill(model: Model, rounds: int, *, shows: bool) -> float:
    cache = model.new_cache(PROMPTS * -(-LENGTH // 128))
    batch = Sequences().step(list(enumerate(drawn(PROMPTS, LENGTH))))

    def call() -> None:
        model.ops.argmax(model.forward(batch, cache).logits)

    seconds = timed(call, rounds)
    if shows:
        profiled(call)
    return PROMPTS * LENGTH / seconds


def prefill_theirs(model: Any, rounds: int) -> float:
    ids = torch.randint(0, 1000, (PROMPTS, LENGTH), device="cuda")
    with torch.inference_mode():
        return PROMPTS * LENGTH / timed(lambda: model(ids, logits_to_keep=1), rounds)


def decode(model: Model, batch: int, rounds: int, *, shows: bool) -> float:
    speeds, cache = [], model.new_cache(2 * batch)
    for _ in range(rounds + 1):
        sequences = Sequences()
        model.forward(sequences.step(list(enumerate(drawn(batch, CONTEXT - 3)))), cache)
        tokens = np.zeros(batch, np.int32)
        for step in range(3 + STEPS):
            if step == 3:
                began = time.perf_counter()
            rows = [(number, [int(token)]) for number, token in enumerate(tokens)]
            tokens = model.ops.argmax(model.forward(sequences.step(rows), cache).logits)
        speeds.append(batch * STEPS / (time.perf_counter() - began))
    if shows:
        again = sequences.step([(number, [1]) for number in range(batch)])
        profiled(lambda: model.ops.argmax(model.forward(again, cache).logits), 12)
    return float(np.median(speeds[1:]))


# --- training ----------------------------------------------------------------------------------


def training(model: Model, rounds: int, memory_bytes: int, *, shows: bool) -> dict[str, float]:
    config = TrainerConfig(
        adapter=AdapterConfig(rank=8, alpha=16.0, targets=TARGETS),
        optimizer=OptimizerConfig(learning_rate=2e-4),
        schedule=Schedule(),
        seed=1,
    )
    trainer = FastTrainer(model, torch.device("cuda"), config, memory_bytes=memory_bytes)
    examples = [Example(tuple(ids), tuple(range(1, TOKENS))) for ids in drawn(EXAMPLES, TOKENS)]
    losses = []

    def step() -> None:
        steps = trainer.train_step(examples)
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                losses.append(stop.value.loss)
                return

    let_go()
    seconds = timed(step, rounds)
    if shows:
        profiled(step, 24)
    return {
        "tokens_per_s": EXAMPLES * TOKENS / seconds,
        "step_s": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "held_gib": torch.cuda.max_memory_reserved() / GIB,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def training_theirs(model: Any, rounds: int, *, checkpoints: bool) -> dict[str, float]:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(
        model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
    )
    adapted.train()
    adapted.config.use_cache = False
    if checkpoints:
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        adapted.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=2e-4)
    data = torch.tensor(drawn(EXAMPLES, TOKENS), device="cuda")

    def step() -> None:
        adapted(input_ids=data, labels=data).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    let_go()
    seconds = timed(step, rounds)
    result = {
        "tokens_per_s": EXAMPLES * TOKENS / seconds,
        "step_s": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "held_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    adapted.unload()
    return result


# --- all of it ---------------------------------------------------------------------------------


def measure(given: argparse.Namespace, name: str, memory_gib: float) -> dict[str, Any]:
    shape, layers = SHAPES[name]
    layers, result = given.layers or layers, {}
    said = lambda what, figure: print(f"{name} {what}: {json.dumps(figure)}", flush=True)  # noqa: E731

    def note(what: str, figure: Any) -> None:
        result[what] = figure
        said(what, figure)

    let_go()
    model = ours(shape, layers)
    if "prefill" in given.what:
        note("prefill", prefill(model, given.rounds, shows=given.profile))
    if "decode" in given.what:
        for batch in given.batches:
            note(f"decode {batch}", decode(model, batch, given.rounds, shows=given.profile))
    if "training" in given.what:
        note("training", training(model, given.rounds, int(memory_gib * GIB), shows=given.profile))
    del model
    let_go()
    if given.no_theirs:
        return result
    other = theirs(shape, layers)
    if "prefill" in given.what:
        note("transformers prefill", prefill_theirs(other, given.rounds))
    if "decode" in given.what and not given.no_compile:
        for batch in given.batches:
            speed, _ = decode_theirs(other, batch, CONTEXT, STEPS)
            note(f"transformers decode {batch}", speed)
    if "training" in given.what:
        for checkpoints in (True,) if given.checkpoints_only else (False, True):
            what = "peft training" + (" with checkpoints" if checkpoints else "")
            try:
                note(what, training_theirs(other, given.rounds, checkpoints=checkpoints))
            except torch.OutOfMemoryError as error:
                note(what, str(error).splitlines()[0])
    del other
    let_go()
    return result


def main() -> int:
    """Measure; print and write one JSON object; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--what", nargs="*", default=["prefill", "decode", "training"])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--layers", type=int, help="fewer than the shape has, for a try")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory-gib", type=float, nargs="*", default=[16, 26], help="for training, by shape"
    )
    parser.add_argument("--no-theirs", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave their compiled decode steps out")
    parser.add_argument(
        "--checkpoints-only", action="store_true", help="of theirs, checkpointed training only"
    )
    parser.add_argument("--profile", action="store_true", help="the kernels that take longest")
    parser.add_argument("--plain", action="store_true", help="without the kernels of fused.cu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    try:
        gpu = find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nnothing was measured")
        return 0
    if not given.plain:
        fused.use(gpu.capability)
    results: dict[str, Any] = {"gpu": gpu.name, "torch": gpu.torch, "rounds": given.rounds}
    limits = dict(zip(SHAPES, given.memory_gib, strict=False))
    for name in given.shapes:
        results[name] = measure(given, name, limits[name])
    if given.out is not None:
        given.out.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
