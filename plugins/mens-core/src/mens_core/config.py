"""What a checkpoint's config.json says about its model, checked and made explicit.

Pure: a parsed JSON object goes in, a frozen `ModelConfig` comes out. Whether `text_config` is
present decides where the text model's settings (and, in `weights`, its tensors) are; the
model's name never does. What a family leaves out of its config files is filled in here, and
said in `notes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Any, Literal

import numpy as np

from mens_core.fields import Fields
from mens_core.ops import AttentionSpec
from mens_core.rope_config import GEMMA3_THETA, parse_global_rope, parse_local_rope
from mens_core.rotary import Rope
from vox_plugin_api.backend import BackendError

__all__ = ["Activation", "AttentionKind", "Family", "ModelConfig", "parse_config"]

Family = Literal["qwen3", "gemma3"]
AttentionKind = Literal["full", "sliding"]
Activation = Literal["silu", "gelu_tanh"]

_FAMILIES: Mapping[str, Family] = {"qwen3": "qwen3", "gemma3": "gemma3", "gemma3_text": "gemma3"}
_SUPPORTED = "qwen3, gemma3_text, and checkpoints whose text_config is one of these (such as gemma3)"
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ALL_FULL: tuple[AttentionKind, ...] = ("full",)
_GEMMA3_PATTERN = 6
# What the published Gemma 3 files of 4B and more leave to their library's defaults.
_GEMMA3_DEFAULTS: Mapping[str, int] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The constants of one text model. Floats are float32 values."""

    family: Family
    architecture: str
    """The checkpoint's own word for it, for reports."""
    is_text_tower: bool
    """The settings came from `text_config`: tensors carry a language model's prefix."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    is_head_dim_derived: bool
    """config.json has no head_dim, so hidden_size / heads was taken."""
    context_length: int
    """Positions the model was made for."""
    rms_eps: float
    activation: Activation
    attention_kinds: tuple[AttentionKind, ...]
    """One per layer."""
    window: int | None
    """Positions a sliding layer sees, its own included."""
    ropes: Mapping[AttentionKind, Rope]
    attention_scale: float
    attention_softcap: float | None
    logit_softcap: float | None
    embed_scale: float | None
    norm_plus_one: bool
    """The family multiplies by weight + 1 in its norms."""
    tie_word_embeddings: bool
    stored_dtype: str | None
    notes: tuple[str, ...]
    """What the user should know: defaults that were taken, settings that were not used."""

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.attention_kinds)

    def attention(self, layer: int) -> AttentionSpec:
        """Return the attention constants of one layer."""
        is_sliding = self.attention_kinds[layer] == "sliding"
        return AttentionSpec(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            window=self.window if is_sliding else None,
            softcap=self.attention_softcap,
        )


def parse_config(data: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face style config.json.

    Raises:
        BackendError: `config-unsupported`: a family or a setting this code does not run;
            `config-invalid`: values of the wrong type or size, all of them named.
    """
    outer = Fields(data, source=source)
    config = outer.child("text_config")
    outer.raise_problems("config-invalid")
    is_text_tower = config is not None
    if config is None:
        config = outer
    family = _family(outer, config, is_text_tower)
    _refuse_unsupported(config)
    read = _read_gemma3 if family == "gemma3" else _read_qwen3
    parsed = read(outer, config, is_text_tower)
    config.raise_problems("config-invalid")
    _check_shapes(config, parsed)
    return parsed


def _family(outer: Fields, config: Fields, is_text_tower: bool) -> Family:
    outer_type = outer.text("model_type")
    model_type = (config.text("model_type") or outer_type) if is_text_tower else outer_type
    config.raise_problems("config-invalid")
    if not is_text_tower and (
        outer_type == "gemma3" or outer.has("vision_config") or outer.has("audio_config")
    ):
        raise BackendError(
            "config-unsupported",
            f"{outer.source} describes a multimodal model ({outer_type}) but has no text_config, so its text "
            "model's sizes and tensors can't be told apart from the rest. Nothing was loaded.",
            facts={"model_type": outer_type, "supported": _SUPPORTED},
            remedy="Use the checkpoint's original config.json (it has a text_config) or a text-only export.",
        )
    family = _FAMILIES.get(model_type or "")
    if family is None:
        raise BackendError(
            "config-unsupported",
            f"{outer.source}: model_type {model_type!r} is not supported; supported are {_SUPPORTED}. "
            "Nothing was loaded.",
            facts={"model_type": model_type, "supported": _SUPPORTED},
            remedy="Choose a model of a supported family.",
        )
    return family


