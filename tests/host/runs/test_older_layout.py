"""The layout of before: `<layer>.lora_a.weight`, named by the manifest's base_key_map."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vox_host.errors import ModelError
from vox_host.runs.open import open_adapter

MANIFEST = {
    "version": 3,
    "rank": 4,
    "alpha": 8,
    "base_model": "/hub/models--Qwen--Qwen3-0.6B/snapshots/abc",
    "base_key_map": {
        "lm_head": "lm_head.weight",
        "q5": "model.layers.5.self_attn.q_proj.weight",
        "layers.0.mlp.up_proj": "model.layers.0.mlp.up_proj.weight",
    },
    "layer_order": ["q5", "layers.0.mlp.up_proj", "lm_head"],
}
TENSORS = {
    f"{layer}.lora_{part}.weight": np.ones((4, 40) if part == "a" else (rows, 4), np.float32)
    for layer, rows in {"lm_head": 97, "q5": 64, "layers.0.mlp.up_proj": 56}.items()
    for part in "ab"
}


def write(path: Path, manifest=None, tensors=None) -> Path:
    path.mkdir()
    (path / "adapter_manifest.json").write_text(json.dumps(MANIFEST if manifest is None else manifest))
    save_file(TENSORS if tensors is None else tensors, path / "candle_qlora_adapter.safetensors")
    return path


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_adapter(path)
    return caught.value


def test_it_is_read_by_the_names_of_the_base_s_tensors(tmp_path):
    source = open_adapter(write(tmp_path / "run"))
    assert source.origin == "older"
    assert source.base_name == MANIFEST["base_model"]
    assert dict(source.key_map) == {
        "base_model.model.lm_head.lora_A.weight": "lm_head.lora_a.weight",
        "base_model.model.lm_head.lora_B.weight": "lm_head.lora_b.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": "layers.0.mlp.up_proj.lora_a.weight",
        "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": "layers.0.mlp.up_proj.lora_b.weight",
        "base_model.model.model.layers.5.self_attn.q_proj.lora_A.weight": "q5.lora_a.weight",
        "base_model.model.model.layers.5.self_attn.q_proj.lora_B.weight": "q5.lora_b.weight",
    }
    assert (source.config.rank, source.config.alpha) == (4, 8.0)
    assert source.config.targets == ["lm_head", "layers.0.mlp.up_proj", "layers.5.self_attn.q_proj"]


def test_a_tied_head_is_called_by_the_embedding_s_tensor(tmp_path):
    manifest = {
        **MANIFEST,
        "base_key_map": {"lm_head": "model.embed_tokens.weight"},
        "layer_order": ["lm_head"],
    }
    tensors = {key: value for key, value in TENSORS.items() if key.startswith("lm_head")}
    assert open_adapter(write(tmp_path / "run", manifest, tensors)).config.targets == ["lm_head"]


def test_alpha_0_is_a_note(tmp_path):
    (note,) = open_adapter(write(tmp_path / "run", {**MANIFEST, "alpha": 0})).notes
    assert "alpha is 0" in note


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2), ("schema_version", 4), ("rank", ...), ("rank", 0), ("rank", "4"), ("alpha", ...),
        ("alpha", -1), ("alpha", True), ("alpha", 1e308),
        ("alpha", 10**400), ("alpha", 1e-300), ("base_key_map", ...), ("base_key_map", {}),
        ("base_key_map", {"lm_head": 3}), ("base_key_map", {"q5": "model.norm.weight"}),
        ("base_key_map", {"q5": "model.layers.5.self_attn.q_proj"}), ("layer_order", ["q5"]),
        ("layer_order", ["q5", "q5", "lm_head"]), ("use_rslora", True),
    ],
)  # fmt: skip
def test_a_manifest_that_says_something_else_is_refused_by_field(tmp_path, field, value):
    manifest = {**MANIFEST, field: value}
    if field == "base_key_map":
        del manifest["layer_order"]
    error = refused(write(tmp_path / "run", {k: v for k, v in manifest.items() if v is not ...}))
    assert error.code == "adapter-manifest"
    assert f"{field} is" in error.message


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda t: {k: v for k, v in t.items() if not k.startswith("q5")}, "lacks the tensors of q5"),
        (lambda t: {k: v for k, v in t.items() if k != "q5.lora_b.weight"}, "no lora_B"),
        (lambda t: {**t, "q6.lora_a.weight": t["q5.lora_a.weight"]}, "q6.lora_a.weight"),
        (lambda t: {**t, "q5.lora_c.weight": t["q5.lora_a.weight"]}, "q5.lora_c.weight"),
        (lambda t: {**t, "q5.lora_a.weight": np.ones((8, 40), np.float32)}, "[8, 40]"),
    ],
)
def test_tensors_and_manifest_must_be_of_one_adapter(tmp_path, change, mentions):
    error = refused(write(tmp_path / "run", tensors=change(dict(TENSORS))))
    assert error.code == "adapter-tensors"
    assert mentions in error.message


def test_without_its_manifest_it_can_t_be_read(tmp_path):
    (write(tmp_path / "run") / "adapter_manifest.json").unlink()
    assert refused(tmp_path / "run").code == "adapter-incomplete"
