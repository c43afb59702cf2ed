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
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import open_model
from oracle.float64_forward import hidden_states, logits_of
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


def test_every_logit_of_the_numpy_lane_is_near_the_exact_one(settings, weights, float_model_dir):
    """Three texts side by side in one step; test_real_model_accuracy judges the shipped lane."""
    texts = [text["token_ids"][:30] for text in json.loads(TEXTS.read_text())["texts"].values()]
    model = open_model(float_model_dir, NumpyLane()).model
    batch = Sequences().step(list(enumerate(texts)), all_logits=True)
    result = model.forward(batch, model.new_cache(len(texts)))
    assert result.faults == ()
    exact = np.concatenate([exact_logits(settings, weights, ids) for ids in texts])
    worst = float(np.abs(result.logits - exact).max())
    print(f"of {exact.shape[0]} x {exact.shape[1]} logits the worst is off by {worst:.3g}")
    assert worst < 1e-4