def _refuse_unsupported(config: Fields) -> None:
    """Settings that change the arithmetic and that the families we run never have on."""
    for key in ("attention_bias", "use_bidirectional_attention"):
        if config.boolean(key, False):
            config.problem(key, "false: nothing else is supported")
    if config.has("quantization_config"):
        config.problem("quantization_config", "none: import a GGUF file or unquantised safetensors")
    if config.has("partial_rotary_factor") and config.number("partial_rotary_factor") != 1:
        config.problem("partial_rotary_factor", "1")
    config.raise_problems("config-unsupported")


def _read_qwen3(outer: Fields, config: Fields, is_text_tower: bool) -> ModelConfig:
    heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    is_derived = not config.has("head_dim")
    head_dim = max(hidden_size // heads, 2) if is_derived else config.integer("head_dim", minimum=2)
    context_length = config.integer("max_position_embeddings")
    layers = config.integer("num_hidden_layers", maximum=4096)
    rope = parse_global_rope(config, head_dim, context_length, None)
    kinds = _qwen3_kinds(config, layers)
    return ModelConfig(
        family="qwen3",
        architecture=_architecture(outer),
        is_text_tower=is_text_tower,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        is_head_dim_derived=is_derived,
        context_length=context_length,
        rms_eps=_float32(config.number("rms_norm_eps", Fraction(1, 1_000_000))),
        activation=_activation(config, "hidden_act", "silu"),
        attention_kinds=kinds,
        window=config.integer("sliding_window") if "sliding" in kinds else None,
        ropes={"full": rope, "sliding": rope},
        attention_scale=_inverse_square_root(Fraction(head_dim)),
        attention_softcap=None,
        logit_softcap=None,
        embed_scale=None,
        norm_plus_one=False,
        tie_word_embeddings=_tie(outer, config, default=False),
        stored_dtype=_stored_dtype(outer, config),
        notes=tuple(config.notes),
    )


def _read_gemma3(outer: Fields, config: Fields, is_text_tower: bool) -> ModelConfig:
    for key, value in _GEMMA3_DEFAULTS.items():
        if not config.has(key):
            config.note(f"{config.path}{key} is missing; Gemma 3's default {value} was taken")

    def integer(key: str, minimum: int = 1) -> int:
        return config.integer(key, _GEMMA3_DEFAULTS[key], minimum=minimum)

    hidden_size = config.integer("hidden_size")
    head_dim, context_length = integer("head_dim", 2), integer("max_position_embeddings")
    kinds = _gemma3_kinds(config, config.integer("num_hidden_layers", maximum=4096))
    return ModelConfig(
        family="gemma3",
        architecture=_architecture(outer),
        is_text_tower=is_text_tower,
        vocab_size=integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        heads=integer("num_attention_heads"),
        kv_heads=integer("num_key_value_heads"),
        head_dim=head_dim,
        is_head_dim_derived=False,
        context_length=context_length,
        rms_eps=_float32(config.number("rms_norm_eps", Fraction(1, 1_000_000))),
        activation=_activation(config, "hidden_activation", "gelu_tanh"),
        attention_kinds=kinds,
        window=config.integer("sliding_window") if "sliding" in kinds else None,
        ropes={
            "full": parse_global_rope(config, head_dim, context_length, GEMMA3_THETA),
            "sliding": parse_local_rope(config, head_dim),
        },
        attention_scale=_inverse_square_root(config.number("query_pre_attn_scalar", Fraction(256))),
        attention_softcap=_softcap(config, "attn_logit_softcapping"),
        logit_softcap=_softcap(config, "final_logit_softcapping"),
        embed_scale=_square_root(Fraction(hidden_size)),
        norm_plus_one=True,
        tie_word_embeddings=_tie(outer, config, default=True),
        stored_dtype=_stored_dtype(outer, config),
        notes=tuple(config.notes),
    )


def _qwen3_kinds(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    if config.has("layer_types"):
        return _layer_types(config, layers)
    full = layers
    if config.boolean("use_sliding_window", False):
        full = min(config.integer("max_window_layers", 28, minimum=0), layers)
    return tuple("full" if i < full else "sliding" for i in range(layers))


def _gemma3_kinds(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    key = config.first_of("sliding_window_pattern", "_sliding_window_pattern")
    pattern = config.integer(key, _GEMMA3_PATTERN)
    from_pattern: tuple[AttentionKind, ...] = tuple(
        "sliding" if (i + 1) % pattern else "full" for i in range(layers)
    )
    if not config.has("layer_types"):
        return from_pattern
    kinds = _layer_types(config, layers)
    if config.has(key) and kinds != from_pattern:
        config.note(f"{config.path}{key} ({pattern}) disagrees with layer_types, which was followed")
    return kinds


def _layer_types(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    names: Mapping[object, AttentionKind] = {"full_attention": "full", "sliding_attention": "sliding"}
    value = config.data["layer_types"]
    if not isinstance(value, list) or not all(isinstance(v, str) and v in names for v in value):
        config.problem("layer_types", "a list of 'full_attention' and 'sliding_attention'")
        return _ALL_FULL * layers
    if len(value) != layers:
        config.problems.append(
            f"{config.path}layer_types has {len(value)} entries; num_hidden_layers is {layers}"
        )
        return _ALL_FULL * layers
    return tuple(names[v] for v in value)


def _architecture(outer: Fields) -> str:
    value = outer.data.get("architectures")
    if isinstance(value, list) and value and isinstance(value[0], str):
        return value[0]
    return outer.text("model_type") or "unknown"


def _activation(config: Fields, key: str, default: Activation) -> Activation:
    """The key is the family's own: transformers reads `hidden_act` for Qwen3 and never the other."""
    name = config.text(key)
    if name is None:
        return default
    if name not in _ACTIVATIONS:
        config.problem(key, " or ".join(map(repr, _ACTIVATIONS)))
        return default
    return _ACTIVATIONS[name]


def _softcap(config: Fields, key: str) -> float | None:
    return _float32(config.number(key)) if config.has(key) else None


def _tie(outer: Fields, config: Fields, *, default: bool) -> bool:
    return config.boolean("tie_word_embeddings", outer.boolean("tie_word_embeddings", default))


def _stored_dtype(outer: Fields, config: Fields) -> str | None:
    for fields in (config, outer):
        dtype = fields.text(fields.first_of("torch_dtype", "dtype"))
        if dtype is not None:
            if dtype == "float16":
                config.note("weights are stored as float16; everything is computed in float32")
            return dtype
    return None


def _check_shapes(config: Fields, parsed: ModelConfig) -> None:
    if parsed.heads % parsed.kv_heads:
        config.problem("num_key_value_heads", f"a divisor of num_attention_heads ({parsed.heads})")
    if parsed.head_dim % 2:
        key = "hidden_size" if parsed.is_head_dim_derived else "head_dim"
        config.problem(key, f"an even head_dim (it is {parsed.head_dim}): rotary pairs need one")
    if parsed.is_head_dim_derived and parsed.hidden_size % parsed.heads:
        config.problem(
            "head_dim", f"it: hidden_size {parsed.hidden_size} / {parsed.heads} heads is not whole"
        )
    config.raise_problems("config-invalid")


def _float32(value: Fraction) -> float:
    # Twice rounded, by way of the float64 that the text meant.
    return float(np.float32(float(value)))


def _square_root(value: Fraction) -> float:
    """The float32 nearest to sqrt(value), from integers."""
    # What isqrt cuts off is marked by one sticky bit below 80 fractional bits, so rounding once more
    # to 24 bits gives what rounding the exact root would.
    scaled = (value.numerator << 160) // value.denominator
    root = isqrt(scaled)
    sticky = 0 if root * root == scaled else 1
    return _nearest_float32(Fraction(2 * root + sticky, 1 << 81))


def _inverse_square_root(value: Fraction) -> float:
    return _square_root(1 / value)


def _nearest_float32(value: Fraction) -> float:
    shift = value.numerator.bit_length() - value.denominator.bit_length() - 24
    scaled = value / Fraction(2) ** shift
    while scaled >= 1 << 24:
        scaled, shift = scaled / 2, shift + 1
    return float(round(scaled) * Fraction(2) ** shift)
