"""Calls of the CPU lane's native functions with numpy arrays, kernels and reference alike.

`Native` is one side: the scalar reference, or the kernels of one instruction set with a number
of threads. Every method returns what the function wrote and the code it returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mens_cpu_ref.library import Library

Floats = npt.NDArray[np.float32]
FORMATS = {"f32": 0, "f16": 1, "bf16": 2}
FUNCTIONS = {"exp": 0, "log": 1, "silu": 2, "gelu": 3, "tanh": 4}


def address(array: npt.NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def shifted(array: Floats, offset: int) -> Floats:
    """A copy that starts `offset` elements past an aligned address."""
    memory = np.empty(array.size + 32, array.dtype)
    start = (-memory.ctypes.data // array.itemsize) % 16 + offset
    view = memory[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


def assert_same(found, expected) -> None:
    """Bytes and fault code; the first value that differs is shown."""
    if isinstance(expected, tuple):
        assert found[1] == expected[1]
        found, expected = found[0], expected[0]
    if found.tobytes() != expected.tobytes():
        at = np.flatnonzero(found.ravel().view(np.uint8) != expected.ravel().view(np.uint8))[0]
        i = at // found.itemsize
        raise AssertionError(
            f"element {i} of {found.shape}: {found.flat[i]!r}, expected {expected.flat[i]!r}"
        )


def domain(name: str, bits: npt.NDArray[np.uint32]) -> Floats:
    """Those of the bit patterns on which the function is defined, as floats."""
    x = bits.view(np.float32)
    x = x[np.isfinite(x)]
    if name == "exp":
        x = x[x <= 88]
    if name == "log":
        x = x[x >= np.float32(2**-126)]
    return np.ascontiguousarray(x)


def as_format(values: Floats, name: str) -> npt.NDArray[np.generic]:
    if name == "f32":
        return values
    if name == "f16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Native:
    """One side of a comparison."""

    library: Library
    isa: str | None
    """None: the scalar reference."""
    threads: int = 1

    @contextmanager
    def functions(self) -> Iterator[dict]:
        if self.isa is None:
            yield self.library.reference
            return
        self.library.force_isa(self.isa)
        self.library.set_threads(self.threads)
        try:
            yield self.library.kernels
        finally:
            self.library.force_isa("")
            self.library.set_threads(1)

    def function(self, name: str, x: Floats) -> Floats:
        out = np.empty_like(x)
        with self.functions() as f:
            assert f["function"](FUNCTIONS[name], address(x), x.size, address(out)) == 0
        return out

    def pack(self, weight: npt.NDArray[np.generic], name: str) -> tuple[npt.NDArray[np.generic], int]:
        rows, columns = weight.shape
        packed = np.zeros((-(-rows // 16) * 16, columns), weight.dtype)
        with self.functions() as f:
            return packed, f["pack"](FORMATS[name], address(weight), rows, columns, address(packed))

    def linear(self, x: Floats, weight: npt.NDArray[np.generic], name: str) -> tuple[Floats, int]:
        packed, code = self.pack(weight, name)
        assert code == 0
        rows, columns = weight.shape
        out = np.empty((len(x), rows), np.float32)
        with self.functions() as f:
            code = f["linear"](
                FORMATS[name], address(packed), rows, columns, address(x), len(x), address(out)
            )
        return out, code

    def embed(self, table: npt.NDArray[np.generic], name: str, ids: npt.NDArray[np.int32], scale: float):
        packed, code = self.pack(table, name)
        assert code == 0
        rows, columns = table.shape
        out = np.empty((len(ids), columns), np.float32)
        with self.functions() as f:
            code = f["embed"](
                FORMATS[name], address(packed), rows, columns, address(ids), len(ids), scale, address(out)
            )
        return out, code

    def widen(self, values: npt.NDArray[np.generic], name: str, add_one: bool) -> tuple[Floats, int]:
        out = np.empty(values.size, np.float32)
        with self.functions() as f:
            return out, f["widen"](FORMATS[name], address(values), values.size, int(add_one), address(out))

    def norm(self, x: Floats, weight: Floats, heads: int, eps: float) -> tuple[Floats, int]:
        out = np.empty_like(x)
        with self.functions() as f:
            code = f["norm"](
                address(x), address(weight), len(x), heads, x.shape[1] // heads, eps, address(out)
            )
        return out, code

    def rotary(self, frequencies: list[int], factor: int, first: int, count: int) -> Floats:
        halves = np.array([[f & (2**64 - 1), f >> 64] for f in frequencies], np.uint64)
        table = np.empty((count, 2, len(frequencies)), np.float32)
        with self.functions() as f:
            f["rotary"](
                address(halves), len(halves), factor & (2**64 - 1), factor >> 64, first, count, address(table)
            )
        return table

    def rope(self, x: Floats, heads: int, table: Floats, slots, positions) -> tuple[Floats, int]:
        out = np.empty_like(x)
        pairs = table.shape[-1]
        with self.functions() as f:
            code = f["rope"](
                address(x), len(x), heads, pairs, address(table), address(slots), len(slots),
                address(positions), address(out),
            )  # fmt: skip
        return out, code

    def elementwise(self, name: str, *operands: Floats, constant: float | None = None) -> tuple[Floats, int]:
        rows, width = operands[0].shape
        out = np.empty_like(operands[0])
        constants = () if constant is None else (constant,)
        with self.functions() as f:
            code = f[name](*map(address, operands), rows, width, *constants, address(out))
        return out, code

    def attention(
        self, step: Step, q: Floats, window: int, softcap: float, scale: float
    ) -> tuple[Floats, int]:
        """Append the step's keys and values to a copy of its cache, then attend."""
        keys, values = step.keys.copy(), step.values.copy()
        rows, blocks, kv_heads, head_dim = len(step.positions), *step.keys.shape[:3]
        table = (address(step.positions), address(step.starts), address(step.block_tables))
        counts = (*step.block_tables.shape, blocks)
        out = np.empty_like(q)
        with self.functions() as f:
            code = f["kv_append"](
                address(step.k), address(step.v), rows, kv_heads, head_dim, *table, *counts,
                address(keys), address(values),
            )  # fmt: skip
            if code == 0:
                code = f["attention"](
                    address(q), rows, q.shape[1] // head_dim, kv_heads, head_dim, *table, *counts,
                    address(keys), address(values), scale, window, softcap, address(out),
                )  # fmt: skip
        return out, code

    def penalise(self, logits: Floats, ids, repetition: Floats, subtract: Floats) -> tuple[Floats, int]:
        out = logits.copy()
        with self.functions() as f:
            code = f["penalise"](
                address(out), out.size, address(ids), len(ids), address(repetition), address(subtract)
            )
        return out, code

    def argmax(self, x: Floats) -> npt.NDArray[np.int32]:
        out = np.empty(len(x), np.int32)
        with self.functions() as f:
            assert f["argmax"](address(x), *x.shape, address(out)) == 0
        return out

    def token_weights(self, x: Floats, temperature: float) -> npt.NDArray[np.uint64]:
        out = np.empty(x.size, np.uint64)
        with self.functions() as f:
            assert f["token_weights"](address(x), x.size, temperature, address(out)) == 0
        return out

    def log_normaliser(self, x: Floats) -> tuple[Floats, int]:
        out = np.empty(len(x), np.float32)
        with self.functions() as f:
            return out, f["log_normaliser"](address(x), *x.shape, address(out))


