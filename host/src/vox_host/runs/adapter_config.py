"""PEFT's adapter_config.json, as we write it.

The fields are those that every PEFT since 0.10 knows: older ones refuse what they don't know,
and newer ones take their own default, which changes nothing, for what is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vox_host.runs.manifest import AdapterFacts
from vox_plugin_api.messages import AdapterConfig, RankAndAlpha

__all__ = ["peft_config_text", "peft_text"]


def peft_config_text(facts: AdapterFacts) -> str:
    """Return the text of a run's file: with it and our tensors, PEFT computes what we serve."""
    return peft_text(facts.config, targets=facts.targets, base=facts.base_model.path)


def peft_text(
    adapter: AdapterConfig,
    *,
    targets: Sequence[str],
    base: str | None,
    exceptions: Mapping[str, RankAndAlpha] | None = None,
) -> str:
    """Return the file's text of any adapter.

    Args:
        targets: names of layers, whole or their last parts.
        exceptions: those of `adapter`, by the names that the model which PEFT finds has for them.
        base: where PEFT finds the base model, or what it is called.
    """
    exceptions = {} if exceptions is None else exceptions
    config: dict[str, Any] = {
        "alpha_pattern": {
            name: _whole_if_it_is(by.alpha) for name, by in exceptions.items() if by.alpha != adapter.alpha
        },
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
        "lora_alpha": _whole_if_it_is(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        # Both patterns are expressions; a dot in a name fits itself, and no other layer's name is as long.
        "rank_pattern": {name: by.rank for name, by in exceptions.items() if by.rank != adapter.rank},
        "revision": None,
        # Both sides match a whole name or its last parts.
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapter.rank_stabilised,
    }
    return json.dumps(config, indent=2, ensure_ascii=False) + "\n"


def _whole_if_it_is(alpha: float) -> int | float:
    # PEFT writes a whole number where it is one, and readers in other languages expect that.
    return int(alpha) if alpha.is_integer() else alpha
