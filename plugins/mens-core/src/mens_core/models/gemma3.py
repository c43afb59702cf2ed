"""Gemma 3, text: residual layers with a norm before and after each half, most of them sliding.

The embedding is scaled by sqrt(D). Sliding layers rotate with a theta of their own, unscaled;
every sixth layer sees everything. Norm weights are multipliers here: the 1 that checkpoints
leave out is added as they are loaded.

Source: Gemma 3 Technical Report, arXiv:2503.19786, section 2.
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
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    input_norm: Norm
    attention: Attention
    post_attention_norm: Norm
    pre_feedforward_norm: Norm
    mlp: GatedMlp
    post_feedforward_norm: Norm
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
            pre_feedforward_norm=Norm.load(config, weights, f"{name}.pre_feedforward_layernorm"),
            mlp=GatedMlp.load(config, weights, layer),
            post_feedforward_norm=Norm.load(config, weights, f"{name}.post_feedforward_layernorm"),
            attention_residual=f"{name}.attention_residual",
            mlp_residual=f"{name}.mlp_residual",
        )

    def forward(self, ops: Ops, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[N, D] to [N, D]."""
        attended = self.attention.forward(ops, self.input_norm.forward(ops, x), batch, cache)
        x = ops.add(x, self.post_attention_norm.forward(ops, attended), name=self.attention_residual)
        expanded = self.mlp.forward(ops, self.pre_feedforward_norm.forward(ops, x))
        return ops.add(x, self.post_feedforward_norm.forward(ops, expanded), name=self.mlp_residual)
