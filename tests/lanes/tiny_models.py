"""Tiny checkpoints with random weights, written as a hub would deliver them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mens_core.models.load import LoadedModel, load_all
from mens_core.ops import Ops
from vox_plugin_api.checkpoint import Checkpoint, read_json_object
from vox_plugin_api.families import ModelConfig, expected_shapes, parse_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not 40 / 4
    "vocab_size": 97,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 20,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 2.5,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_activation": "gelu_pytorch_tanh",
}
BY_FAMILY = {"qwen3": QWEN3, "gemma3": GEMMA3}


def random_tensors(config: ModelConfig, seed: int = 0, prefix: str = "model.") -> dict[str, np.ndarray]:
    """Weights large enough that each part of the model moves the logits."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            values = rng.normal(0.2 if config.norm_plus_one else 1.2, 0.2, shape)
        elif name == "embed_tokens.weight":
            # Small, so that the eps of the first norms is felt.
            values = rng.normal(0, 0.04 / (config.embed_scale or 1), shape)
        else:
            values = rng.normal(0, 1.4 / np.sqrt(shape[1]), shape)
        tensors[prefix + name] = values.astype(np.float32)
    if not config.tie_word_embeddings:
        shape = (config.vocab_size, config.hidden_size)
        tensors["lm_head.weight"] = rng.normal(0, 0.3, shape).astype(np.float32)
    return tensors


def write_model(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None, *, seed: int = 0
) -> Path:
    """Write config.json and model.safetensors into `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    if tensors is None:
        tensors = random_tensors(parse_config(config), seed)
    save_file(tensors, path / "model.safetensors")
    return path


def open_model(path: Path, ops: Ops) -> LoadedModel:
    """Load a model directory into a lane."""
    config = parse_config(read_json_object(path / "config.json"))
    return load_all(config, Checkpoint.open(path), ops)
