"""Gemma 3 and Qwen3 with low-rank updates in true float64, differentiated by torch.

The twin of `float64_forward`: the same settings, the same Hugging Face names, nothing of
`mens_core`. Gradients come from torch's autograd, AdamW from `torch.optim`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oracle.float64_forward import Settings

PREFIX = "base_model.model."


class Adapted:
    """Frozen weights, and PEFT-named low-rank updates that require gradients."""

    def __init__(
        self,
        settings: Settings,
        weights: Mapping[str, np.ndarray],
        adapter: Mapping[str, np.ndarray],
        scale: float,
    ) -> None:
        """`weights` by names as in a checkpoint without its prefix; the head as "lm_head.weight"."""
        self.settings = settings
        self.scale = scale
        self.weights = {name: torch.tensor(np.array(w), dtype=torch.float64) for name, w in weights.items()}
        self.adapter = {
            key: torch.tensor(np.array(w), dtype=torch.float64, requires_grad=True)
            for key, w in adapter.items()
        }

    def losses(self, token_ids: Sequence[int], trained: Sequence[int]) -> Tensor:
        """Minus the log-probability of each trained position's token."""
        logits = self.logits(token_ids)
        rows = torch.tensor([position - 1 for position in trained])
        wanted = torch.tensor([token_ids[position] for position in trained])
        return -torch.log_softmax(logits, dim=1)[rows, wanted]

    def mean_loss(self, examples: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
        """Over all trained tokens of (token ids, trained positions)."""
        losses = [self.losses(*example) for example in examples]
        return torch.cat(losses).sum() / sum(len(trained) for _, trained in examples)

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[positions, V]"""
        s = self.settings
        is_gemma = s.family == "gemma3"
        x = self._embedded(list(token_ids)) * s.embed_scale
        positions = torch.arange(len(token_ids), dtype=torch.float64)
        for i in range(s.layers):
            layer = f"layers.{i}."
            attended = self._attention(i, self._norm(x, f"{layer}input_layernorm"), positions)
            if is_gemma:
                attended = self._norm(attended, f"{layer}post_attention_layernorm")
            x = x + attended
            before = "pre_feedforward_layernorm" if is_gemma else "post_attention_layernorm"
            expanded = self._mlp(f"{layer}mlp.", self._norm(x, f"{layer}{before}"))
            if is_gemma:
                expanded = self._norm(expanded, f"{layer}post_feedforward_layernorm")
            x = x + expanded
        return _cap(self._linear(self._norm(x, "norm"), "lm_head"), s.logit_softcap)

    def _embedded(self, token_ids: list[int]) -> Tensor:
        rows = self.weights["embed_tokens.weight"][token_ids]
        key = f"{PREFIX}model.embed_tokens.lora_embedding_"
        if f"{key}A" not in self.adapter:
            return rows
        return rows + self.scale * (self.adapter[f"{key}A"].T[token_ids] @ self.adapter[f"{key}B"].T)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        stem = PREFIX + ("" if name == "lm_head" else "model.") + name
        if f"{stem}.lora_A.weight" not in self.adapter:
            return y
        a, b = (self.adapter[f"{stem}.lora_{part}.weight"] for part in "AB")
        return y + self.scale * (x @ a.T @ b.T)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        s = self.settings
        weight = self.weights[f"{name}.weight"] + s.norm_offset
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + s.eps) * weight

    def _rotate(self, x: Tensor, positions: Tensor, is_full: bool) -> Tensor:
        s = self.settings
        exponents = torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim
        theta = s.theta if is_full or s.local_theta is None else s.local_theta
        frequencies = theta**-exponents / (s.linear_factor if is_full else 1.0)
        angles = (positions[:, None] * frequencies)[:, None, :]
        a, b = x[..., : s.head_dim // 2], x[..., s.head_dim // 2 :]
        cos, sin = torch.cos(angles), torch.sin(angles)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def _attention(self, i: int, x: Tensor, positions: Tensor) -> Tensor:
        s, name = self.settings, f"layers.{i}.self_attn."
        is_full = i in s.full_layers
        q = self._linear(x, f"{name}q_proj").reshape(len(x), s.heads, s.head_dim)
        k = self._linear(x, f"{name}k_proj").reshape(len(x), s.kv_heads, s.head_dim)
        v = self._linear(x, f"{name}v_proj").reshape(len(x), s.kv_heads, s.head_dim)
        q = self._rotate(self._norm(q, f"{name}q_norm"), positions, is_full)
        k = self._rotate(self._norm(k, f"{name}k_norm"), positions, is_full)
        distance = positions[:, None] - positions[None, :]
        hidden = distance < 0
        if not is_full and s.window is not None:
            hidden = hidden | (distance >= s.window)
        heads = []
        for h in range(s.heads):
            g = h * s.kv_heads // s.heads
            scores = _cap(q[:, h] @ k[:, g].T * s.scale, s.attention_softcap)
            heads.append(torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=1) @ v[:, g])
        return self._linear(torch.cat(heads, dim=1), f"{name}o_proj")

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._linear(x, f"{name}gate_proj"), self._linear(x, f"{name}up_proj")
        if self.settings.family == "gemma3":
            activated = torch.nn.functional.gelu(gate, approximate="tanh")
        else:
            activated = torch.nn.functional.silu(gate)
        return self._linear(activated * up, f"{name}down_proj")


def _cap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
