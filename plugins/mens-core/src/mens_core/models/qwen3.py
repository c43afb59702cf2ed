"""Qwen3, dense: pre-norm residual layers with a SiLU-gated MLP.

Source: Qwen3 Technical Report, arXiv:2505.09388, section 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mens_core.models.layers import Attention, GatedMlp, Norm
from mens_core.models.linear import Linear, Lora
from mens_core.models.passes import ForwardPass, TrainingPass
from mens_core.models.remembered import Part
from mens_core.ops import RotaryTable, Tensor
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

    def forward(self, run: ForwardPass, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        attended = self.attention.forward(run, self.input_norm.forward(run, x))
        x = run.ops.add(x, attended, name=self.attention_residual)
        expanded = self.mlp.forward(run, self.post_attention_norm.forward(run, x))
        return run.ops.add(x, expanded, name=self.mlp_residual)

    def again(self, run: TrainingPass, x: Tensor) -> None:
        """Keep what `backward` needs of a forward whose result is known."""
        attended = self.attention.forward(run, self.input_norm.forward(run, x))
        x = run.ops.add(x, attended, name=self.attention_residual)
        self.mlp.again(run, self.post_attention_norm.forward(run, x))

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        branch = self.post_attention_norm.backward(run, self.mlp.backward(run, dy))
        dy = run.ops.add(dy, branch, name=f"{self.mlp_residual}.backward")
        branch = self.input_norm.backward(run, self.attention.backward(run, dy))
        return run.ops.add(dy, branch, name=f"{self.attention_residual}.backward")

    def adapted(self, loras: Mapping[str, Lora]) -> Layer:
        """Return the same layer with these updates, and no others."""
        return replace(self, attention=self.attention.adapted(loras), mlp=self.mlp.adapted(loras))

    def parts(self, longest: int) -> tuple[Part, ...]:
        """What `again` takes over where it was remembered, in sequences of up to `longest` rows."""
        mixed, projected, entering = self.attention.parts(longest)
        opened, _ = self.mlp.parts
        return mixed, projected, opened, entering

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers, in the order in which they run."""
        return (*self.attention.linears, *self.mlp.linears)
