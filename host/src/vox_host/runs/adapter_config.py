"""PEFT's adapter_config.json, as we write it.

The fields are those that every PEFT since 0.10 knows: older ones refuse what they don't know,
and newer ones take their own default, which changes nothing, for what is not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from vox_host.runs.manifest import AdapterFacts
from vox_plugin_api.messages import AdapterConfig

__all__ = ["peft_config_text", "peft_text"]


def peft_config_text(facts: AdapterFacts) -> str:
    """Return the text of a run's file: with it and our tensors, PEFT computes what we serve."""
    return peft_text(facts.config, targets=facts.targets, base=facts.base_model.path)


def peft_text(adapter: AdapterConfig, *, targets: Sequence[str], base: str | None) -> str:
    """Return the file's text of any adapter.

    Args:
        targets: names of linear layers, whole or their last parts.
        base: where PEFT finds the base model, or what it is called.
    """
    config: dict[str, Any] = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        # PEFT writes a whole number where it is one, and readers in other languages expect that.
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "revision": None,
        # Both sides match a whole name or its last parts.
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapter.rank_stabilised,
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"
