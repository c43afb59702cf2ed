"""A decoder for training: each layer forward and backward on merged products, keeping what it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mens_core.models import gemma3, qwen3
from mens_core.models.model import Model
from mens_core.ops import AttentionSpec
from mens_torch_cuda.fast import elementwise as ew
from mens_torch_cuda.fast.attention import Bounds, prefill_attention
from mens_torch_cuda.fast.embedding import Table
from mens_torch_cuda.fast.groups import Group
from mens_torch_cuda.fast.rotary import FastRotaryTable

__all__ = ["Decoder", "Layer", "Rows", "Saved"]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Whose rows a pass runs over: whole sequences, one behind the other."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    bounds: Bounds


@dataclass(slots=True, eq=False)
class Saved:
    """What a layer's backward needs of its forward; the rest it makes again."""

    x: torch.Tensor
    qkv: torch.Tensor
    u_qkv: torch.Tensor | None
    rotated: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mixed: torch.Tensor
    """[N, H, C], on torch's tape."""
    u_o: torch.Tensor | None
    attended: torch.Tensor | None
    """What a norm behind the attention reads; None without one."""
    middle: torch.Tensor
    gate_up: torch.Tensor
    u_gate_up: torch.Tensor | None
    u_down: torch.Tensor | None
    expanded: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Layer:
    """One decoder layer of either family."""

    number: int
    spec: AttentionSpec
    eps: float
    is_silu: bool
    table: FastRotaryTable
    norms: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
    """Before and behind attention, before and behind the MLP."""
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    qkv: Group
    o: Group
    gate_up: Group
    down: Group

    @classmethod
    def of(cls, number: int, layer: Any) -> Layer:
        """Take a served layer's weights, which stay where they are."""
        if isinstance(layer, gemma3.Layer):
            of_norms = (
                layer.input_norm.weight,
                layer.post_attention_norm.weight,
                layer.pre_feedforward_norm.weight,
                layer.post_feedforward_norm.weight,
            )
        elif isinstance(layer, qwen3.Layer):
            of_norms = (layer.input_norm.weight, None, layer.post_attention_norm.weight, None)
        else:
            raise AssertionError(f"no fast training of {type(layer).__name__}")
        attention, mlp = layer.attention, layer.mlp
        return cls(
            number=number,
            spec=attention.spec,
            eps=attention.eps,
            is_silu=mlp.activation == "silu",
            table=attention.rotary,
            norms=of_norms,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            qkv=Group.of((attention.q_proj, attention.k_proj, attention.v_proj)),
            o=Group.of((attention.o_proj,)),
            gate_up=Group.of((mlp.gate_proj, mlp.up_proj)),
            down=Group.of((mlp.down_proj,)),
        )

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self.qkv, self.o, self.gate_up, self.down)

    def forward(self, x: torch.Tensor, rows: Rows, *, keeps: bool) -> tuple[torch.Tensor, Saved | None]:
        """[N, D] to [N, D], and what the backward needs if it `keeps` it."""
        before_attention, behind_attention, before_mlp, behind_mlp = self.norms
        qkv, u_qkv = self.qkv.forward(ew.norm(x, before_attention, self.eps))
        q, k, v = self._heads(qkv)
        angles = self.table.cosines, self.table.sines, rows.positions
        q = ew.heads(q, self.q_norm, self.eps, *angles)
        k = ew.heads(k, self.k_norm, self.eps, *angles)
        rotated = (q, k, v)
        if keeps:
            rotated = tuple(part.detach().requires_grad_() for part in rotated)  # type: ignore[assignment]
        with torch.set_grad_enabled(keeps):
            mixed = prefill_attention(*rotated, rows.bounds, rows.bounds, self.spec)
        attended, u_o = self.o.forward(mixed.detach().flatten(1))
        added = attended if behind_attention is None else ew.norm(attended, behind_attention, self.eps)
        middle, normed = ew.add_norm(x, added, before_mlp, self.eps)
        gate_up, u_gate_up = self.gate_up.forward(normed)
        expanded, u_down = self.down.forward(ew.gate(gate_up, is_silu=self.is_silu))
        out = middle + (expanded if behind_mlp is None else ew.norm(expanded, behind_mlp, self.eps))
        if not keeps:
            return out, None
        return out, Saved(
            x=x,
            qkv=qkv,
            u_qkv=u_qkv,
            rotated=rotated,
            mixed=mixed,
            u_o=u_o,
            attended=None if behind_attention is None else attended,
            middle=middle,
            gate_up=gate_up,
            u_gate_up=u_gate_up,
            u_down=u_down,
            expanded=None if behind_mlp is None else expanded,
        )

    def backward(
        self, dy: torch.Tensor, saved: Saved, rows: Rows, *, wants_input: bool = True
    ) -> torch.Tensor:
        """[N, D] to [N, D]; of no meaning where the input has no use for a gradient."""
        before_attention, behind_attention, before_mlp, behind_mlp = self.norms
        branch = dy
        if behind_mlp is not None and saved.expanded is not None:
            branch = ew.norm_backward(dy, saved.expanded, behind_mlp, self.eps)
        gated = ew.gate(saved.gate_up, is_silu=self.is_silu)
        branch = _made(self.down.backward(branch, gated, saved.u_down))
        branch = ew.gate_backward(branch, saved.gate_up, is_silu=self.is_silu)
        normed = ew.norm(saved.middle, before_mlp, self.eps)
        branch = _made(self.gate_up.backward(branch, normed, saved.u_gate_up))
        dy = ew.norm_backward(branch, saved.middle, before_mlp, self.eps, dy)

        branch = dy
        if behind_attention is not None and saved.attended is not None:
            branch = ew.norm_backward(dy, saved.attended, behind_attention, self.eps)
        branch = _made(self.o.backward(branch, saved.mixed.detach().flatten(1), saved.u_o))
        branch = self._heads_backward(branch, saved, rows)
        normed = ew.norm(saved.x, before_attention, self.eps)
        dx = self.qkv.backward(branch, normed, saved.u_qkv, wants_input=wants_input)
        return dy if dx is None else ew.norm_backward(dx, saved.x, before_attention, self.eps, dy)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        whole = torch.unflatten(qkv, 1, (spec.heads + 2 * spec.kv_heads, spec.head_dim))
        q, k, v = torch.split(whole, [spec.heads, spec.kv_heads, spec.kv_heads], 1)
        return q, k, v

    def _heads_backward(self, dmixed: torch.Tensor, saved: Saved, rows: Rows) -> torch.Tensor:
        dq, dk, dv = torch.autograd.grad(saved.mixed, saved.rotated, dmixed.view(saved.mixed.shape))
        out = torch.empty_like(saved.qkv)
        q, k, _ = self._heads(saved.qkv)
        dq_there, dk_there, dv_there = self._heads(out)
        angles = self.table.cosines, self.table.sines, rows.positions
        ew.heads_backward(dq, q, self.q_norm, self.eps, *angles, dq_there)
        ew.heads_backward(dk, k, self.k_norm, self.eps, *angles, dk_there)
        dv_there.copy_(dv)
        return out


