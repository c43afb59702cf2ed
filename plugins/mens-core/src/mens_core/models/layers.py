"""The parts that the families share: norms, attention, the gated MLP, embedding and head.

Each part knows its weights, its constants and the names of what it makes; a family's own file
says how they are joined. N rows go through every matmul in one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mens_core.ops import AttentionSpec, Batch, KvCache, Matrix, Ops, RotaryTable, Tensor
from mens_core.rotary import attention_factor, frequencies
from mens_core.weights import Weights
from vox_plugin_api.families.model_config import Activation, AttentionKind, ModelConfig
from vox_plugin_api.families.rope import Rope

__all__ = ["Attention", "GatedMlp", "Head", "Norm", "attention_spec", "rotary_tables"]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the model width."""

    name: str
    weight: Tensor
    eps: float

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, name: str) -> Norm:
        """Load the norm called `name`."""
        return cls(name, weights.norm(name), config.rms_eps)

    def forward(self, ops: Ops, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        return ops.rms_norm(x, self.weight, self.eps, name=self.name)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention whose queries and keys are normed per head before they are rotated."""

    name: str
    layer: int
    spec: AttentionSpec
    eps: float
    q_proj: Matrix
    k_proj: Matrix
    v_proj: Matrix
    o_proj: Matrix
    q_norm: Tensor
    k_norm: Tensor
    rotary: RotaryTable
    names: Mapping[str, str]

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, layer: int, rotary: RotaryTable) -> Attention:
        """Load the attention of one layer."""
        name = f"layers.{layer}.self_attn"
        parts = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope", "attention", "o_proj")
        return cls(
            name=name,
            layer=layer,
            spec=attention_spec(config, layer),
            eps=config.rms_eps,
            q_proj=weights.matrix(f"{name}.q_proj"),
            k_proj=weights.matrix(f"{name}.k_proj"),
            v_proj=weights.matrix(f"{name}.v_proj"),
            o_proj=weights.matrix(f"{name}.o_proj"),
            q_norm=weights.norm(f"{name}.q_norm"),
            k_norm=weights.norm(f"{name}.k_norm"),
            rotary=rotary,
            names={part: f"{name}.{part}" for part in parts},
        )

    def forward(self, ops: Ops, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[N, D] to [N, D]; the rows' keys and values are in `cache` afterwards."""
        names, spec, positions = self.names, self.spec, batch.positions
        q, k, v = ops.linear_many(
            x,
            (self.q_proj, self.k_proj, self.v_proj),
            names=(names["q_proj"], names["k_proj"], names["v_proj"]),
        )
        q = ops.head_norm(q, self.q_norm, spec.heads, self.eps, name=names["q_norm"])
        k = ops.head_norm(k, self.k_norm, spec.kv_heads, self.eps, name=names["k_norm"])
        q = ops.rope(q, spec.heads, self.rotary, positions, name=names["q_rope"])
        k = ops.rope(k, spec.kv_heads, self.rotary, positions, name=names["k_rope"])
        ops.kv_append(cache, self.layer, k, v, batch)
        mixed = ops.attention(q, cache, self.layer, batch, spec, name=names["attention"])
        return ops.linear(mixed, self.o_proj, name=names["o_proj"])


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    activation: Activation
    gate_proj: Matrix
    up_proj: Matrix
    down_proj: Matrix
    names: Mapping[str, str]

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, layer: int) -> GatedMlp:
        """Load the MLP of one layer."""
        name = f"layers.{layer}.mlp"
        return cls(
            activation=config.activation,
            gate_proj=weights.matrix(f"{name}.gate_proj"),
            up_proj=weights.matrix(f"{name}.up_proj"),
            down_proj=weights.matrix(f"{name}.down_proj"),
            names={part: f"{name}.{part}" for part in ("gate_proj", "up_proj", "gated", "down_proj")},
        )

    def forward(self, ops: Ops, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        gate, up = ops.linear_many(
            x, (self.gate_proj, self.up_proj), names=(self.names["gate_proj"], self.names["up_proj"])
        )
        gated_op = ops.silu_gate if self.activation == "silu" else ops.gelu_gate
        gated = gated_op(gate, up, name=self.names["gated"])
        return ops.linear(gated, self.down_proj, name=self.names["down_proj"])


@dataclass(frozen=True, slots=True)
class Head:
    """Token embedding at one end; final norm, output matrix and softcap at the other."""

    embedding: Matrix
    output: Matrix
    norm: Norm
    embed_scale: float | None
    softcap: float | None

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights) -> Head:
        """Load embedding and output; tied, they are one matrix."""
        embedding = weights.matrix("embed_tokens")
        return cls(
            embedding=embedding,
            output=embedding if config.tie_word_embeddings else weights.matrix("lm_head"),
            norm=Norm.load(config, weights, "norm"),
            embed_scale=config.embed_scale,
            softcap=config.logit_softcap,
        )

    def embed(self, ops: Ops, batch: Batch) -> Tensor:
        """Token ids to [N, D]."""
        return ops.embed(self.embedding, batch.token_ids, self.embed_scale, name="embed_tokens")

    def logits(self, ops: Ops, hidden: Tensor) -> Tensor:
        """[L, D] to [L, V]."""
        logits = ops.linear(self.norm.forward(ops, hidden), self.output, name="lm_head")
        return logits if self.softcap is None else ops.softcap(logits, self.softcap, name="logit_softcap")


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """Return the attention constants of one layer."""
    is_sliding = config.attention_kinds[layer] == "sliding"
    return AttentionSpec(
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.window if is_sliding else None,
        softcap=config.attention_softcap,
    )


def rotary_tables(config: ModelConfig, ops: Ops) -> dict[AttentionKind, RotaryTable]:
    """One table per kind of layer that the model has; equal embeddings share one."""
    made: dict[Rope, RotaryTable] = {}
    tables: dict[AttentionKind, RotaryTable] = {}
    for kind in sorted(set(config.attention_kinds)):
        rope = config.ropes[kind]
        if rope not in made:
            made[rope] = ops.rotary_table(frequencies(rope), attention_factor(rope))
        tables[kind] = made[rope]
    return tables
