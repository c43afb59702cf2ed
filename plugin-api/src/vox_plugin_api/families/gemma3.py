"""What a config.json of Gemma 3, text, means. Its layers are in plugins that run it.

Source: Gemma 3 Technical Report, arXiv:2503.19786, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from vox_plugin_api.families import readings
from vox_plugin_api.families.fields import Fields
from vox_plugin_api.families.float32 import float32, inverse_square_root, square_root
from vox_plugin_api.families.model_config import AttentionKind, ModelConfig
from vox_plugin_api.families.rope import parse_global_rope, parse_local_rope

__all__ = ["read"]

_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
# What the published files of 4B and more leave to their library's defaults.
_DEFAULTS: Mapping[str, int] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
_THETA = Fraction(1_000_000)
_LOCAL_THETA = Fraction(10_000)
_PATTERN = 6


def read(outer: Fields, config: Fields, is_text_tower: bool) -> ModelConfig:
    """Read the settings in `config`; what they lack of a model's frame is in `outer`."""
    for key, value in _DEFAULTS.items():
        if not config.has(key):
            config.note(f"{config.path}{key} is missing; Gemma 3's default {value} was taken")

    def integer(key: str, minimum: int = 1) -> int:
        return config.integer(key, _DEFAULTS[key], minimum=minimum)

    hidden_size = config.integer("hidden_size")
    head_dim, context_length = integer("head_dim", 2), integer("max_position_embeddings")
    kinds = _kinds(config, config.integer("num_hidden_layers", maximum=readings.MAX_LAYERS))
    return ModelConfig(
        family="gemma3",
        architecture=readings.architecture(outer),
        is_text_tower=is_text_tower,
        vocab_size=integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        heads=integer("num_attention_heads"),
        kv_heads=integer("num_key_value_heads"),
        head_dim=head_dim,
        is_head_dim_derived=False,
        context_length=context_length,
        rms_eps=float32(config.number("rms_norm_eps", Fraction(1, 1_000_000))),
        activation=readings.activation(config, "hidden_activation", "gelu_tanh"),
        attention_kinds=kinds,
        window=config.integer("sliding_window") if "sliding" in kinds else None,
        ropes={
            "full": parse_global_rope(config, head_dim, context_length, _THETA),
            "sliding": parse_local_rope(config, head_dim, _LOCAL_THETA),
        },
        attention_scale=inverse_square_root(config.number("query_pre_attn_scalar", Fraction(256))),
        attention_softcap=readings.softcap(config, "attn_logit_softcapping"),
        logit_softcap=readings.softcap(config, "final_logit_softcapping"),
        embed_scale=square_root(Fraction(hidden_size)),
        layer_norms=_LAYER_NORMS,
        norm_plus_one=True,
        tie_word_embeddings=readings.tie_word_embeddings(outer, config, default=True),
        stored_dtype=readings.stored_dtype(outer, config),
        notes=tuple(config.notes),
    )


def _kinds(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    key = config.first_of("sliding_window_pattern", "_sliding_window_pattern")
    pattern = config.integer(key, _PATTERN)
    from_pattern: tuple[AttentionKind, ...] = tuple(
        "sliding" if (i + 1) % pattern else "full" for i in range(layers)
    )
    if not config.has("layer_types"):
        return from_pattern
    kinds = readings.layer_types(config, layers)
    if config.has(key) and kinds != from_pattern:
        config.note(f"{config.path}{key} ({pattern}) disagrees with layer_types, which was followed")
    return kinds
