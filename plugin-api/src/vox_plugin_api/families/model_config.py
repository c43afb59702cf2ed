"""The constants of one text model, as its config.json states or implies them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from vox_plugin_api.families.rope import Rope

__all__ = ["Activation", "AttentionKind", "Family", "ModelConfig"]

Family = Literal["qwen3", "gemma3"]
AttentionKind = Literal["full", "sliding"]
Activation = Literal["silu", "gelu_tanh"]


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
    layer_norms: tuple[str, ...]
    """The norms over the model width that each layer has, by their names in the checkpoint."""
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
