"""The parts that the families share: norms, attention, the gated MLP, embedding and head.

Each part knows its weights, its constants and the names of what it makes; a family's own file
says how they are joined. N rows go through every matmul in one call. A part's `backward` takes
the gradient of its output and returns that of its input; it belongs to the pass that its
`forward` ran in. Base weights are frozen and have no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mens_core.models.linear import Embedding, Linear, Lora, adapted
from mens_core.models.passes import ForwardPass, TrainingPass
from mens_core.models.remembered import Part, part_of
from mens_core.ops import AttentionSpec, Ints, Ops, RotaryTable, Tensor
from mens_core.rotary import attention_factor, frequencies
from mens_core.weights import Weights
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
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

    def forward(self, run: ForwardPass, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        run.keep(self.name, x)
        return run.ops.rms_norm(x, self.weight, self.eps, name=self.name)

    def again(self, run: TrainingPass, x: Tensor) -> None:
        """Keep what `backward` needs of a forward whose result is known."""
        run.keep(self.name, x)

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        (x,) = run.kept(self.name)
        return run.ops.rms_norm_backward(dy, x, self.weight, self.eps, name=f"{self.name}.backward")


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention whose queries and keys are normed per head before they are rotated."""

    name: str
    layer: int
    spec: AttentionSpec
    eps: float
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Tensor
    k_norm: Tensor
    rotary: RotaryTable
    names: Mapping[str, str]

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, layer: int, rotary: RotaryTable) -> Attention:
        """Load the attention of one layer."""
        name = f"layers.{layer}.self_attn"
        parts = ("q_norm", "k_norm", "q_rope", "k_rope", "attention")
        return cls(
            name=name,
            layer=layer,
            spec=attention_spec(config, layer),
            eps=config.rms_eps,
            q_proj=weights.linear(f"{name}.q_proj"),
            k_proj=weights.linear(f"{name}.k_proj"),
            v_proj=weights.linear(f"{name}.v_proj"),
            o_proj=weights.linear(f"{name}.o_proj"),
            q_norm=weights.norm(f"{name}.q_norm"),
            k_norm=weights.norm(f"{name}.k_norm"),
            rotary=rotary,
            names={part: f"{name}.{part}" for part in parts},
        )

    def forward(self, run: ForwardPass, x: Tensor) -> Tensor:
        """[N, D] to [N, D]; the rows' keys and values are in the cache afterwards."""
        names, spec, ops, positions = self.names, self.spec, run.ops, run.batch.positions
        q, k, v = run.linears((self.q_proj, self.k_proj, self.v_proj), x)
        run.keep(self.name, q, k)
        q = ops.head_norm(q, self.q_norm, spec.heads, self.eps, name=names["q_norm"])
        k = ops.head_norm(k, self.k_norm, spec.kv_heads, self.eps, name=names["k_norm"])
        q = ops.rope(q, spec.heads, self.rotary, positions, name=names["q_rope"])
        k = ops.rope(k, spec.kv_heads, self.rotary, positions, name=names["k_rope"])
        run.kv_append(self.layer, k, v)
        mixed = run.attention(q, self.layer, spec, names["attention"])
        return run.linear(self.o_proj, mixed)

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """[N, D] to [N, D]; the cache holds the keys and values of this layer's forward."""
        names, spec, ops, positions = self.names, self.spec, run.ops, run.batch.positions
        q, k = run.kept(self.name)
        mixed = run.linear_backward(self.o_proj, dy)
        dq, dk, dv = run.attention_backward(mixed, spec, names["attention"])
        dq = ops.rope_backward(dq, spec.heads, self.rotary, positions, name=f"{names['q_rope']}.backward")
        dk = ops.rope_backward(dk, spec.kv_heads, self.rotary, positions, name=f"{names['k_rope']}.backward")
        dq = ops.head_norm_backward(
            dq, q, self.q_norm, spec.heads, self.eps, name=f"{names['q_norm']}.backward"
        )
        dk = ops.head_norm_backward(
            dk, k, self.k_norm, spec.kv_heads, self.eps, name=f"{names['k_norm']}.backward"
        )
        return run.linears_backward((self.q_proj, self.k_proj, self.v_proj), (dq, dk, dv))

    def adapted(self, loras: Mapping[str, Lora]) -> Attention:
        """Return the same attention with these updates, and no others."""
        return replace(
            self,
            q_proj=adapted(self.q_proj, loras),
            k_proj=adapted(self.k_proj, loras),
            v_proj=adapted(self.v_proj, loras),
            o_proj=adapted(self.o_proj, loras),
        )

    def parts(self, longest: int) -> tuple[Part, Part, Part]:
        """What may be remembered of a forward: what attention makes, its output's product, its inputs'.

        Args:
            longest: rows of the longest sequence.
        """
        # The output [N, H * C], and m and l [N, H] of each row and head.
        mixed = self.spec.heads * (self.spec.head_dim + 2)
        # Each is a sum over half of the keys of as many sums again, in twice the time of a product's terms.
        terms = 2 * min(longest, self.spec.window or longest)
        return (
            Part(frozenset((self.names["attention"],)), mixed, terms),
            part_of(self.o_proj),
            part_of(self.q_proj, self.k_proj, self.v_proj),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers."""
        return (self.q_proj, self.k_proj, self.v_proj, self.o_proj)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    activation: Activation
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    gated: str

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights, layer: int) -> GatedMlp:
        """Load the MLP of one layer."""
        name = f"layers.{layer}.mlp"
        return cls(
            activation=config.activation,
            gate_proj=weights.linear(f"{name}.gate_proj"),
            up_proj=weights.linear(f"{name}.up_proj"),
            down_proj=weights.linear(f"{name}.down_proj"),
            gated=f"{name}.gated",
        )

    def forward(self, run: ForwardPass, x: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        gate, up = run.linears((self.gate_proj, self.up_proj), x)
        run.keep(self.gated, gate, up)
        gated_op = run.ops.silu_gate if self.activation == "silu" else run.ops.gelu_gate
        return run.linear(self.down_proj, gated_op(gate, up, name=self.gated))

    def again(self, run: TrainingPass, x: Tensor) -> None:
        """Keep what `backward` needs of a forward whose result is known: no need for the last product."""
        gate, up = run.linears((self.gate_proj, self.up_proj), x)
        run.keep(self.gated, gate, up)
        if self.down_proj.lora is not None:
            gated_op = run.ops.silu_gate if self.activation == "silu" else run.ops.gelu_gate
            run.keep_input(self.down_proj, gated_op(gate, up, name=self.gated))

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """[N, D] to [N, D]."""
        gate, up = run.kept(self.gated)
        dy = run.linear_backward(self.down_proj, dy)
        ops = run.ops
        gate_backward = ops.silu_gate_backward if self.activation == "silu" else ops.gelu_gate_backward
        dgate, dup = gate_backward(dy, gate, up, name=f"{self.gated}.backward")
        return run.linears_backward((self.gate_proj, self.up_proj), (dgate, dup))

    def adapted(self, loras: Mapping[str, Lora]) -> GatedMlp:
        """Return the same MLP with these updates, and no others."""
        return replace(
            self,
            gate_proj=adapted(self.gate_proj, loras),
            up_proj=adapted(self.up_proj, loras),
            down_proj=adapted(self.down_proj, loras),
        )

    @property
    def parts(self) -> tuple[Part, Part]:
        """What may be remembered of a forward: what the gate is made of, and the result."""
        return part_of(self.gate_proj, self.up_proj), part_of(self.down_proj)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers."""
        return (self.gate_proj, self.up_proj, self.down_proj)


@dataclass(frozen=True, slots=True)
class Head:
    """Token embedding at one end; final norm, output matrix and softcap at the other."""

    embedding: Embedding
    output: Linear
    norm: Norm
    softcap: float | None

    @classmethod
    def load(cls, config: ModelConfig, weights: Weights) -> Head:
        """Load embedding and output; tied, they are one matrix."""
        table = weights.linear(EMBEDDING_LAYER)
        return cls(
            embedding=Embedding(table.name, table.weight, table.shape, config.embed_scale),
            output=replace(table, name="lm_head")
            if config.tie_word_embeddings
            else weights.linear("lm_head"),
            norm=Norm.load(config, weights, "norm"),
            softcap=config.logit_softcap,
        )

    def embed(self, run: ForwardPass) -> Tensor:
        """The batch's token ids to [N, D]."""
        return run.embed(self.embedding)

    def embed_backward(self, run: TrainingPass, dy: Tensor) -> None:
        """From the gradient of embedded rows [N, D] to those of the embedding's update, if there is one."""
        run.embed_backward(self.embedding, dy)

    def logits(self, run: ForwardPass, hidden: Tensor) -> Tensor:
        """[L, D] to [L, V]."""
        logits = run.linear(self.output, self.norm.forward(run, hidden))
        if self.softcap is None:
            return logits
        run.keep("logit_softcap", logits)
        return run.ops.softcap(logits, self.softcap, name="logit_softcap")

    def greatest(self, run: ForwardPass, hidden: Tensor) -> Ints | None:
        """[L, D] to the argmax of the logits [L]; None where a softcap or an update follows the product."""
        if self.softcap is not None or self.output.lora is not None:
            return None
        return run.ops.greatest(self.norm.forward(run, hidden), self.output.weight, name=self.output.name)

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """Gradient of logits [L, V] to that of the hidden rows [L, D]."""
        if self.softcap is not None:
            (logits,) = run.kept("logit_softcap")
            dy = run.ops.softcap_backward(dy, logits, self.softcap, name="logit_softcap.backward")
        return self.norm.backward(run, run.linear_backward(self.output, dy))

    def adapted(self, loras: Mapping[str, Lora]) -> Head:
        """Return the same head with these updates on its two ends, and no others.

        Tied ends are one matrix with two names: an update lies on the end that it is named for.
        """
        return replace(self, embedding=adapted(self.embedding, loras), output=adapted(self.output, loras))


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
