"""How far llama.cpp is from true float64 on the demo model: one KL divergence per position.

Run by hand where `llama-cpp-python` is installed; suite and `bench/kl.py` read the file it
writes, so that they can compare pairwise without building llama.cpp:

    python tests/oracle/llama_kl.py MODEL.gguf tests/fixtures/llama_kl.json
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle.divergence import divergence
from oracle.float64_forward import hidden_states, logits_of
from oracle.gguf_weights import GgufWeights
from oracle.texts import long_texts, passages


def main(model: Path, out: Path) -> None:
    """Write the file; takes some minutes on two cores."""
    from llama_cpp import Llama

    llama = Llama(str(model), n_ctx=2048, n_threads=2, n_batch=512, logits_all=True, verbose=False)
    weights = GgufWeights(model)
    settings, head = weights.settings(), weights.get64("embed_tokens.weight")

    def measure(text: str) -> dict[str, Any]:
        ids = llama.tokenize(text.encode())
        llama.reset()
        llama.eval(ids)
        hidden = hidden_states(settings, weights.get64, ids)
        rows: list[float] = []
        for start in range(0, len(ids), 128):
            true = logits_of(settings, weights.get64, head, hidden[start : start + 128])
            rows += [divergence(row, llama.scores[start + i]) for i, row in enumerate(true)]
        return {"token_ids": ids, "kl": [float(f"{row:.6e}") for row in rows]}

    facts: dict[str, Any] = {
        "llama_cpp_python": version("llama-cpp-python"),
        "machine": platform.processor() or platform.machine(),
    }
    for kind, texts in (("texts", long_texts()), ("passages", passages())):
        facts[kind] = {name: measure(text) for name, text in texts.items()}
    out.write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
