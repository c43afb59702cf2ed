"""What a config.json of Qwen3, dense, means. Its layers are in plugins that run it.

Source: Qwen3 Technical Report, arXiv:2505.09388, section 2.
"""

from __future__ import annotations

from fractions import Fraction

from vox_plugin_api.families import readings
from vox_plugin_api.families.fields import Fields
from vox_plugin_api.families.float32 import float32, inverse_square_root
from vox_plugin_api.families.model_config import AttentionKind, ModelConfig
from vox_plugin_api.families.rope import parse_global_rope

__all__ = ["read"]

_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def read(outer: Fields, config: Fields, is_text_tower: bool) -> ModelConfig:
    """Read the settings in `config`; what they lack of a model's frame is in `outer`."""
    heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    is_derived = not config.has("head_dim")
    head_dim = max(hidden_size // heads, 2) if is_derived else config.integer("head_dim", minimum=2)
    context_length = config.integer("max_position_embeddings")
    rope = parse_global_rope(config, head_dim, context_length, None)
    kinds = _kinds(config, config.integer("num_hidden_layers", maximum=readings.MAX_LAYERS))
    return ModelConfig(
        family="qwen3",
        architecture=readings.architecture(outer),
        is_text_tower=is_text_tower,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        is_head_dim_derived=is_derived,
        context_length=context_length,
        rms_eps=float32(config.number("rms_norm_eps", Fraction(1, 1_000_000))),
        activation=readings.activation(config, "hidden_act", "silu"),
        attention_kinds=kinds,
        window=config.integer("sliding_window") if "sliding" in kinds else None,
        ropes={"full": rope, "sliding": rope},
        attention_scale=inverse_square_root(Fraction(head_dim)),
        attention_softcap=None,
        logit_softcap=None,
        embed_scale=None,
        layer_norms=_LAYER_NORMS,
        norm_plus_one=False,
        tie_word_embeddings=readings.tie_word_embeddings(outer, config, default=False),
        stored_dtype=readings.stored_dtype(outer, config),
        notes=tuple(config.notes),
    )


def _kinds(config: Fields, layers: int) -> tuple[AttentionKind, ...]:
    if config.has("layer_types"):
        return readings.layer_types(config, layers)
    full = layers
    if config.boolean("use_sliding_window", False):
        full = min(config.integer("max_window_layers", 28, minimum=0), layers)
    return tuple("full" if i < full else "sliding" for i in range(layers))
