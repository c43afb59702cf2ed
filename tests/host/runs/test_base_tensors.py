"""The manifest's base_key_map, and the configuration that PEFT reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.runs import some_facts
from lanes.tiny_models import BY_FAMILY, write_model
from vox_host.errors import ModelError
from vox_host.runs.adapter_config import peft_config_text
from vox_host.runs.base_tensors import base_key_map


@pytest.mark.parametrize(
    ("family", "head"), [("gemma3", "model.embed_tokens.weight"), ("qwen3", "lm_head.weight")]
)
def test_each_layer_has_its_tensor(tmp_path: Path, family: str, head: str) -> None:
    model = write_model(tmp_path, BY_FAMILY[family])
    assert base_key_map(["lm_head", "layers.2.self_attn.q_proj"], model) == {
        "lm_head": head,
        "layers.2.self_attn.q_proj": "model.layers.2.self_attn.q_proj.weight",
    }


def test_a_layer_that_is_not_there(tmp_path: Path) -> None:
    model = write_model(tmp_path, BY_FAMILY["qwen3"])
    with pytest.raises(ModelError, match=r"layers\.9\.mlp\.up_proj"):
        base_key_map(["layers.9.mlp.up_proj"], model)
    with pytest.raises(ModelError):
        base_key_map(["lm_head"], tmp_path / "gone")


def test_what_peft_is_told() -> None:
    written = json.loads(peft_config_text(some_facts(alpha=8.5, rank_stabilised=True)))
    assert written["lora_alpha"] == 8.5
    assert written["use_rslora"] is True
    written = json.loads(peft_config_text(some_facts()))
    assert (written["r"], written["lora_alpha"], type(written["lora_alpha"])) == (4, 8, int)
    assert written["target_modules"] == ["lm_head", "up_proj"]
    assert written["base_model_name_or_path"] == "/models/tiny"
    assert (written["peft_type"], written["task_type"], written["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (written["use_rslora"], written["use_dora"], written["inference_mode"]) == (False, False, True)
    assert written["lora_dropout"] == 0.1
