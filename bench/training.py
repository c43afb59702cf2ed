"""Training on the CPU lane beside `peft` on the same machine, in paired rounds.

    python bench/training.py --model MODEL_DIR [--peft-python PYTHON] [--rounds 3] [--examples 1]
        [--tokens 256] [--steps 2] [--least] [--out FILE]

Rank 8 on all linear layers, every token learned. Each round runs every side once, in turn, each in
a process of its own; ratios are taken within a round and their medians reported, and CPU seconds
beside the wall clock, since a busy machine stretches the latter. Ours trains on the quantised base;
theirs on random float weights of the same shape, on which its speed does not depend. Sides whose
packages are missing are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from serving import cpu_name

VOX = """
import json, sys, time, resource
from pathlib import Path
from mens_cpu_ref.plugin import backend
from vox_plugin_api import messages as m, train_messages as t
path, threads, examples, tokens, steps, least = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
lane = backend()
for _ in lane.load_model(m.LoadModelParams(model_dir=path, model_digest="0" * 64, threads=threads)):
    pass
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
adapter = t.AdapterConfig(rank=8, alpha=16.0, targets=targets)
room = None if least == "least" else 1 << 40
asked = t.TrainPlanParams(adapter=adapter, longest_example=tokens, examples=examples, memory_bytes=room)
(told,) = lane.train_plan(asked)
Path("/proc/self/clear_refs").write_text("5")
begin = t.TrainBeginParams(
    adapter=adapter,
    optimizer=t.OptimizerConfig(learning_rate=2e-4),
    remember_bytes=told.observation["remember_bytes"],
)
for _ in lane.train_begin(begin):
    pass
data = [t.TrainExample(token_ids=[(5 * i + 7 * e) % 20000 + 100 for i in range(tokens)],
                       loss_mask=[False] + [True] * (tokens - 1)) for e in range(examples)]
def step():
    for _ in lane.train_step(t.TrainStepParams(examples=data)):
        pass
planned = {"planned_mib": told.observation["total"] / 2**20}
"""

PEFT = """
import json, sys, time, resource, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config
from peft import LoraConfig, get_peft_model
path, threads, examples, tokens, steps, dtype = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
torch.set_num_threads(threads)
torch.manual_seed(0)
config = json.loads((Path(path) / "config.json").read_text())
kind = Gemma3TextConfig if config["model_type"] == "gemma3_text" else Qwen3Config
allowed = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype", "rope_scaling")}
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(kind(**allowed), dtype=getattr(torch, dtype))
model = model.to_empty(device="cpu")
model.tie_weights()
with torch.no_grad():
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.normal_(0, 0.02)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
model.train()
model.config.use_cache = False
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
data = torch.tensor([[(5 * i + 7 * e) % 20000 + 100 for i in range(tokens)] for e in range(examples)])
Path("/proc/self/clear_refs").write_text("5")
def step():
    model(input_ids=data, labels=data).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
planned = {}
"""

MEASURE = """
step()
wall, cpu = time.perf_counter(), time.process_time()
for _ in range(steps):
    step()
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
done = examples * tokens * steps
peak = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(json.dumps({"tokens_per_s": done / wall, "tokens_per_cpu_s": done / cpu,
                  "peak_mib": int(peak.split()[1]) / 1024, **planned}))
"""

Numbers = dict[str, Any]
GOALS = {"tokens_per_s over peft f32": (1.5, True), "peak_mib over peft f32": (0.4, False)}


def run_side(python: str, program: str, *arguments: object) -> Numbers | None:
    """Return what the program measured; None where it could not run, with the reason on stderr."""
    command = [python, "-c", program + MEASURE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print("  left out:", *done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    printed: Numbers = json.loads(done.stdout.strip().splitlines()[-1])
    return printed


def ratios(rounds: list[dict[str, Numbers | None]]) -> Numbers:
    """Medians of ours over each of theirs, each ratio taken within a round."""
    found: Numbers = {}
    for side in ("peft f32", "peft bf16"):
        for what in ("tokens_per_s", "tokens_per_cpu_s", "peak_mib"):
            pairs = [(r["vox"], r[side]) for r in rounds]
            of_rounds = [ours[what] / theirs[what] for ours, theirs in pairs if ours and theirs]
            if of_rounds:
                found[f"{what} over {side}"] = round(statistics.median(of_rounds), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="an imported model's directory")
    parser.add_argument("--peft-python", default=sys.executable, help="one with peft and transformers")
    parser.add_argument("--vox-python", default=sys.executable, help="one with the CPU lane")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--examples", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="measured, behind one that isn't")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--least", action="store_true", help="remember nothing: the least memory")
    options = parser.parse_args()
    shape = (options.model, options.threads, options.examples, options.tokens, options.steps)
    rounds: list[dict[str, Numbers | None]] = []
    for number in range(options.rounds):
        rounds.append(
            {
                "vox": run_side(options.vox_python, VOX, *shape, "least" if options.least else "free"),
                "peft f32": run_side(options.peft_python, PEFT, *shape, "float32"),
                "peft bf16": run_side(options.peft_python, PEFT, *shape, "bfloat16"),
            }
        )
        print(f"round {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr)
    medians = ratios(rounds)
    for name, (goal, is_more) in GOALS.items():
        if name in medians:
            is_met = medians[name] >= goal if is_more else medians[name] <= goal
            print(f"{name}: {medians[name]} (goal {goal}): {'met' if is_met else 'NOT met'}")
    report = {
        "cpu": cpu_name(),
        "threads": options.threads,
        "load_before": os.getloadavg()[0],
        "examples": options.examples,
        "tokens": options.tokens,
        "medians": medians,
        "rounds": rounds,
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
