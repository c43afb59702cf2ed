"""What a folder's config.json says about sizes, checked before anything is imported.

Only what shapes depend on, and that numbers are numbers: what a plugin makes of the rest is its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError

__all__ = ["FAMILIES", "Sizes", "read_sizes"]

FAMILIES: Mapping[str, str] = {"qwen3": "qwen3", "gemma3": "gemma3", "gemma3_text": "gemma3"}
"""The family that each supported model_type belongs to."""
# What the published Gemma 3 files of 4B and more leave to their library's defaults.
_GEMMA3_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
_MAX_LAYERS = 4096
_MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What config.json says that shapes depend on."""

    family: str
    is_text_tower: bool
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    is_head_dim_derived: bool
    tie_word_embeddings: bool


def read_sizes(config: Mapping[str, Any], source: Path) -> Sizes:
    """Read the sizes out of a parsed config.json.

    Raises:
        ModelError: a family that isn't supported, or values of the wrong type or size, all of them named.
    """
    inner = config.get("text_config")
    is_text_tower = isinstance(inner, dict)
    fields: Mapping[str, Any] = inner if isinstance(inner, dict) else config
    model_type = fields.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or (model_type == "gemma3" and not is_text_tower):
        why = "is not supported" if family is None else "needs a text_config, which is not there"
        raise ModelError(
            "config-unsupported",
            f"{source}: model_type {model_type!r:.60} {why}; nothing was imported",
            facts=[("supported", "qwen3, gemma3_text, gemma3 with a text_config")],
            remedy="Choose a model of a supported family.",
        )
    defaults: Mapping[str, int] = _GEMMA3_DEFAULTS if family == "gemma3" else {}
    problems: list[str] = []
    where = "text_config." if is_text_tower else ""

    def size(key: str, default: int | None, *, minimum: int = 1, maximum: int = _MAX_SIZE) -> int:
        value = fields.get(key)
        if value is None:
            value = default
        if type(value) is not int or not minimum <= value <= maximum:
            found = f"is {value!r:.60}" if key in fields else "is missing"
            problems.append(f"{where}{key} {found}; wanted a whole number from {minimum} to {maximum}")
            return minimum
        return value

    def required(key: str, maximum: int = _MAX_SIZE) -> int:
        return size(key, defaults.get(key), maximum=maximum)

    heads, hidden_size = required("num_attention_heads"), required("hidden_size")
    is_derived = fields.get("head_dim") is None and "head_dim" not in defaults
    head_dim = size("head_dim", defaults.get("head_dim", max(hidden_size // heads, 2)), minimum=2)
    kv_heads = size("num_key_value_heads", defaults.get("num_key_value_heads", heads))
    required("max_position_embeddings")
    for key in ("rms_norm_eps", "rope_theta"):
        value = fields.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            problems.append(f"{where}{key} is {value!r:.60}; wanted a number above 0")
    tied = _tied(config, fields, family, problems)
    sizes = Sizes(
        family=family,
        is_text_tower=is_text_tower,
        vocab_size=required("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=required("intermediate_size"),
        layers=required("num_hidden_layers", _MAX_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        is_head_dim_derived=is_derived,
        tie_word_embeddings=tied,
    )
    if not problems:
        problems += _contradictions(sizes)
    if problems:
        raise ModelError(
            "config-invalid",
            f"{source}: {'; '.join(problems)}; nothing was imported",
            remedy="Fetch config.json again from where the model came from.",
        )
    return sizes


def _tied(config: Mapping[str, Any], fields: Mapping[str, Any], family: str, problems: list[str]) -> bool:
    for of in (fields, config):
        value = of.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                problems.append(f"tie_word_embeddings is {value!r:.60}; wanted true or false")
            return value is True
    return family == "gemma3"


def _contradictions(sizes: Sizes) -> list[str]:
    problems = []
    if sizes.heads % sizes.kv_heads:
        problems.append(f"num_key_value_heads {sizes.kv_heads} does not divide the {sizes.heads} heads")
    if sizes.is_head_dim_derived and sizes.hidden_size % sizes.heads:
        problems.append(f"head_dim is missing; hidden_size {sizes.hidden_size} / {sizes.heads} is not whole")
    elif sizes.head_dim % 2:
        problems.append(f"head_dim is {sizes.head_dim}; wanted an even number")
    return problems
