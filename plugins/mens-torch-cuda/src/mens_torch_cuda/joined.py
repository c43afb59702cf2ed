"""Which noted calls become one kernel: patterns over `nodes.Node`. Pure.

A join leaves every operator's sequence as it is, and every operator's flags of rows that are not finite. It
drops the memory of a tensor only where nobody else reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mens_torch_cuda.nodes import Node
from mens_torch_cuda.packed import PackedMatrix

__all__ = ["NORM_COLUMNS", "Join", "joins"]

NORM_COLUMNS = 48 * 128
"""kNormChunks of kernels/step.h, in columns."""
_ROW_COLUMNS = 256 * 128
_MOST_WEIGHTS = 3
_QUANTUM = 32
_SHARING = (1, 2, 4)
"""Query heads of a key/value head that kernels/attend.h is compiled for."""
_WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Calls that one kernel does; the kind says which."""

    kind: str
    """"single", "linear", "place" or "attend"."""
    nodes: tuple[Node, ...]
    norm: Node | None = None
    """In front of a linear."""
    end: Node | None = None
    """Behind it: "add", "silu_gate" or "gelu_gate"."""


def joins(nodes: Sequence[Node]) -> Iterator[Join]:
    """Cover the nodes, in order."""
    uses = Counter(id(tensor) for node in nodes for tensor in node.inputs)
    at = 0
    while at < len(nodes):
        join = _linear(nodes, at, uses) or _place(nodes, at, uses) or _attend(nodes[at]) or _single(nodes[at])
        yield join
        at += len(join.nodes)


def _single(node: Node) -> Join:
    return Join("single", (node,))


def _linear(nodes: Sequence[Node], at: int, uses: Counter[int]) -> Join | None:
    """A product of one row, perhaps with a norm in front, a residual or a gate behind."""
    norm = nodes[at] if nodes[at].kind == "norm" else None
    first = at + (norm is not None)
    if first == len(nodes) or nodes[first].kind != "linear":
        return None
    linear = nodes[first]
    weights = linear.said["weights"]
    if linear.inputs[0].shape[0] != 1 or not _side_by_side(weights):
        return None
    if norm is not None:
        made = norm.outputs[0]
        is_sole = linear.inputs[0] is made and uses[id(made)] == 1
        if not is_sole or norm.said["heads"] != 1 or weights[0].columns > NORM_COLUMNS:
            return None
    end = _end(nodes, first, uses)
    if end is None and len(weights) > _MOST_WEIGHTS:
        return None
    return Join("linear", tuple(nodes[at : first + 1 + (end is not None)]), norm, end)


def _side_by_side(weights: Sequence[object]) -> bool:
    packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
    if len(packed) != len(weights) or len({weight.format for weight in packed}) != 1:
        return False
    return packed[0].columns <= _ROW_COLUMNS


def _end(nodes: Sequence[Node], at: int, uses: Counter[int]) -> Node | None:
    if at + 1 == len(nodes):
        return None
    linear, after = nodes[at], nodes[at + 1]
    if any(uses[id(output)] != 1 for output in linear.outputs):
        return None
    if after.kind == "add" and len(linear.outputs) == 1 and after.inputs[1] is linear.outputs[0]:
        return after
    is_gate = after.kind in ("silu_gate", "gelu_gate")
    if is_gate and after.inputs == linear.outputs and linear.outputs[0].shape == linear.outputs[1].shape:
        return after
    return None


def _place(nodes: Sequence[Node], at: int, uses: Counter[int]) -> Join | None:
    """Norms and rotations of q and k, and what is stored."""
    five = tuple(nodes[at : at + 5])
    if [node.kind for node in five] != ["norm", "norm", "rope", "rope", "kv_append"]:
        return None
    q_norm, k_norm, q_rope, k_rope, append = five
    wired = (
        q_rope.inputs[0] is q_norm.outputs[0]
        and k_rope.inputs[0] is k_norm.outputs[0]
        and append.inputs[0] is k_rope.outputs[0]
        and q_rope.said["table"] is k_rope.said["table"]
        and q_norm.said["eps"] == k_norm.said["eps"]
    )
    inner = (q_norm.outputs[0], k_norm.outputs[0], k_rope.outputs[0])
    if not wired or any(uses[id(tensor)] != 1 for tensor in inner):
        return None
    width = append.said["cache"].head_dim
    is_fit = width <= _WIDEST_HEAD and q_norm.said["width"] == k_norm.said["width"] == width
    return Join("place", five) if is_fit else None


def _attend(node: Node) -> Join | None:
    if node.kind != "attention":
        return None
    spec = node.said["spec"]
    if spec.heads // spec.kv_heads not in _SHARING or spec.head_dim > _WIDEST_HEAD:
        return None
    return Join("attend", (node,))
