"""What a model family is: which keys its config.json has, what they mean, which tensors it needs.

The one description that both sides read: the host before it imports a model, a plugin before
it loads one. Pure: parsed JSON and tensor headers in, frozen values or a `CheckpointError` out;
needs the standard library alone.

    config      config.json into a `ModelConfig`; what no family here runs is refused
    qwen3       the keys and norms of Qwen3, dense
    gemma3      the keys and norms of Gemma 3, text
    rope        rotary settings in all their spellings
    tensors     which tensors a config implies, and which of a checkpoint's serve for them
    readings    readers that the families share
    fields      typed values out of a JSON object, every problem collected
"""

from vox_plugin_api.families.config import UnknownFamilyError, parse_config, text_model_type
from vox_plugin_api.families.model_config import ModelConfig
from vox_plugin_api.families.rope import Rope, Yarn
from vox_plugin_api.families.tensors import (
    TensorPlan,
    adapted_shapes,
    expected_shapes,
    plan_tensors,
    stored_tensors,
)

__all__ = [
    "ModelConfig",
    "Rope",
    "TensorPlan",
    "UnknownFamilyError",
    "Yarn",
    "adapted_shapes",
    "expected_shapes",
    "parse_config",
    "plan_tensors",
    "stored_tensors",
    "text_model_type",
]
