"""Layers written down once as a list of operators, and run by one native call a step.

A model's layers call the same operators with the same weights in every step; only rows, positions
and blocks differ. So they are run once over a `Recorder`, which computes nothing, and what it wrote
down is replayed (`vox_replay` of native/abi.h). The operators are the lane's own, in the same
order: a replay gives the bits that calling them one by one gives.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

import numpy as np
import numpy.typing as npt

from mens_core.ops import AttentionSpec, Batch, Ints, Ops, ServedLayer
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.calls import (
    ADD,
    ADD_SCALED,
    ATTENTION,
    GELU_GATE,
    KV_APPEND,
    LINEAR,
    NORM,
    QUANT_ACTIVATIONS,
    QUANT_LINEAR,
    ROPE,
    SILU_GATE,
    Call,
    Groups,
    Value,
    assign_buffers,
)
from mens_cpu_ref.matrices import FloatMatrix, KvCache
from mens_cpu_ref.quantised import QuantisedMatrix
from mens_cpu_ref.rotary import RotaryTable

__all__ = ["OPERATION_WORDS", "Recorder", "Recording", "UnrecordableError", "record"]

OPERATION_WORDS = 16
_ARGUMENTS_AT = 5


class UnrecordableError(Exception):
    """The layers do something that a recording has no words for: they are to be called one by one."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Operators with their buffers, ready for `vox_replay`."""

    operations: npt.NDArray[np.int64]
    """[operators, OPERATION_WORDS]"""
    slots: tuple[tuple[int, int], ...]
    """Width and block (0: floats) of each buffer after the two that the caller brings."""
    tables: tuple[RotaryTable, ...]
    _table_rows: tuple[npt.NDArray[np.intp], ...]
    _table_arguments: list[tuple[int, ...]]

    def take_tables(self) -> None:
        """Write down where the rotary tables are now: they move as they grow."""
        for i, table in enumerate(self.tables):
            if self._table_arguments[i] is not table.arguments:
                self._table_arguments[i] = table.arguments
                _, *moved = table.arguments
                self.operations[self._table_rows[i], _ARGUMENTS_AT + 2 : _ARGUMENTS_AT + 5] = moved


def record(layers: Sequence[ServedLayer], batch: Batch, cache: KvCache, width: int) -> Recording:
    """Write down what the layers do to rows of `width` floats.

    Raises:
        UnrecordableError: they call something else than `Recorder` has.
    """
    recorder = Recorder(batch, cache)
    x = recorder.new(width)
    for layer in layers:
        x = layer.forward(cast(Ops, recorder), x, batch, cache)
    return recorder.finish(x)