@dataclass(frozen=True)
class Step:
    """Rows of some sequences, and a cache whose earlier positions are already filled."""

    positions: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    k: Floats
    v: Floats
    keys: Floats
    values: Floats

    @classmethod
    def of(
        cls, slices: list[tuple[int, int]], kv_heads: int, head_dim: int, rng: np.random.Generator
    ) -> Step:
        """`slices` are (first position, rows) of each sequence; blocks lie in random order."""
        blocks_per_sequence = max((first + count - 1) // 128 + 1 for first, count in slices)
        blocks = len(slices) * blocks_per_sequence
        order = rng.permutation(blocks).astype(np.int32).reshape(len(slices), blocks_per_sequence)
        tables = np.full_like(order, -1)
        for s, (first, count) in enumerate(slices):
            used = (first + count - 1) // 128 + 1
            tables[s, :used] = order[s, :used]
        rows = sum(count for _, count in slices)
        stride = -(-head_dim // 16) * 16

        def normal(*shape: int) -> Floats:
            return rng.standard_normal(shape).astype(np.float32)

        return cls(
            positions=np.concatenate([np.arange(f, f + c) for f, c in slices]).astype(np.int32),
            starts=np.cumsum([0, *(c for _, c in slices)]).astype(np.int32),
            block_tables=tables,
            k=normal(rows, kv_heads * head_dim),
            v=normal(rows, kv_heads * head_dim),
            keys=normal(blocks, kv_heads, head_dim, 128),
            values=normal(blocks, kv_heads, 128, stride),
        )
