"""How far llama.cpp is from true float64 on the demo model: one KL divergence per position.

Run by hand where `llama-cpp-python` is installed; the suite reads the file it writes, so that
it can compare pairwise without building llama.cpp:

    python tests/oracle/llama_kl.py MODEL.gguf tests/fixtures/llama_kl.json
"""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[1]))

from oracle.float64_forward import forward
from oracle.gguf_weights import GgufWeights

TEXTS = Path(__file__).parents[1] / "fixtures" / "text"
Array = npt.NDArray[np.float64]


def log_softmax(logits: npt.NDArray[np.floating]) -> Array:
    """Natural-log probabilities in float64."""
    shifted = logits.astype(np.float64) - np.float64(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def divergence(true_logits: npt.NDArray[np.floating], logits: npt.NDArray[np.floating]) -> float:
    """KL(true || other) of one position, in nats."""
    true = log_softmax(true_logits)
    return float((np.exp(true) * (true - log_softmax(logits))).sum())


def main(model: Path, out: Path) -> None:
    """Write the file; takes about two minutes on two cores."""
    from llama_cpp import Llama

    llama = Llama(str(model), n_ctx=2048, n_threads=2, n_batch=512, logits_all=True, verbose=False)
    weights = GgufWeights(model)
    texts = {}
    for path in sorted(TEXTS.glob("*.txt")):
        ids = llama.tokenize(path.read_bytes())
        llama.reset()
        llama.eval(ids)
        true = forward(weights.settings(), weights.get, lambda _: weights.get("embed_tokens.weight"), ids)
        rows = [divergence(true[i], llama.scores[i]) for i in range(len(ids))]
        texts[path.stem] = {"token_ids": ids, "kl": [float(f"{row:.6e}") for row in rows]}
    facts = {
        "llama_cpp_python": version("llama-cpp-python"),
        "machine": platform.processor() or platform.machine(),
    }
    out.write_text(json.dumps({**facts, "texts": texts}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