@dataclass(slots=True)
class Recorder:
    """Stands in for the lane while layers are written down; has the operators that layers call."""

    batch: Batch
    cache: KvCache
    _calls: list[Call] = field(default_factory=list)
    _made: int = 0
    _codes: dict[tuple[int, int], Value] = field(default_factory=dict)

    def new(self, width: int, block: int = 0) -> Value:
        """Return a value that nothing has made yet."""
        self._made += 1
        return Value(self._made - 1, width, block)

    # --- the operators -------------------------------------------------------------------------

    def linear(self, x: Value, weight: FloatMatrix | QuantisedMatrix, *, name: str) -> Value:
        out = self.new(weight.rows)
        arguments = (weight.number, weight.address, weight.rows, weight.columns)
        if isinstance(weight, QuantisedMatrix):
            self._add(QUANT_LINEAR, self._quantised(x, weight.block), None, out, *arguments)
        else:
            self._add(LINEAR, x, None, out, *arguments)
        self._check(x.width == weight.columns, name)
        return out

    def linear_many(
        self, x: Value, weights: Sequence[FloatMatrix | QuantisedMatrix], *, names: Sequence[str]
    ) -> list[Value]:
        # Codes first, so that the products stand together.
        for weight in weights:
            if isinstance(weight, QuantisedMatrix):
                self._quantised(x, weight.block)
        return [self.linear(x, weight, name=name) for weight, name in zip(weights, names, strict=True)]

    def rms_norm(self, x: Value, weight: Rows, eps: float, *, name: str) -> Value:
        return self.head_norm(x, weight, 1, eps, name=name)

    def head_norm(self, x: Value, weight: Rows, heads: int, eps: float, *, name: str) -> Value:
        self._check(x.width == heads * len(weight.values), name)
        out = self.new(x.width)
        self._add(NORM, x, None, out, weight.address, heads, x.width // heads, _bits(eps))
        return out

    def rope(self, x: Value, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Value:
        self._check(positions is self.batch.positions and x.width == heads * 2 * table.pairs, name)
        out = self.new(x.width)
        self._add(ROPE, x, None, out, heads, *table.arguments)
        self._calls[-1].table = table
        return out

    def kv_append(self, cache: KvCache, layer: int, k: Value, v: Value, batch: Batch) -> None:
        fits = k.width == v.width == cache.kv_heads * cache.head_dim
        self._check(cache is self.cache and batch is self.batch and fits, "kv_append")
        self._add(
            KV_APPEND,
            k,
            v,
            None,
            cache.kv_heads,
            cache.head_dim,
            cache.key_addresses[layer],
            cache.value_addresses[layer],
        )
        self._calls[-1].layer = layer

    def attention(
        self, q: Value, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Value:
        fits = (q.width, spec.kv_heads, spec.head_dim) == (
            spec.heads * spec.head_dim,
            cache.kv_heads,
            cache.head_dim,
        )
        self._check(cache is self.cache and batch is self.batch and fits, name)
        out = self.new(q.width)
        self._add(
            ATTENTION,
            q,
            None,
            out,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            cache.key_addresses[layer],
            cache.value_addresses[layer],
            _bits(spec.scale),
            spec.window or 0,
            _bits(spec.softcap or 0.0),
        )
        self._calls[-1].layer = layer
        return out

    def add(self, a: Value, b: Value, *, name: str) -> Value:
        return self._two(ADD, a, b, name)

    def add_scaled(self, y: Value, x: Value, factor: float, *, name: str) -> Value:
        self._check(y.width == x.width, name)
        out = self.new(y.width)
        self._add(ADD_SCALED, y, x, out, y.width, _bits(factor))
        return out

    def silu_gate(self, gate: Value, up: Value, *, name: str) -> Value:
        return self._two(SILU_GATE, gate, up, name)

    def gelu_gate(self, gate: Value, up: Value, *, name: str) -> Value:
        return self._two(GELU_GATE, gate, up, name)

    def __getattr__(self, name: str) -> NoReturn:
        raise UnrecordableError(f"operator {name}")

    # --- writing down --------------------------------------------------------------------------

    def _add(self, kind: int, x: Value, y: Value | None, out: Value | None, *arguments: int) -> None:
        self._calls.append(Call(kind, x, y, out, arguments))

    def _two(self, kind: int, a: Value, b: Value, name: str) -> Value:
        self._check(a.width == b.width, name)
        out = self.new(a.width)
        self._add(kind, a, b, out, a.width)
        return out

    def _quantised(self, x: Value, block: int) -> Value:
        codes = self._codes.get((x.number, block))
        if codes is None:
            codes = self._codes[x.number, block] = self.new(x.width, block)
            self._add(QUANT_ACTIVATIONS, x, None, codes, block, x.width)
        return codes

    def _check(self, fits: bool, name: str) -> None:
        # Called one by one, the operators say what does not fit.
        if not fits:
            raise UnrecordableError(name)

    def finish(self, result: Value) -> Recording:
        """Give every value a buffer, every operator its place, and return the recording."""
        buffers, slots = assign_buffers(self._calls, result)
        tables: list[RotaryTable] = []
        rows: list[list[int]] = []
        operations = np.zeros((len(self._calls), OPERATION_WORDS), np.int64)
        groups = Groups()
        for i, call in enumerate(self._calls):
            x, y, out = (-1 if v is None else buffers[v.number] for v in (call.x, call.y, call.out))
            operations[i, :_ARGUMENTS_AT] = (call.kind, groups.takes(call, x, y, out), x, y, out)
            operations[i, _ARGUMENTS_AT : _ARGUMENTS_AT + len(call.arguments)] = call.arguments
            if call.table is not None:
                if call.table not in tables:
                    tables.append(call.table)
                    rows.append([])
                rows[tables.index(call.table)].append(i)
        return Recording(
            operations,
            tuple(slots),
            tuple(tables),
            tuple(np.array(r, np.intp) for r in rows),
            [() for _ in tables],
        )


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
