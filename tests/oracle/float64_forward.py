"""Gemma 3 and Qwen3 in true float64, written plainly in numpy from their descriptions.

Takes Hugging Face names and settings as they stand in a checkpoint and uses nothing of
`mens_core`, so that a mistake in the models cannot repeat itself here. Everything is float64:
norms, softmax, rotary angles. The whole sequence is run at once; there is no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
F64 = np.float64


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the forward needs to know; floats are exact as given."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    full_layers: frozenset[int]
    window: int | None
    theta: float
    local_theta: float | None = None
    linear_factor: float = 1.0
    scale: float
    """Of attention scores."""
    embed_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to each norm weight."""
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    inv_freq: Array | None = field(default=None)
    """In place of theta and factor, for full layers (YaRN)."""
    rotary_factor: float = 1.0


Get = Callable[[str], npt.NDArray[Any]]
"""A weight by name without prefix: "layers.0.mlp.up_proj.weight"."""


def settings_of(config: Mapping[str, Any]) -> Settings:
    """Settings from a plain text config.json of these families (old spelling, no YaRN)."""
    is_gemma = config["model_type"].startswith("gemma3")
    layers = config["num_hidden_layers"]
    full = range(layers)
    if is_gemma:
        pattern = config.get("sliding_window_pattern", 6)
        kinds = config.get("layer_types")
        full = [i for i in full if (kinds[i] == "full_attention" if kinds else i % pattern == pattern - 1)]
    scaling = config.get("rope_scaling") or {}
    head_dim = config["head_dim"]
    return Settings(
        family="gemma3" if is_gemma else "qwen3",
        layers=layers,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=head_dim,
        eps=config["rms_norm_eps"],
        full_layers=frozenset(full),
        window=config["sliding_window"] if is_gemma else None,
        theta=config["rope_theta"],
        local_theta=config["rope_local_base_freq"] if is_gemma else None,
        linear_factor=scaling.get("factor", 1.0) if scaling.get("rope_type") == "linear" else 1.0,
        scale=(config["query_pre_attn_scalar"] if is_gemma else head_dim) ** -0.5,
        embed_scale=config["hidden_size"] ** 0.5 if is_gemma else 1.0,
        norm_offset=1.0 if is_gemma else 0.0,
        logit_softcap=config.get("final_logit_softcapping"),
        attention_softcap=config.get("attn_logit_softcapping"),
    )


def forward(
    settings: Settings, get: Get, head: Get, token_ids: Sequence[int], last: int | None = None
) -> Array:
    """Return the float64 logits of the last `last` positions (None: all): [positions, V].

    `head` gives the output matrix for the name "lm_head.weight", tied or not.
    """
    hidden = hidden_states(settings, get, token_ids)
    return logits_of(settings, get, head("lm_head.weight"), hidden if last is None else hidden[-last:])


def hidden_states(settings: Settings, get: Get, token_ids: Sequence[int]) -> Array:
    """Return what the last layer makes of every position, before the final norm."""
    s = settings
    is_gemma = s.family == "gemma3"
    x = get("embed_tokens.weight")[list(token_ids)].astype(F64, copy=False) * s.embed_scale
    positions = np.arange(len(token_ids), dtype=F64)
    for i in range(s.layers):
        layer = f"layers.{i}."
        attended = _attention(s, get, i, _norm(s, x, get(layer + "input_layernorm.weight")), positions)
        if is_gemma:
            attended = _norm(s, attended, get(layer + "post_attention_layernorm.weight"))
        x = x + attended
        before = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
        expanded = _mlp(s, get, layer, _norm(s, x, get(f"{layer}{before}.weight")))
        if is_gemma:
            expanded = _norm(s, expanded, get(layer + "post_feedforward_layernorm.weight"))
        x = x + expanded
    return x


def logits_of(settings: Settings, get: Get, head: npt.NDArray[Any], hidden: Array) -> Array:
    """Return the logits of some hidden states: [rows, V]."""
    return np.concatenate([piece for _, piece in logit_pieces(settings, get, head, hidden)], axis=1)


def logit_pieces(
    settings: Settings, get: Get, head: npt.NDArray[Any], hidden: Array, width: int = 32768
) -> Iterator[tuple[slice, Array]]:
    """Yield the logits of `width` tokens at a time, so that a large vocabulary fits in memory."""
    x = _norm(settings, hidden, get("norm.weight"))
    for begin in range(0, len(head), width):
        tokens = slice(begin, begin + width)
        yield tokens, _cap(_linear(x, head[tokens]), settings.logit_softcap)


def _norm(s: Settings, x: Array, weight: npt.NDArray[Any]) -> Array:
    mean_square = np.mean(x**2, axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + s.eps) * (weight.astype(F64, copy=False) + s.norm_offset)


def _linear(x: Array, weight: npt.NDArray[Any]) -> Array:
    return x @ weight.astype(F64, copy=False).T


def _cap(x: Array, cap: float | None) -> Array:
    return x if cap is None else cap * np.tanh(x / cap)


def _rotate(s: Settings, x: Array, positions: Array, is_full: bool) -> Array:
    exponents = np.arange(0, s.head_dim, 2, dtype=F64) / s.head_dim
    theta = s.theta if is_full or s.local_theta is None else s.local_theta
    frequencies = theta**-exponents
    factor = 1.0
    if is_full:
        frequencies = s.inv_freq if s.inv_freq is not None else frequencies / s.linear_factor
        factor = s.rotary_factor
    angles = positions[:, None] * frequencies[None, :]
    cos, sin = np.cos(angles)[:, None, :] * factor, np.sin(angles)[:, None, :] * factor
    half = s.head_dim // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _attention(s: Settings, get: Get, i: int, x: Array, positions: Array) -> Array:
    name = f"layers.{i}.self_attn."
    is_full = i in s.full_layers
    q = _linear(x, get(name + "q_proj.weight")).reshape(len(x), s.heads, s.head_dim)
    k = _linear(x, get(name + "k_proj.weight")).reshape(len(x), s.kv_heads, s.head_dim)
    v = _linear(x, get(name + "v_proj.weight")).reshape(len(x), s.kv_heads, s.head_dim)
    q = _rotate(s, _norm(s, q, get(name + "q_norm.weight")), positions, is_full)
    k = _rotate(s, _norm(s, k, get(name + "k_norm.weight")), positions, is_full)
    distance = positions[:, None] - positions[None, :]
    hidden = distance < 0
    if not is_full and s.window is not None:
        hidden |= distance >= s.window
    heads = []
    for h in range(s.heads):
        g = h * s.kv_heads // s.heads
        scores = _cap(q[:, h] @ k[:, g].T * s.scale, s.attention_softcap)
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, g])
    return _linear(np.concatenate(heads, axis=1), get(name + "o_proj.weight"))


def _mlp(s: Settings, get: Get, layer: str, x: Array) -> Array:
    gate = _linear(x, get(layer + "mlp.gate_proj.weight"))
    up = _linear(x, get(layer + "mlp.up_proj.weight"))
    if s.family == "gemma3":
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        activated = 0.5 * gate * (1 + np.tanh(inner))
    else:
        activated = gate / (1 + np.exp(-gate))
    return _linear(activated * up, get(layer + "mlp.down_proj.weight"))
