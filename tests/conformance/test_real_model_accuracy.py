"""The CPU lane on the demo model against true float64.

With float32 weights: every logit of every position of three long texts. With the file's own
quantised weights: the KL divergence, beside llama.cpp's, over 98 texts (`bench/kl.py` measured
it; a third of the short ones is measured again here, to hold the recording to this code).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.demo_model import demo_gguf
from lanes.demo_lane import cpu_lane, import_demo, logits, open_model
from oracle.divergence import compare, divergence
from oracle.float64_forward import hidden_states, logits_of
from oracle.gguf_weights import GgufWeights
from vox_host.models.demo_model import load_demo_manifest

ROOT = Path(__file__).parents[2]
LLAMA = json.loads((ROOT / "tests" / "fixtures" / "llama_kl.json").read_text())
RECORDED = json.loads(max((ROOT / "bench" / "results").glob("kl-*.json")).read_text())
SEQUENCES = RECORDED["sums_of_kl_in_nats"]


@pytest.fixture(scope="module")
def weights() -> GgufWeights:
    return GgufWeights(demo_gguf())


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return import_demo(demo_gguf(), tmp_path_factory.mktemp("models"))


def float_model(weights: GgufWeights, quantised: Path, target: Path) -> Path:
    """The same model with every weight dequantised to float32 by the `gguf` package."""
    target.mkdir()
    shutil.copy(quantised / "config.json", target)
    metadata = json.loads((quantised / "quant-metadata.json").read_text())
    (target / "quant-metadata.json").write_text(json.dumps({**metadata, "tensors": {}}))
    save_file(
        {f"model.{name}": np.ascontiguousarray(weights.dequantise(name)) for name in weights.names()},
        target / "model.safetensors",
    )
    return target


def true_and_lane(weights, model, ops, token_ids):
    """Yield for some positions at a time the true logits and the lane's."""
    settings, head = weights.settings(), weights.get64("embed_tokens.weight")
    hidden = hidden_states(settings, weights.get64, token_ids)
    for start, rows in logits(model, ops, token_ids):
        yield logits_of(settings, weights.get64, head, hidden[start : start + len(rows)]), rows


@pytest.mark.real_model
@pytest.mark.oracle
@pytest.mark.timeout(900)
def test_float_weights_give_every_logit_within_1e_4_of_float64(weights, quantised, tmp_path):
    ops = cpu_lane()
    model = open_model(float_model(weights, quantised, tmp_path / "float"), ops).model
    positions, worst = 0, 0.0
    for text in LLAMA["texts"].values():
        for true, rows in true_and_lane(weights, model, ops, text["token_ids"]):
            positions += len(rows)
            true -= rows  # in place: a quarter of a gigabyte each
            worst = float(np.max([worst, true.max(), -true.min()]))  # not a number stays that
    assert positions >= 2000
    assert worst < 1e-4, worst


@pytest.mark.real_model
@pytest.mark.oracle
@pytest.mark.timeout(900)
def test_what_was_recorded_is_what_this_lane_does(weights, quantised):
    """A recording of other code, or of another file, would prove nothing."""
    ops = cpu_lane()
    model = open_model(quantised, ops).model
    positions = 0
    for name, text in list(LLAMA["passages"].items())[::3]:
        found = 0.0
        for true, rows in true_and_lane(weights, model, ops, text["token_ids"]):
            found += sum(divergence(a, b) for a, b in zip(true, rows, strict=True))
        positions += len(text["token_ids"])
        # The lane's bits are the same everywhere; the record has seven digits.
        assert found == pytest.approx(SEQUENCES[name]["ours"], rel=1e-6), name
    assert positions >= 2000


def test_the_quantised_file_loses_no_more_than_llama_cpp_does_on_it():
    """The whole 95 % interval of the ratio of mean KLs lies below 1.05; it draws sequences, not positions."""
    texts = {**LLAMA["texts"], **LLAMA["passages"]}
    assert texts.keys() == SEQUENCES.keys()
    assert len(texts) >= 95
    for name, row in SEQUENCES.items():
        assert row["positions"] == len(texts[name]["kl"]) == len(texts[name]["token_ids"])
        assert row["llama_cpp"] == pytest.approx(sum(texts[name]["kl"]), rel=1e-6)
    assert sum(row["positions"] for row in SEQUENCES.values()) >= 8000
    assert RECORDED["file_sha256"] == load_demo_manifest("gemma-3-270m").model.sha256
    ratio = compare(*([row[who] for row in SEQUENCES.values()] for who in ("ours", "llama_cpp")))
    print(f"\nratio {ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]")
    assert ratio.high <= 1.05, ratio
    # Not by being too wide to tell, nor by an oracle that flatters us.
    assert ratio.high - ratio.low < 0.1, ratio
    assert ratio.low > 0.9, ratio
