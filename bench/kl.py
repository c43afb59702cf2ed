"""How far the CPU lane is from true float64 on the demo model's quantised file, beside llama.cpp.

Mean KL divergence over every position of 98 texts. llama.cpp's part is read from
tests/fixtures/llama_kl.json (made by tests/oracle/llama_kl.py). The lane's bits are the same on
every machine, so its part is too; the suite computes a share of it again and holds it against
the file written here.

    PYTHONPATH=plugin-api/src:host/src:plugins/mens-core/src:plugins/mens-cpu-ref/src \
        python bench/kl.py --gguf MODEL.gguf [--out bench/results]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lanes.demo_lane import cpu_lane, import_demo, logits, open_model
from oracle.divergence import compare, divergence
from oracle.float64_forward import hidden_states, logits_of
from oracle.gguf_weights import GgufWeights

LLAMA = Path(__file__).parents[1] / "tests" / "fixtures" / "llama_kl.json"


def main() -> None:
    """Measure, print, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    llama = json.loads(LLAMA.read_text())
    weights = GgufWeights(arguments.gguf)
    settings, head = weights.settings(), weights.get64("embed_tokens.weight")
    sequences: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ops = cpu_lane()
        model = open_model(import_demo(arguments.gguf, Path(folder)), ops).model
        for name, text in {**llama["texts"], **llama["passages"]}.items():
            hidden = hidden_states(settings, weights.get64, text["token_ids"])
            ours = 0.0
            for positions, rows in logits(model, ops, text["token_ids"]):
                true = logits_of(settings, weights.get64, head, hidden[positions])
                ours += sum(divergence(a, b) for a, b in zip(true, rows, strict=True))
            sequences[name] = {
                "positions": len(text["token_ids"]),
                "ours": float(f"{ours:.6e}"),
                "llama_cpp": float(f"{sum(text['kl']):.6e}"),
            }
            print(name, sequences[name], flush=True)
    facts = {"file_sha256": hashlib.sha256(arguments.gguf.read_bytes()).hexdigest()}
    facts |= {"llama_cpp_python": llama["llama_cpp_python"], "summary": summary(sequences)}
    facts |= {"sums_of_kl_in_nats": sequences}
    print(json.dumps(facts["summary"], indent=1))
    if arguments.out is not None:
        target = arguments.out / f"kl-{datetime.now(UTC):%Y-%m-%d}.json"
        target.write_text(json.dumps(facts, indent=1) + "\n")


def summary(sequences: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return means, ratio and its interval over all sequences."""
    positions = sum(row["positions"] for row in sequences.values())
    ours, theirs = ([row[who] for row in sequences.values()] for who in ("ours", "llama_cpp"))
    ratio = compare(ours, theirs)
    return {
        "sequences": len(sequences),
        "positions": positions,
        "mean_kl_ours": round(sum(ours) / positions, 6),
        "mean_kl_llama_cpp": round(sum(theirs) / positions, 6),
        "ratio": round(ratio.value, 4),
        "ratio_low": round(ratio.low, 4),
        "ratio_high": round(ratio.high, 4),
    }


if __name__ == "__main__":
    main()
