"""PEFT's adapter_config.json, as we write it.

The fields are those that every PEFT since 0.10 knows: older ones refuse what they don't know,
and newer ones take their own default, which changes nothing, for what is not there.
"""

from __future__ import annotations

import json
from typing import Any

from vox_host.runs.manifest import AdapterFacts

__all__ = ["peft_config_text"]


def peft_config_text(facts: AdapterFacts) -> str:
    """Return the file's text: with it and our tensors, PEFT computes what we serve."""
    config: dict[str, Any] = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": facts.base_model.path,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        # PEFT writes a whole number where it is one, and readers in other languages expect that.
        "lora_alpha": int(facts.alpha) if facts.alpha.is_integer() else facts.alpha,
        "lora_dropout": facts.dropout,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": facts.rank,
        "rank_pattern": {},
        "revision": None,
        # Both sides match a whole name or its last parts.
        "target_modules": sorted(facts.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": facts.rank_stabilised,
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