@dataclass(slots=True, eq=False)
class Decoder:
    """Embedding, layers and head over a served model's weights."""

    layers: tuple[Layer, ...]
    embedding: Table
    head: Group
    final_norm: torch.Tensor
    eps: float
    softcap: float | None

    @classmethod
    def of(cls, model: Model) -> Decoder:
        """Take a served model's weights; layers of one input are joined where they were not."""
        table = model.head.embedding
        return cls(
            layers=tuple(Layer.of(i, layer) for i, layer in enumerate(model.layers)),
            embedding=Table(table.name, table.weight.data, table.scale),
            head=Group.of((model.head.output,)),
            final_norm=model.head.norm.weight,
            eps=model.head.norm.eps,
            softcap=model.head.softcap,
        )

    @property
    def groups(self) -> Iterator[Group]:
        """All of them, the head's last."""
        for layer in self.layers:
            yield from layer.groups
        yield self.head

    def embed(self, rows: Rows) -> torch.Tensor:
        """[N, D]"""
        self.reach(rows)
        return self.embedding.forward(rows.token_ids)

    def reach(self, rows: Rows) -> int:
        """Have the angles of all positions; return a number that tells where they lie."""
        for layer in self.layers:
            layer.table.reach(int(np.diff(rows.bounds.starts).max()))
        return sum(layer.table.size for layer in self.layers)


def _made(dx: torch.Tensor | None) -> torch.Tensor:
    if dx is None:
        raise AssertionError("this input has a gradient")
    return dx
