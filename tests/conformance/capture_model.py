"""Captures the demo model answering a reference prompt on the CPU lane, for `vox_recompute`.

    PYTHONPATH=... python tests/conformance/capture_model.py OUT_FOLDER [--tokens 4] [--item 0]

OUT_FOLDER gets `script` and `data` (some 270 MB: the weights). Recompute it anywhere:
    vox_recompute OUT_FOLDER [avx2 | avx512 | neon | neon_dot | reference]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fixtures.demo_model import demo_gguf
from lanes.batches import Sequences
from lanes.tiny_models import open_model

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "gemma270m-ref.json"


def record_answer(out: Path, model_folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """Record a prompt, scored and read, and `tokens` greedy tokens after it; return them."""
    from mens_cpu_ref.capture import Capture, CapturingOps
    from mens_cpu_ref.library import load_library

    out.mkdir(parents=True, exist_ok=True)
    capture = Capture(load_library().kernels, out)
    ops = CapturingOps(capture)
    model = open_model(model_folder, ops).model
    # As `evaluate` scores a prompt: the logits of every position, in one digest.
    scored = model.forward(
        Sequences().step([(0, prompt)], all_logits=True), model.new_cache(1 + len(prompt) // 128)
    )
    capture.show("prompt", ops.to_host(scored.logits))
    sequences, cache = Sequences(), model.new_cache(1 + (len(prompt) + tokens) // 128)
    answer: list[int] = []
    for step in range(tokens):
        result = model.forward(sequences.step([(0, answer[-1:] or prompt)]), cache)
        assert not result.faults
        best = ops.argmax(result.logits)
        capture.show(f"logits/{step}", ops.to_host(result.logits))
        capture.show(f"token/{step}", best)
        answer.append(int(best[0]))
    capture.close()
    return answer


def record_demo(out: Path, *, item: int = 0, tokens: int = 4) -> list[int]:
    """Record the demo model; its weights pass through a folder inside `out`."""
    from vox_host.models.catalogue import Catalogue
    from vox_host.models.importing import import_model, open_source

    prompt = json.loads(FIXTURE.read_text())["items"][item]["input_ids"]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        source = open_source(str(demo_gguf()), environment=os.environ)
        catalogue = Catalogue(Path(folder))
        import_model(source, catalogue, name="demo", accept_license=True, progress=lambda *_: None)
        return record_answer(out, Path(folder) / "demo", prompt, tokens)


def main() -> int:
    """Record; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--item", type=int, default=0, help="number of the prompt in gemma270m-ref.json")
    given = parser.parse_args()
    answer = record_demo(given.out, item=given.item, tokens=given.tokens)
    size = sum(file.stat().st_size for file in given.out.iterdir())
    print(f"{given.out}: tokens {' '.join(map(str, answer))}, {np.ceil(size / 1e6):.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
