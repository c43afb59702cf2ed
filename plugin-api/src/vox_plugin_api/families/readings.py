"""Readers of config.json keys that more than one family has."""

from __future__ import annotations

from collections.abc import Mapping

from vox_plugin_api.families.fields import Fields
from vox_plugin_api.families.float32 import float32
from vox_plugin_api.families.model_config import Activation, AttentionKind

__all__ = [
    "MAX_LAYERS",
    "activation",
    "architecture",
    "layer_types",
    "softcap",
    "stored_dtype",
    "tie_word_embeddings",
]

MAX_LAYERS = 4096
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_KINDS: Mapping[object, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding"}
_FULL: tuple[AttentionKind, ...] = ("full",)


def architecture(outer: Fields) -> str:
    """The checkpoint's own word for what it is."""
    value = outer.data.get("architectures")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return outer.text("model_type") or "unknown"


def activation(config: Fields, key: str, default: Activation) -> Activation:
    """The MLP's activation. The key is the family's own: transformers reads `hidden_act` for Qwen3 and never
    the other."""
    name = config.text(key)
    if name is None:
        return default
    if name not in _ACTIVATIONS:
        config.problem(key, " or ".join(map(repr, _ACTIVATIONS)))
        return default
    return _ACTIVATIONS[name]


def layer_types(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    """The kind of each layer, out of the list that config.json gives."""
    value = config.data["layer_types"]
    if not isinstance(value, list):
        config.problem("layer_types", "a list of 'full_attention' and 'sliding_attention'")
        return _FULL * layers
    for i, kind in enumerate(value):
        if not isinstance(kind, str) or kind not in _KINDS:
            config.problems.append(
                f"{config.path}layer_types[{i}] is {kind!r:.80}; "
                "wanted 'full_attention' or 'sliding_attention'"
            )
            return _FULL * layers
    if len(value) != layers:
        config.problems.append(
            f"{config.path}layer_types has {len(value)} entries; num_hidden_layers is {layers}"
        )
        return _FULL * layers
    return tuple(_KINDS[kind] for kind in value)


def softcap(config: Fields, key: str) -> float | None:
    """A cap on scores, or None where there is none."""
    return float32(config.number(key)) if config.has(key) else None


def tie_word_embeddings(outer: Fields, config: Fields, *, default: bool) -> bool:
    """Whether the embedding is the head too; `text_config` is asked first."""
    return config.boolean("tie_word_embeddings", outer.boolean("tie_word_embeddings", default))


def stored_dtype(outer: Fields, config: Fields) -> str | None:
    """The dtype that config.json says the weights are stored in; float16 is worth a note."""
    for fields in (config, outer):
        dtype = fields.text(fields.first_of("torch_dtype", "dtype"))
        if dtype is not None:
            if dtype == "float16":
                config.note("weights are stored as float16; everything is computed in float32")
            return dtype
    return None
