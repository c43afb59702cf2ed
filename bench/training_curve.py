"""Fifty steps on the demo model, ours on its quantised weights and peft's on the same dequantised.

    python bench/training_curve.py --gguf MODEL.gguf --model MODEL_DIR --text FILE
        [--peft-python PYTHON] [--steps 50] [--tokens 48] [--out FILE]

Both begin with one adapter (ours, from the seed), take the same sequences in the same order with
the same AdamW, and say the loss of each step. The forward of a quantised matrix rounds activations
to int8, so the curves aren't equal; the report says how far apart they are at each step, beside how
far the loss moves by itself. Ends with status 1 where they are further apart than `LIMIT`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 0.05
"""Of the mean over the steps of |ours - theirs|, relative to their loss."""

VOX = """
import json, sys
from pathlib import Path
from mens_cpu_ref.plugin import backend
from vox_plugin_api import messages as m, train_messages as t
path, threads, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
data = json.loads((folder / "data.json").read_text())
lane = backend()
for _ in lane.load_model(m.LoadModelParams(model_dir=path, model_digest="0" * 64, threads=threads)):
    pass
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
begin = t.TrainBeginParams(adapter=t.AdapterConfig(rank=8, alpha=16.0, targets=targets),
                           optimizer=t.OptimizerConfig(learning_rate=2e-4), seed=1)
for _ in lane.train_begin(begin):
    pass
for _ in lane.train_save(t.TrainSaveParams(folder=str(folder / "first"))):
    pass
losses = []
for ids in data:
    example = t.TrainExample(token_ids=ids, loss_mask=[False] + [True] * (len(ids) - 1))
    for reply in lane.train_step(t.TrainStepParams(examples=[example])):
        if reply is not None:
            losses.append(reply.result.loss)
print(json.dumps(losses))
"""

PEFT = """
import json, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
gguf, threads, folder = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(threads)
data = json.loads((folder / "data.json").read_text())
model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM"))
loaded = set_peft_model_state_dict(model, load_file(folder / "first" / "adapter.safetensors"))
assert not loaded.unexpected_keys, loaded.unexpected_keys
assert not [key for key in loaded.missing_keys if "lora" in key], loaded.missing_keys
model.train()
model.config.use_cache = False
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4, weight_decay=0.0)
losses = []
for ids in data:
    batch = torch.tensor([ids])
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(json.dumps(losses))
"""


def run_side(python: str, program: str, *arguments: object) -> list[float]:
    """Return the loss of each step."""
    done = subprocess.run(
        [python, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"a side failed: {done.stderr.strip()[-2000:]}")
    losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return losses


def sequences(model: Path, text: Path, steps: int, tokens: int) -> list[list[int]]:
    """Cut a text into sequences, a beginning-of-text token before each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False).ids
    each = tokens - 1
    if len(ids) < steps * each:
        raise SystemExit(f"{text} has {len(ids)} tokens; {steps * each} are needed")
    return [[2, *ids[step * each : (step + 1) * each]] for step in range(steps)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the same file, imported: its directory")
    parser.add_argument("--text", type=Path, required=True, help="what is learned")
    parser.add_argument("--peft-python", default=sys.executable, help="with peft, transformers and gguf")
    parser.add_argument("--vox-python", default=sys.executable, help="with the CPU lane")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = sequences(options.model, options.text, options.steps, options.tokens)
        (folder / "data.json").write_text(json.dumps(data))
        ours = run_side(options.vox_python, VOX, options.model.resolve(), options.threads, folder)
        theirs = run_side(options.peft_python, PEFT, options.gguf.resolve(), options.threads, folder)
    gaps = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    report: dict[str, Any] = {
        "steps": options.steps,
        "tokens": options.tokens,
        "mean_relative_gap": statistics.mean(gaps),
        "worst_relative_gap": max(gaps),
        "first_ten_mean": [statistics.mean(ours[:10]), statistics.mean(theirs[:10])],
        "last_ten_mean": [statistics.mean(ours[-10:]), statistics.mean(theirs[-10:])],
        "vox": ours,
        "peft": theirs,
    }
    print(json.dumps({key: value for key, value in report.items() if key not in ("vox", "peft")}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 0 if report["mean_relative_gap"] < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
