"""Launches the joined kernels (kernels/step.h, kernels/attend.h)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, AttentionSpec, Batch
from mens_torch_cuda.code_orders import Order, order_of, room_of
from mens_torch_cuda.few_rows import coded_tile, core_tile
from mens_torch_cuda.joined import (
    QUERIES,
    ROWS_SHARED,
    SOME_RINGS,
    SOME_SHARED,
    Join,
    joins,
    read_as_codes_alone,
    wanted_as_codes,
)
from mens_torch_cuda.nodes import Codes, Node, Pending
from mens_torch_cuda.packed import PackedMatrix
from mens_torch_cuda.tile_choice import code_tile, float_tile

__all__ = ["NORM_THREADS", "Launcher", "StepMemory", "norm_part"]

_MODES = {"add": 1, "silu_gate": 2, "gelu_gate": 3}
_BLOCK = 32
_AS_IT_IS = 0
"""A gate that is none."""
_CODE_TILES = {Order.ROWS: code_tile, Order.TILES: coded_tile, Order.CORES: core_tile}
NORM_THREADS = 256
"""kNormThreads of kernels/between.h."""
_SHARED_NORMS = 64
"""Rows up to which several groups norm one: each reads all of it, and makes a part."""
_PLACED = GROUP // 32 * 4
"""kPlaceGroup of kernels/between.h: heads of queries and keys."""
_AT_ONCE = 528
"""Groups of a product that a large GPU runs at once."""
_SHARING = (2, 4)
"""Query heads that kernels/attend.h takes together."""
_TOGETHER = (4, 2, 1)
"""Query heads of a group of kernels/some_rows.h."""
_FEW_BLOCKS, _SPREAD = 2, 128
"""KV blocks that a group may take one after another, however few groups; or groups that may take more."""
_FEW_PLACES = 16
"""Rows times KV blocks up to which each query head has a group of its own."""


_CLUSTER = 8
"""Groups that any GPU with clusters can have in one."""


class StepMemory(Protocol):
    """What the launches need of the lane."""

    def flags(self, name: str, rows: int) -> Buffer:
        """Flags [rows] of one operator's call."""

    def codes(self, x: Any) -> Codes:
        """The rows as int8 codes in blocks of 32."""

    def places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        """Positions, sequence of each row, block tables."""

    def row_tiles(self, batch: Batch, rows: int) -> tuple[Buffer, int]:
        """First row and rows [tiles, 2] of tiles of at most so many rows of one sequence; and how many."""

    def attention_parts(self, count: int) -> Buffer:
        """Room for so many floats, the same in every layer."""

    def counters(self, count: int) -> Buffer:
        """So many int32, zero between kernels."""


