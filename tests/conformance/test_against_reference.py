"""The demo model itself: our float64 forward, the recorded reference, and every lane."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.demo_model import demo_gguf
from lanes.batches import Sequences
from lanes.every_lane import make_lane
from lanes.tiny_models import open_model
from oracle.float64_forward import hidden_states, logit_pieces, logits_of
from oracle.gguf_weights import GgufWeights

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gemma270m-ref.json"
TEXTS = FIXTURE.with_name("llama_kl.json")
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def weights():
    return GgufWeights(demo_gguf())


@pytest.fixture(scope="module")
def settings(weights):
    # The file's eps is the float32 nearest to 1e-6; the reference was made with 1e-6 itself.
    return dataclasses.replace(weights.settings(), eps=1e-6)


def exact_logits(settings, weights, ids, rows=slice(None)):
    hidden = hidden_states(settings, weights.get, ids)[rows]
    return logits_of(settings, weights.get, weights.get("embed_tokens.weight"), hidden)


ITEMS = json.loads(FIXTURE.read_text())["items"]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["prompt"][:24])
def test_our_float64_forward_reproduces_the_recorded_one(settings, weights, item):
    logits = exact_logits(settings, weights, item["input_ids"], slice(-1, None))[0]
    recorded = item["top20_true_f64"]
    assert np.argsort(-logits)[:20].tolist() == recorded["ids"]
    assert np.abs(logits[recorded["ids"]] - recorded["logits"]).max() < 1e-11


@pytest.fixture(scope="module")
def float_model_dir(weights, tmp_path_factory):
    """The demo model with its weights dequantised to float32."""
    path = tmp_path_factory.mktemp("float")
    tensors = {f"model.{name}": weights.get(name) for name in weights.names()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(weights.config()))
    (path / "quant-metadata.json").write_text('{"version": 1, "tensors": {}, "norms_include_one": true}')
    yield path
    (path / "model.safetensors").unlink()  # a gigabyte


@pytest.mark.parametrize(("name", "positions"), [("numpy", 60), ("mens-cpu-ref", 2000)])
def test_every_logit_of_a_lane_is_near_the_exact_one(
    settings, weights, float_model_dir, name, positions, request
):
    """Three texts side by side, in chunks of 128 rows each."""
    texts = [text["token_ids"] for text in json.loads(TEXTS.read_text())["texts"].values()]
    texts = [ids[: positions // 2] for ids in texts]
    assert sum(map(len, texts)) >= positions
    loaded = open_model(float_model_dir, make_lane(name, request.config))
    head = weights.get("embed_tokens.weight")
    hidden = [hidden_states(settings, weights.get, ids) for ids in texts]
    sequences = Sequences()
    cache = loaded.model.new_cache(sum(len(ids) // 128 + 1 for ids in texts))
    worst = 0.0
    for begin in range(0, max(map(len, texts)), 128):
        chunks = {i: ids[begin : begin + 128] for i, ids in enumerate(texts) if begin < len(ids)}
        batch = sequences.step(list(chunks.items()), all_logits=True)
        result = loaded.model.forward(batch, cache)
        assert result.faults == ()
        found = loaded.model.ops.to_host(result.logits)
        exact_hidden = np.concatenate([hidden[i][begin : begin + 128] for i in chunks])
        for tokens, exact in logit_pieces(settings, weights.get, head, exact_hidden):
            worst = max(worst, float(np.abs(found[:, tokens] - exact).max()))
    print(f"{name}: of {sum(map(len, texts))} x {len(head)} logits the worst is off by {worst:.3g}")
    assert worst < 1e-4
