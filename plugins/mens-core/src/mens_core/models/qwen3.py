"""Qwen3, dense: pre-norm residual layers with a SiLU-gated MLP.

Source: Qwen3 Technical Report, arXiv:2505.09388, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from mens_core.models.layers import Attention, GatedMlp, Norm
from mens_core.ops import Batch, KvCache, Ops, RotaryTable, Tensor
from mens_core.weights import Weights
from vox_plugin_api.families.model_config import ModelConfig

__all__ = ["Layer"]


@dataclass(frozen=True, slots=True)
class Layer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    mlp: GatedMlp
    attention_residual: str
    mlp_residual: str

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, layer: int, rotary: RotaryTable) -> Layer:
        """Load one layer."""
        name = f"layers.{layer}"
        return cls(
            input_norm=Norm.load(config, weights, f"{name}.input_layernorm"),
            attention=Attention.load(config, weights, layer, rotary),
            post_attention_norm=Norm.load(config, weights, f"{name}.post_attention_layernorm"),
            mlp=GatedMlp.load(config, weights, layer),
            attention_residual=f"{name}.attention_residual",
            mlp_residual=f"{name}.mlp_residual",
        )

    def forward(self, ops: Ops, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[N, D] to [N, D]."""
        attended = self.attention.forward(ops, self.input_norm.forward(ops, x), batch, cache)
        x = ops.add(x, attended, name=self.attention_residual)
        expanded = self.mlp.forward(ops, self.post_attention_norm.forward(ops, x))
        return ops.add(x, expanded, name=self.mlp_residual)