class Launcher:
    """Takes noted calls; launches the joined ones as one kernel, the others each by itself."""

    def __init__(self, device: Device, memory: StepMemory) -> None:
        self._device = device
        self._memory = memory
        self._most_shared = getattr(device, "most_shared", 1 << 30)
        """Bytes of a group's memory in common that may be asked for."""
        self._has_warpgroups = getattr(device, "has_warpgroups", False)
        """Whether four warps multiply matrices from memory that they have in common."""

    def __call__(self, nodes: list[Node]) -> None:
        """Launch them; every output that someone reads has its memory then."""
        wanted, alone = wanted_as_codes(nodes), read_as_codes_alone(nodes)
        for join in joins(nodes):
            if join.kind == "linear":
                self._linear(join, wanted)
            elif join.kind == "tiles":
                self._tiles(join)
            elif join.kind == "between":
                self._between(join.nodes[0], wanted, alone)
            elif join.kind == "one_row":
                self._one_row(join.nodes, wanted)
            elif join.kind == "place":
                self._place(join.nodes)
            elif join.kind == "attend":
                self._attend(join.nodes[0], wanted)
            elif join.kind == "attend_rows":
                self._attend_rows(join.nodes[0], wanted, alone)
            else:
                join.nodes[0].launch()

    def _empty(self, rows: int, columns: int) -> Buffer:
        return self._device.empty(4 * rows * columns)

    def _made(self, output: Pending) -> Buffer:
        output.bind(self._empty(*output.shape))
        return output.buffer

    def _coded(self, output: Pending, *, in_rows: bool = False) -> Codes:
        rows, columns = output.shape
        order = Order.ROWS if in_rows else self._order_of(rows, columns)
        output.codes = self._room_for_codes(rows, columns, order)
        return output.codes

    def _order_of(self, rows: int, columns: int) -> Order:
        return order_of(rows, columns, has_warpgroups=self._has_warpgroups)

    def _room_for_codes(self, rows: int, columns: int, order: Order) -> Codes:
        room = room_of(rows, order)
        return Codes(self._device.empty(room * columns), self._empty(room, columns // _BLOCK), order)

    def _codes(self, x: Any) -> Codes:
        """Codes of a product's input, in the order that the product reads."""
        rows, columns = x.shape
        if isinstance(x, Pending) and x.codes is not None:
            return x.codes
        codes = self._room_for_codes(rows, columns, self._order_of(rows, columns))
        args = constants(columns, _AS_IT_IS, 0, codes.order)
        buffers = (x.buffer, x.buffer, x.buffer, codes.codes, codes.scales, x.buffer)
        self._device.launch(Launch("vox_step_between_gate", buffers, args, (columns // 4, rows)))
        if isinstance(x, Pending):
            x.codes = codes
        return codes

    def _linear(self, join: Join, wanted: set[int]) -> None:
        norm, end = join.norm, join.end
        linear = join.nodes[norm is not None]
        weights: Sequence[PackedMatrix] = linear.said["weights"]
        first = weights[0]
        x = norm.inputs[0] if norm is not None else linear.inputs[0]
        none = x.buffer
        """For what a kernel does not use."""
        norm_flags, side, source = none, none, x.buffer
        if norm is not None:
            norm_flags, side = self._memory.flags(norm.said["name"], 1), norm.said["weight"].buffer
        elif first.block:
            codes = self._memory.codes(x)
            source, side = codes.codes, codes.scales
        flags = [self._memory.flags(name, 1) for name in linear.said["names"]]
        out_codes, residual = Codes(none, none), none
        if end is None:
            outs = [self._made(output) for output in linear.outputs]
        else:
            flags.append(self._memory.flags(end.said["name"], 1))
            outs = [self._made(end.outputs[0])]
            if end.kind == "add":
                residual = end.inputs[0].buffer
            elif norm is not None and id(end.outputs[0]) in wanted and first.rows % _BLOCK == 0:
                out_codes = self._coded(end.outputs[0])
        is_coded = out_codes.codes is not none
        is_gate = end is not None and end.kind != "add"
        across = self._across(weights, is_gate, norm is not None, is_coded)
        outputs = [weight.rows for weight in weights]
        groups = sum(-(-rows // across) for rows in (outputs[:1] if is_gate else outputs))
        kernel = f"vox_step_{'normed_' if norm is not None else ''}{first.format}_{across}"
        started = min(groups, _AT_ONCE)
        args = constants(
            *_filled(outputs, 0),
            first.columns,
            0 if end is None else _MODES[end.kind],
            int(is_coded),
            started,
            float(norm.said["eps"]) if norm is not None else 0.0,
        )
        buffers = (
            source,
            side,
            *_filled([weight.buffers[0] for weight in weights], none),
            *_filled([weight.buffers[1] for weight in weights] if first.block else [], none),
            residual,
            *_filled(outs, none),
            out_codes.codes,
            out_codes.scales,
            *_filled(flags, none),
            norm_flags,
        )
        self._device.launch(Launch(kernel, buffers, args, (started * GROUP, 1)))

    @staticmethod
    def _across(weights: Sequence[PackedMatrix], is_gate: bool, is_normed: bool, is_coded: bool) -> int:
        """Outputs of a group."""
        if is_coded:
            return 32  # a block
        outputs = weights[0].rows if is_gate else sum(weight.rows for weight in weights)
        narrow, wide = (16, 32) if is_normed else (8, 16)
        return narrow if outputs <= _AT_ONCE * narrow else wide

    def _tiles(self, join: Join) -> None:
        linear, end = join.nodes[0], join.end
        x, weights = linear.inputs[0], linear.said["weights"]
        # What is not used may be anything that is there; x may be there as codes alone.
        rows, none = x.shape[0], weights[0].buffers[0]
        flags = [self._memory.flags(name, rows) for name in linear.said["names"]]
        if end is None:
            outs = [self._made(output) for output in linear.outputs]
        else:
            flags.append(self._memory.flags(end.said["name"], rows))
            outs = [self._made(end.outputs[0])]
        outputs = [weight.rows for weight in weights]
        is_quantised = weights[0].block != 0
        codes = self._codes(x) if is_quantised else None
        if codes is None:
            tile = float_tile(rows, outputs, weights[0].columns)
        else:
            tile = _CODE_TILES[codes.order](rows, outputs)
        buffers = (
            *((x.buffer,) if codes is None else (codes.codes, codes.scales)),
            *_filled([weight.buffers[0] for weight in weights], none),
            *(_filled([weight.buffers[1] for weight in weights], none) if is_quantised else ()),
            none if end is None else end.inputs[0].buffer,
            *_filled(outs, none),
            *_filled(flags, none),
        )
        args = constants(*_filled(outputs, 0), weights[0].columns, rows, 0 if end is None else _MODES["add"])
        groups = sum(-(-count // tile.outputs) for count in outputs)
        threads = (groups * tile.group, -(-rows // tile.rows))
        kernel = f"vox_step_tiles_{weights[0].format}_{tile.name}"
        self._device.launch(Launch(kernel, buffers, args, threads, shared=tile.shared, group=tile.group))

    def _between(self, node: Node, wanted: set[int], alone: set[int]) -> None:
        (out,) = node.outputs
        rows, columns = out.shape
        x, is_coded, is_kept = node.inputs[0], id(out) in wanted, id(out) not in alone
        made = self._made(out) if is_kept else x.buffer
        codes = self._coded(out) if is_coded else Codes(x.buffer, x.buffer)
        order = codes.order if is_coded else 0
        written = (made, codes.codes, codes.scales, self._memory.flags(node.said["name"], rows))
        if node.kind == "norm":
            part = norm_part(rows, columns)
            args = constants(columns, part, int(is_kept), order, float(node.said["eps"]))
            buffers = (x.buffer, node.said["weight"].buffer, *written)
            threads = (-(-columns // part) * NORM_THREADS, rows)
            self._device.launch(Launch("vox_step_between_norm", buffers, args, threads, group=NORM_THREADS))
        else:
            buffers = (x.buffer, node.inputs[1].buffer, *written)
            args = constants(columns, _MODES[node.kind], int(is_kept), order)
            self._device.launch(Launch("vox_step_between_gate", buffers, args, (columns // 4, rows)))

    def _place(self, nodes: Sequence[Node]) -> None:
        q_norm, k_norm, q_rope, k_rope, append = nodes
        q, k, v = q_norm.inputs[0], k_norm.inputs[0], append.inputs[1]
        cache, layer, batch = append.said["cache"], append.said["layer"], append.said["batch"]
        rows, heads = q.shape[0], q_norm.said["heads"]
        flags = [self._memory.flags(node.said["name"], rows) for node in (q_norm, k_norm, q_rope, k_rope)]
        buffers = (
            *(q.buffer, k.buffer, v.buffer),
            *(q_norm.said["weight"].buffer, k_norm.said["weight"].buffer),
            *q_rope.said["angles"],
            *self._memory.places(batch),
            self._made(q_rope.outputs[0]),
            *(cache.keys[layer], cache.values[layer]),
            *(flags[0], flags[2], flags[1], flags[3]),
        )
        args = constants(
            heads,
            cache.kv_heads,
            cache.head_dim,
            cache.stride,
            batch.block_tables.shape[1],
            float(q_norm.said["eps"]),
        )
        groups = -(-(heads + cache.kv_heads) // _PLACED)
        self._device.launch(Launch("vox_step_place", buffers, args, (groups * GROUP, rows)))

    def _one_row(self, nodes: Sequence[Node], wanted: set[int]) -> None:
        q_norm, k_norm, q_rope, k_rope, append, attention = nodes
        cache, batch, spec = append.said["cache"], append.said["batch"], attention.said["spec"]
        layer, blocks, (out,) = append.said["layer"], batch.block_tables.shape[1], attention.outputs
        rows, sharing = out.shape[0], spec.heads // spec.kv_heads
        # Keys and values of a block.
        shared, ring = 4 * BLOCK * (cache.head_dim + cache.stride), 0
        together = next(heads for heads in _TOGETHER if sharing % heads == 0)
        is_fit = blocks <= _CLUSTER
        if rows > 1:
            groups = rows * spec.heads // together
            ring = SOME_RINGS[groups > _AT_ONCE // 2 or SOME_RINGS[0] * SOME_SHARED > self._most_shared]
            shared = ring * SOME_SHARED
            is_fit = is_fit and spec.head_dim <= GROUP and (blocks <= _FEW_BLOCKS or groups >= _SPREAD)
        is_fit = is_fit and shared <= self._most_shared
        if not is_fit:
            self._place(nodes[:5])
            self._attend(attention, wanted)
            return
        raw = (q_norm.inputs[0].buffer, k_norm.inputs[0].buffer, append.inputs[1].buffer)
        is_coded = id(out) in wanted and spec.head_dim % _BLOCK == 0
        made = self._made(out)
        codes = self._coded(out) if is_coded else Codes(raw[0], raw[0])
        flagged = (attention, q_norm, q_rope, k_norm, k_rope)
        parts: tuple[Buffer, ...] = ()
        if rows == 1:
            room = self._memory.attention_parts(spec.heads * blocks * (spec.head_dim + 2))
            parts = (room, self._memory.counters(spec.heads))
        buffers = (
            *raw,
            *(q_norm.said["weight"].buffer, k_norm.said["weight"].buffer),
            *q_rope.said["angles"],
            *self._memory.places(batch),
            *(cache.keys[layer], cache.values[layer]),
            *parts,
            *(made, codes.codes, codes.scales),
            *(self._memory.flags(node.said["name"], rows) for node in flagged),
        )
        args = constants(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            cache.stride,
            blocks,
            spec.window or 0,
            codes.order if is_coded else 0,
            float(q_norm.said["eps"]),
            float(spec.scale),
            float(spec.softcap or 0.0),
        )
        if rows > 1:
            threads = (spec.heads // together * GROUP, rows)
            self._device.launch(
                Launch(f"vox_step_some_rows_{together}_{ring}", buffers, args, threads, shared=shared)
            )
            return
        threads = (spec.heads * blocks * GROUP, 1)
        self._device.launch(
            Launch("vox_step_one_row", buffers, args, threads, together=blocks, shared=shared)
        )

    def _attend(self, node: Node, wanted: set[int]) -> None:
        q, spec, cache, batch = node.inputs[0], node.said["spec"], node.said["cache"], node.said["batch"]
        layer, (out,) = node.said["layer"], node.outputs
        rows, blocks = q.shape[0], batch.block_tables.shape[1]
        is_coded = id(out) in wanted and spec.head_dim % _BLOCK == 0
        made = self._made(out)
        together = self._together(spec, rows * blocks)
        is_few_rows = spec.head_dim <= GROUP and (rows > 1 or together > 1)
        codes = Codes(q.buffer, q.buffer)
        if is_coded:
            codes = self._coded(out, in_rows=not is_few_rows)
        buffers = (
            *(q.buffer, cache.keys[layer], cache.values[layer]),
            *self._memory.places(batch),
            self._memory.attention_parts(rows * spec.heads * blocks * (spec.head_dim + 2)),
            self._memory.counters(rows * spec.heads // together),
            *(made, codes.codes, codes.scales),
            self._memory.flags(node.said["name"], rows),
        )
        args = constants(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            cache.stride,
            blocks,
            spec.window or 0,
            codes.order if is_coded else 0,
            int(rows == batch.block_tables.shape[0]),
            float(spec.scale),
            float(spec.softcap or 0.0),
        )
        chunks = -(-spec.head_dim // GROUP)
        kernel = f"vox_step_attend_few_{together}" if is_few_rows else f"vox_step_attend_{together}_{chunks}"
        groups = blocks * spec.heads // together
        self._device.launch(Launch(kernel, buffers, args, (groups * GROUP, rows)))

    def _attend_rows(self, node: Node, wanted: set[int], alone: set[int]) -> None:
        q, spec, cache, batch = node.inputs[0], node.said["spec"], node.said["cache"], node.said["batch"]
        layer, rows, (out,) = node.said["layer"], q.shape[0], node.outputs
        tiles, count = self._memory.row_tiles(batch, QUERIES // (spec.heads // spec.kv_heads))
        is_coded = id(out) in wanted and spec.head_dim % _BLOCK == 0
        is_kept = not is_coded or id(out) not in alone
        made = self._made(out) if is_kept else q.buffer
        codes = self._coded(out) if is_coded else Codes(q.buffer, q.buffer)
        buffers = (
            *(q.buffer, cache.keys[layer], cache.values[layer]),
            *self._memory.places(batch),
            *(tiles, made, codes.codes, codes.scales),
            self._memory.flags(node.said["name"], rows),
        )
        args = constants(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            cache.stride,
            batch.block_tables.shape[1],
            spec.window or 0,
            count,
            int(is_kept),
            codes.order if is_coded else 0,
            float(spec.scale),
            float(spec.softcap or 0.0),
        )
        across = count * spec.kv_heads * GROUP
        self._device.launch(Launch("vox_step_attend_rows", buffers, args, (across, 1), shared=ROWS_SHARED))

    @staticmethod
    def _together(spec: AttentionSpec, places: int) -> int:
        """Query heads of a group: those that share keys and values, where there are groups enough."""
        sharing = spec.heads // spec.kv_heads
        if sharing not in _SHARING or spec.head_dim > GROUP or places <= _FEW_PLACES:
            return 1
        return sharing


def norm_part(rows: int, columns: int) -> int:
    """Columns of a row that one group of vox_step_between_norm makes."""
    turn = 4 * NORM_THREADS
    return turn if rows <= _SHARED_NORMS else -(-columns // turn) * turn


def _filled(values: Sequence[Any], rest: Any) -> list[Any]:
    return [*values, *[rest] * (3 - len(values))]
