"""The names of an adapter's tensors. Both sides of the wire spell them this way.

Names are those that PEFT gives them, so that its readers find every tensor.
"""

from __future__ import annotations

__all__ = ["adapter_keys", "parameter_key"]

_PREFIX = "base_model.model."
_DECODER = "model."
_HEAD = "lm_head."


def parameter_key(parameter: str) -> str:
    """Return the key of a parameter ("layers.0.self_attn.q_proj.lora_A")."""
    decoder = "" if parameter.startswith(_HEAD) else _DECODER
    return f"{_PREFIX}{decoder}{parameter}.weight"


def adapter_keys(layer: str) -> tuple[str, str]:
    """Return the keys of the A and the B of a linear layer ("layers.0.self_attn.q_proj", "lm_head")."""
    return parameter_key(f"{layer}.lora_A"), parameter_key(f"{layer}.lora_B")
