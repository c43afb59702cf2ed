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

__all__ = [
    *("NORM_COLUMNS", "QUERIES", "ROWS_SHARED", "SOME_RINGS", "SOME_SHARED", "Join", "joins"),
    *("read_as_codes_alone", "wanted_as_codes"),
]

NORM_COLUMNS = 48 * 128
"""kNormChunks of kernels/row_norm.h, in columns."""
_ROW_COLUMNS = 224 * 128
"""kRowChunks of kernels/step.h, in columns."""
_MOST_WEIGHTS = 3
_FEWEST_ROWS = 2
_QUANTUM = 32
_WIDEST_HEAD = 256
_MOST_ATTENDING = 64
"""Rows that attend block by block: parts of more would take much memory."""
QUERIES = 64
"""Of a group of kernels/attend_rows.h; its heads have at most so many channels, in whole stages."""
ROWS_SHARED = 4 * (128 * (2 * QUERIES + 4) + 3 * 16 * 128 + 4 * QUERIES)
"""Bytes of shared memory of such a group: queries and weights, stages, and what is of each query."""
SOME_RINGS = (6, 3)
"""Stages of half a group of kernels/some_rows.h: where a multiprocessor has few groups, and where many."""
SOME_SHARED = 2 * 4 * 16 * 128
"""Bytes of one stage of both halves."""
_ONE_CHUNK = 128
"""kOneWidth of kernels/one_row.h."""
_WIDEST_TILED_HEAD, _STAGE_TERMS = 128, 8


@dataclass(frozen=True, slots=True, eq=False)
class Join:
    """Calls that one kernel does; the kind says which."""

    kind: str
    """"single", "linear", "tiles", "between", "place", "one_row", "attend" or "attend_rows"."""
    nodes: tuple[Node, ...]
    norm: Node | None = None
    """In front of a linear."""
    end: Node | None = None
    """Behind it: "add", "silu_gate" or "gelu_gate"."""


def joins(nodes: Sequence[Node]) -> Iterator[Join]:
    """Cover the nodes, in order."""
    uses = Counter(id(tensor) for node in nodes for tensor in node.inputs)
    wanted = wanted_as_codes(nodes)
    at = 0
    while at < len(nodes):
        join = (
            _linear(nodes, at, uses)
            or _tiles(nodes, at, uses)
            or _one_row(nodes, at, uses)
            or _place(nodes, at, uses)
            or _attend(nodes[at])
            or _between(nodes[at], wanted)
            or Join("single", (nodes[at],))
        )
        yield join
        at += len(join.nodes)


def wanted_as_codes(nodes: Sequence[Node]) -> set[int]:
    """Ids of the tensors that a product reads as int8 codes in blocks of 32."""
    return {
        id(node.inputs[0])
        for node in nodes
        if node.kind == "linear" and any(weight.block == _QUANTUM for weight in node.said["weights"])
    }


def read_as_codes_alone(nodes: Sequence[Node]) -> set[int]:
    """Ids of the tensors that nobody reads but a product of several rows, by their int8 codes."""
    uses = Counter(id(tensor) for node in nodes for tensor in node.inputs)
    return {
        id(node.inputs[0])
        for at, node in enumerate(nodes)
        if _tiles(nodes, at, uses) is not None
        and node.said["weights"][0].block == _QUANTUM
        and uses[id(node.inputs[0])] == 1
    }


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


def _tiles(nodes: Sequence[Node], at: int, uses: Counter[int]) -> Join | None:
    """A product of several rows, perhaps with a residual behind."""
    linear = nodes[at]
    if linear.kind != "linear" or linear.inputs[0].shape[0] < _FEWEST_ROWS:
        return None
    weights = linear.said["weights"]
    if not _side_by_side(weights) or len(weights) > _MOST_WEIGHTS:
        return None
    end = _end(nodes, at, uses)
    if end is not None and end.kind != "add":
        end = None
    return Join("tiles", tuple(nodes[at : at + 1 + (end is not None)]), None, end)


def _between(node: Node, wanted: set[int]) -> Join | None:
    """A norm or a gate of several rows, or one whose output is wanted as codes."""
    if not node.outputs:
        return None
    rows, columns = node.outputs[0].shape
    if columns % 4 or (rows < _FEWEST_ROWS and id(node.outputs[0]) not in wanted):
        return None
    is_norm = node.kind == "norm" and node.said["heads"] == 1 and columns <= NORM_COLUMNS
    if is_norm or node.kind in ("silu_gate", "gelu_gate"):
        return Join("between", (node,))
    return None


def _side_by_side(weights: Sequence[object]) -> bool:
    packed = [weight for weight in weights if isinstance(weight, PackedMatrix)]
    if len(packed) != len(weights) or len({weight.format for weight in packed}) != 1:
        return False
    return packed[0].columns <= _ROW_COLUMNS and packed[0].block in (0, _QUANTUM)


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
    is_fit = (
        width % 4 == 0 and width <= _WIDEST_HEAD and q_norm.said["width"] == k_norm.said["width"] == width
    )
    return Join("place", five) if is_fit else None


def _one_row(nodes: Sequence[Node], at: int, uses: Counter[int]) -> Join | None:
    """All from the products of q, k and v to attention's output, of rows that each end their sequence."""
    place = _place(nodes, at, uses)
    if place is None or at + len(place.nodes) == len(nodes):
        return None
    q_rope, append, attention = place.nodes[2], place.nodes[4], nodes[at + len(place.nodes)]
    if attention.kind != "attention" or attention.inputs[0] is not q_rope.outputs[0]:
        return None
    rows = attention.inputs[0].shape[0]
    is_alone = rows == 1 or rows == append.said["batch"].block_tables.shape[0] <= _MOST_ATTENDING
    is_sole = is_alone and uses[id(q_rope.outputs[0])] == 1
    same = all(attention.said[name] is append.said[name] for name in ("cache", "batch"))
    is_fit = (
        same and attention.said["layer"] == append.said["layer"] and append.said["cache"].head_dim % 4 == 0
    )
    return Join("one_row", (*place.nodes, attention)) if is_sole and is_fit else None


def _attend(node: Node) -> Join | None:
    if node.kind != "attention":
        return None
    spec = node.said["spec"]
    if node.inputs[0].shape[0] > _MOST_ATTENDING:
        is_fit = spec.head_dim % _STAGE_TERMS == 0 and spec.head_dim <= _WIDEST_TILED_HEAD
        is_fit = is_fit and spec.heads // spec.kv_heads <= QUERIES
        return Join("attend_rows", (node,)) if is_fit else None
    if spec.head_dim % 4 or spec.head_dim > _WIDEST_HEAD:
        return None
    return Join("attend", (node,))
