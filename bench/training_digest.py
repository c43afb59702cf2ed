"""The adapter that 100 steps of 8 x 32 tokens give, as a digest: one for every lane, cut and count of GPUs.

    python bench/training_digest.py --model MODEL_DIR [--plugin mens_cpu_ref] [--steps 100] \\
        [--micro-batch 1,2,4,8] [--threads 1,2] [--devices 1,2] [--remember-mib 0,4096] [--out FILE]
    torchrun --nproc-per-node 2 bench/training_digest.py --model MODEL_DIR --plugin mens_torch_cuda \\
        --devices 2

Runs a plugin's backend in this process (its packages must be importable), once for each micro-batch
size, thread count, number of devices and MiB for what isn't made twice, and prints a line of JSON for
each; ends with status 1 where two digests differ, or where one isn't that of `--expect FILE`. The other
devices' processes are started by the backend, or are those of torchrun. Everything that decides bits is
in here: tokens are words of SHA-256, rank 8 on all linear layers, dropout, clipping, a cosine schedule.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import Backend
from vox_plugin_api.checkpoint import read_json_object
from vox_plugin_api.families import parse_config

EXAMPLES, TOKENS, SCHEDULE_STEPS = 8, 32, 100
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def examples_of(step: int, vocab_size: int) -> list[t.TrainExample]:
    """Return the examples of a step, counted from 0; half of each is learned."""
    made = []
    for example in range(EXAMPLES):
        words = [
            hashlib.sha256(f"{step} {example} {position}".encode()).digest() for position in range(TOKENS)
        ]
        tokens = [int.from_bytes(word[:4], "big") % vocab_size for word in words]
        mask = [position > 0 and word[4] % 2 == 0 for position, word in enumerate(words)]
        mask[-1] = True
        made.append(t.TrainExample(token_ids=tokens, loss_mask=mask))
    return made


def new_run(micro_batch: int, devices: int, remember_mib: int) -> t.TrainBeginParams:
    """Return the run's configuration."""
    return t.TrainBeginParams(
        adapter=t.AdapterConfig(rank=8, alpha=16.0, targets=TARGETS, dropout=0.05),
        optimizer=t.OptimizerConfig(learning_rate=2e-4, weight_decay=0.01, max_gradient_norm=1.0),
        schedule=t.Schedule(kind="cosine", warmup_steps=10, total_steps=SCHEDULE_STEPS),
        seed=7,
        micro_batch_size=micro_batch,
        devices=devices,
        remember_bytes=remember_mib << 20,
    )


def train(
    backend: Backend,
    model: Path,
    steps: int,
    micro_batch: int,
    threads: int,
    devices: int,
    remember_mib: int,
) -> dict[str, object]:
    """Load, train, unload; return what came out."""
    vocab_size = parse_config(read_json_object(model / "config.json")).vocab_size
    load = m.LoadModelParams(model_dir=str(model), model_digest="0" * 64, threads=threads)
    for _ in backend.load_model(load):
        pass
    for _ in backend.train_begin(new_run(micro_batch, devices, remember_mib)):
        pass
    began = time.perf_counter()
    outcomes: list[t.TrainStepResult] = []
    for step in range(steps):
        params = t.TrainStepParams(examples=examples_of(step, vocab_size))
        replies = [reply for reply in backend.train_step(params) if reply is not None]
        outcomes += [reply.result for reply in replies if isinstance(reply.result, t.TrainStepResult)]
        if (step + 1) % 10 == 0:
            print(f"  {step + 1} of {steps} steps, loss {outcomes[-1].loss:.4f}", file=sys.stderr)
    took_s = time.perf_counter() - began
    backend.unload(m.UnloadParams())
    bits = hashlib.sha256()
    for outcome in outcomes:
        bits.update(m.canonical_json(outcome))
    return {
        "steps": steps,
        "micro_batch": micro_batch,
        "threads": threads,
        "devices": devices,
        "remember_mib": remember_mib,
        "adapter_digest": outcomes[-1].adapter_digest,
        "steps_digest": bits.hexdigest(),
        "first_loss": m.f32_bits(outcomes[0].loss),
        "last_loss": m.f32_bits(outcomes[-1].loss),
        "seconds": round(took_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="an imported model's directory")
    parser.add_argument("--plugin", default="mens_cpu_ref", help="package whose `plugin.backend()` is run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--micro-batch", default="1,2,4,8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--devices", default="1")
    parser.add_argument("--remember-mib", default="0")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--expect", type=Path, help="lines of an earlier run: digests must be equal")
    options = parser.parse_args()
    is_under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_under_torchrun:
        ranks = importlib.import_module(f"{options.plugin}.ranks")
        if os.environ["RANK"] != "0":
            return int(ranks.serve_trainings(f"{options.plugin}.plugin:backend"))
    backend = importlib.import_module(f"{options.plugin}.plugin").backend()
    expected = []
    if options.expect is not None:
        expected = [json.loads(line) for line in options.expect.read_text("utf-8").splitlines()]
    found = {
        (line["adapter_digest"], line["steps_digest"]) for line in expected if line["steps"] == options.steps
    }
    asked = (options.threads, options.micro_batch, options.devices, options.remember_mib)
    for threads, micro_batch, devices, remember_mib in itertools.product(
        *(map(int, text.split(",")) for text in asked)
    ):
        made = {
            "plugin": options.plugin,
            **train(backend, options.model, options.steps, micro_batch, threads, devices, remember_mib),
        }
        found.add((made["adapter_digest"], made["steps_digest"]))
        print(json.dumps(made), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")
    if is_under_torchrun:
        ranks.dismiss()
    if len(found) != 1:
        print(f"the bytes differ: {len(found)} different outcomes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
