"""The names of an adapter's tensors. Both sides of the wire spell them this way.

Names are those that PEFT gives them, so that its readers find every tensor.
"""

from __future__ import annotations

__all__ = ["EMBEDDING_LAYER", "adapter_keys", "parameter_key"]

EMBEDDING_LAYER = "embed_tokens"
"""The layer that looks rows up. PEFT names its update otherwise, and A's columns are tokens."""

_PREFIX = "base_model.model."
_DECODER = "model."
_HEAD = "lm_head."
_OF_EMBEDDING = f"{EMBEDDING_LAYER}.lora_"


def parameter_key(parameter: str) -> str:
    """Return the key of a parameter ("layers.0.self_attn.q_proj.lora_A", "embed_tokens.lora_A")."""
    if parameter.startswith(_OF_EMBEDDING):
        part = parameter.removeprefix(_OF_EMBEDDING)
        return f"{_PREFIX}{_DECODER}{EMBEDDING_LAYER}.lora_embedding_{part}"
    decoder = "" if parameter.startswith(_HEAD) else _DECODER
    return f"{_PREFIX}{decoder}{parameter}.weight"


def adapter_keys(layer: str) -> tuple[str, str]:
    """Return the keys of a layer's A and B ("layers.0.self_attn.q_proj", "lm_head", "embed_tokens")."""
    return parameter_key(f"{layer}.lora_A"), parameter_key(f"{layer}.lora_B")
