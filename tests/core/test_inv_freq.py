"""Stored rotary frequencies are compared and reported, never used."""

import numpy as np
import pytest

from lanes.batches import Sequences
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import GEMMA3, QWEN3, open_model, random_tensors, write_model
from vox_plugin_api.families import parse_config


def plain(theta, head_dim=16):
    return (theta ** -(np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


def notes_and_logits(path, config, extra):
    tensors = random_tensors(parse_config(config)) | extra
    loaded = open_model(write_model(path, config, tensors), NumpyLane())
    batch = Sequences().step([(0, [1, 2, 3])])
    return loaded.notes, loaded.model.forward(batch, loaded.model.new_cache(1)).logits.tobytes()


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", plain(1e6), np.float32),
        ("model.rotary_emb.inv_freq", plain(1e6), np.float32),
        ("model.rotary_emb.inv_freq", plain(1e6), np.float16),
    ],
)
def test_agreement_is_reported_and_changes_nothing(tmp_path, name, stored, dtype):
    notes, logits = notes_and_logits(tmp_path / "with", QWEN3, {name: stored.astype(dtype)})
    assert notes == ("1 stored inv_freq agree with the config and are not used",)
    assert logits == notes_and_logits(tmp_path / "without", QWEN3, {})[1]


@pytest.mark.parametrize(
    "stored", [plain(1e4), plain(1e6) * np.float32(1.001), plain(1e6)[:7], np.full(8, np.nan, np.float32)]
)
def test_a_difference_is_reported_by_name_and_changes_nothing(tmp_path, stored):
    name = "model.layers.2.self_attn.rotary_emb.inv_freq"
    notes, logits = notes_and_logits(tmp_path / "with", QWEN3, {name: stored})
    assert len(notes) == 1
    assert "differ" in notes[0]
    assert name in notes[0]
    assert logits == notes_and_logits(tmp_path / "without", QWEN3, {})[1]


def test_gemma_layers_are_compared_with_their_own_kind(tmp_path):
    right = {
        "model.rotary_emb.inv_freq": plain(1e6) / 8,
        "model.rotary_emb_local.inv_freq": plain(1e4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": plain(1e4),
        "model.layers.5.self_attn.rotary_emb.inv_freq": plain(1e6) / 8,
    }
    assert notes_and_logits(tmp_path / "right", GEMMA3, right)[0] == (
        "4 stored inv_freq agree with the config and are not used",
    )
    swapped = right | {"model.layers.5.self_attn.rotary_emb.inv_freq": plain(1e4)}
    assert "layers.5" in notes_and_logits(tmp_path / "swapped", GEMMA3, swapped)[0][0]
