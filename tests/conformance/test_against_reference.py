"""The demo model itself: our float64 forward, the recorded reference, and every lane."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lanes.batches import Sequences
from lanes.every_lane import make_lane
from lanes.tiny_models import open_model
from oracle.float64_forward import hidden_states, logits_of

FIXTURE = Path(__file__).parents[1] / "fixtures" / "gemma270m-ref.json"
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def weights(demo_gguf):
    pytest.importorskip("gguf")
    from oracle.gguf_weights import GgufWeights

    return GgufWeights(demo_gguf)


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


@pytest.mark.parametrize("name", ["numpy", "mens-cpu-ref"])
def test_every_logit_of_a_lane_is_near_the_exact_one(
    settings, weights, float_model_dir, real_text_ids, name, request
):
    loaded = open_model(float_model_dir, make_lane(name, request.config))
    # Exact bits at any batch: one lane of the other's positions would do, but numpy is slow.
    ids = real_text_ids[: 160 if name == "numpy" else 2048]
    hidden = hidden_states(settings, weights.get, ids)
    sequences, cache = Sequences(), loaded.model.new_cache(len(ids) // 128 + 1)
    worst = 0.0
    for begin in range(0, len(ids), 128):
        batch = sequences.step([(0, ids[begin : begin + 128])], all_logits=True)
        result = loaded.model.forward(batch, cache)
        assert result.faults == ()
        exact = logits_of(
            settings, weights.get, weights.get("embed_tokens.weight"), hidden[begin : begin + 128]
        )
        worst = max(worst, float(np.abs(loaded.model.ops.to_host(result.logits) - exact).max()))
    print(f"{name}: worst of {len(ids)} x {exact.shape[1]} logits is off by {worst:.3g}")
    assert worst < 1e-4
