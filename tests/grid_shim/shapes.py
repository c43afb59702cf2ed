"""Cases beyond the conformance vectors: each operator over shapes, tails and extreme values.

Like `mens_core.conformance.cases`: a case is called with a lane's operators and yields arrays, which are
compared by bytes with what the scalar reference yields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats, floats, put, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, Ops, StoredTensor

__all__ = ["SHAPES"]

Arrays = Iterator[npt.NDArray[Any]]
FLOAT_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16")
BLOCKS_OF_32: tuple[Format, ...] = ("q8_0", "q5_0", "q4_0")
SUPER_BLOCKS: tuple[Format, ...] = ("q4_k", "q5_k", "q6_k")

WIDTHS = (1, 2, 127, 128, 129, 255, 257, 640)
"""Around one chunk and one group of threads."""
LONG = 128 * 128 + 700
"""More chunks than a group has threads, and a last one that is not full."""


def _extremes(sample: int, rows: int, width: int) -> Floats:
    """Rows of subnormals, of the smallest normal numbers, of large ones, of both zeros."""
    x = floats(sample, rows, width, span=2, binades=30)
    for row in range(rows):
        kind = row % 5
        if kind == 1:
            x[row] = np.ldexp(x[row], -127)
        if kind == 2:
            x[row] = np.ldexp(x[row], 40)
        if kind == 3:
            x[row, ::2] = np.float32(-0.0)
            x[row, 1::2] = 0
    return x


def _linear(sample: int, format_: Format, rows: int, outputs: int, columns: int, ops: Ops) -> Arrays:
    x = floats(sample, rows, columns, span=3, binades=12)
    matrix = ops.load_matrix(weight(format_, sample + 1, outputs, columns))
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="linear"))


def _near_ties(format_: Format, block: int, ops: Ops) -> Arrays:
    """Activations whose product with 127 / amax rounds to a half, which it is not: a fused multiply-add
    would not see the half."""
    amax = floats(81, 24) + np.float32(2.5)
    inverse = np.float32(127) / amax
    halves = (np.arange(block) * 97 % 253 - 126).astype(np.float64) + 0.5
    x = (halves / inverse.astype(np.float64)[:, None]).astype(np.float32)
    x[:, 0] = amax
    matrix = ops.load_matrix(weight(format_, 82, 40, block))
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="linear"))


def _every_half(format_: Format, ops: Ops) -> Arrays:
    """All finite bit patterns of a 16-bit format, subnormals too: as a table and as a vector."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    exponent = np.uint16(0x7C00 if format_ == "f16" else 0x7F80)
    bits = bits[(bits & exponent) != exponent]
    stored = StoredTensor("halves", format_, bits.shape, memoryview(bits.tobytes()))
    for plus_one in (False, True):
        yield ops.to_host(ops.load_vector(stored, plus_one=plus_one))
    table = StoredTensor("halves", format_, (8, len(bits) // 8), memoryview(bits.tobytes()))
    yield ops.to_host(ops.embed(ops.load_matrix(table), np.arange(8, dtype=np.int32), 0.75, name="embed"))


def _embed(sample: int, format_: Format, ops: Ops) -> Arrays:
    table = ops.load_matrix(weight(format_, sample, 130, 512))
    ids = np.array([129, 0, 64, 64, 1], np.int32)
    yield ops.to_host(ops.embed(table, ids, 33.5, name="embed"))


def _norm(sample: int, rows: int, heads: int, width: int, ops: Ops) -> Arrays:
    x = put(ops, floats(sample, rows, heads * width, span=2, binades=20))
    w = ops.load_vector(stored_float(floats(sample + 1, width)))
    yield ops.to_host(ops.head_norm(x, w, heads, 9.999999974752427e-07, name="norm"))


def _norm_of_extremes(ops: Ops) -> Arrays:
    x = put(ops, _extremes(98, 5, 300))
    w = ops.load_vector(stored_float(floats(99, 300)))
    yield ops.to_host(ops.rms_norm(x, w, 9.999999974752427e-07, name="norm"))


def _pairs(operator: str, sample: int, rows: int, width: int, ops: Ops) -> Arrays:
    a, b = (floats(sample + i, rows, width, span=4, binades=20) for i in range(2))
    yield ops.to_host(getattr(ops, operator)(put(ops, a), put(ops, b), name=operator))


def _flush(operator: str, ops: Ops) -> Arrays:
    a, b = floats(91, 5, 400, span=2, binades=30), floats(92, 5, 400, span=2, binades=30)
    a[1], b[1], b[2] = np.ldexp(a[1], -126), np.ldexp(b[1], -126), np.ldexp(b[2], -126)
    a[3], b[3] = np.ldexp(a[3], -125), -np.ldexp(a[3], -125)
    yield ops.to_host(getattr(ops, operator)(put(ops, a), put(ops, b), name=operator))


def _softcap(sample: int, rows: int, width: int, cap: float, ops: Ops) -> Arrays:
    x = floats(sample, rows, width, span=8, binades=30)
    yield ops.to_host(ops.softcap(put(ops, x), cap, name="softcap"))


def _rope(sample: int, heads: int, pairs: int, ops: Ops) -> Arrays:
    positions = np.array([0, 5, 127, 128, 1000, 262_143], np.int32)
    table = ops.rotary_table([(1 << 128) // (5 + 11 * i) for i in range(pairs)], None)
    x = put(ops, floats(sample, len(positions), heads * 2 * pairs, span=2, binades=8))
    yield ops.to_host(ops.rope(x, heads, table, positions, name="rope"))


def _attention(
    sample: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    ops: Ops,
) -> Arrays:
    """Three sequences: a prompt over three blocks, a chunk that goes on, single rows far along."""
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.158203125, window, softcap)
    cache = ops.new_kv_cache(layers=1, kv_heads=kv_heads, head_dim=head_dim, blocks=7)
    tables = np.array([[6, 2, 4], [0, 5, -1], [3, 1, -1]], np.int32)
    for step, slices in enumerate(
        ([(0, 250), (0, 120), (0, 129)], [(250, 7), (120, 30), (129, 1)], [(257, 1)] * 1)
    ):
        used = [(start, rows) for start, rows in slices]
        positions = np.concatenate([np.arange(start, start + rows) for start, rows in used]).astype(np.int32)
        starts = np.cumsum([0, *(rows for _, rows in used)]).astype(np.int32)
        none = np.array([], np.int32)
        batch = Batch(np.zeros(len(positions), np.int32), positions, starts, tables[: len(used)], none)
        rows, at = len(positions), sample + 3 * step
        k = put(ops, floats(at, rows, kv_heads * head_dim, span=1, binades=3))
        v = put(ops, floats(at + 1, rows, kv_heads * head_dim, span=1, binades=3))
        ops.kv_append(cache, 0, k, v, batch)
        if step == 0:
            continue  # many rows; the later ones see what these stored
        q = put(ops, floats(at + 2, rows, heads * head_dim, span=2, binades=3))
        yield ops.to_host(ops.attention(q, cache, 0, batch, spec, name="attention"))


def _take_rows(ops: Ops) -> Arrays:
    x = put(ops, floats(93, 5, 131))
    yield ops.to_host(ops.take_rows(x, np.array([0, 3, 4], np.int32)))


def _choose(sample: int, rows: int, width: int, ops: Ops) -> Arrays:
    x = floats(sample, rows, width, span=4, binades=6)
    x[-1] = x[-1, 0]
    logits = put(ops, x)
    yield np.asarray(ops.argmax(logits), np.int32)
    yield np.asarray(ops.log_normaliser(logits), np.float32)
    yield np.asarray(ops.token_weights(logits, rows - 1, 0.8999999761581421), np.uint64)
    yield np.asarray(ops.token_weights(logits, 0, 0.25), np.uint64)
    ids = np.arange(0, width, 3, dtype=np.int32)
    repetition = np.ldexp(floats(sample + 1, len(ids)), -2) + np.float32(1.25)
    ops.penalise(logits, 0, ids, repetition=repetition, subtract=floats(sample + 2, len(ids)))
    yield ops.to_host(logits)


def _faults(ops: Ops) -> Arrays:
    """Rows that are not finite, by the operators' own account."""
    x = floats(94, 6, 256, span=3)
    x[[1, 4], 7] = np.ldexp(np.float32(1), 127)
    bad = put(ops, x)
    ops.take_faults()
    w = ops.load_vector(stored_float(floats(95, 256)))
    found = []
    for name, call in {
        "add": lambda: ops.add(bad, bad, name="add"),
        "norm": lambda: ops.rms_norm(bad, w, 1e-6, name="norm"),
        "gate": lambda: ops.silu_gate(bad, bad, name="gate"),
        "linear": lambda: ops.linear(bad, ops.load_matrix(weight("f32", 96, 5, 256)), name="linear"),
        "quantised": lambda: ops.linear(bad, ops.load_matrix(weight("q8_0", 97, 5, 256)), name="quantised"),
    }.items():
        y = ops.to_host(call())
        rows = sorted({row for fault in ops.take_faults() for row in fault.rows})
        found.append(np.array([len(name), *rows], np.int32))
        if name == "norm":
            yield y.view(np.uint32) & np.uint32(0x7FC00000)  # which NaN is nobody's promise
    yield from found


def _cases() -> dict[str, Callable[[Ops], Arrays]]:
    cases: dict[str, Callable[[Ops], Arrays]] = {}
    samples = count(2000, 20)
    for format_ in FLOAT_FORMATS:
        for rows, outputs, columns in (
            (1, 1, 1),
            (3, 129, 127),
            (1, 130, 128),
            (2, 7, 129),
            (5, 16, 640),
            (17, 129, 300),
        ):
            shape = f"{rows}x{outputs}x{columns}"
            cases[f"linear/{format_}/{shape}"] = partial(
                _linear, next(samples), format_, rows, outputs, columns
            )
    for format_ in BLOCKS_OF_32:
        for rows, outputs, columns in ((1, 1, 32), (3, 129, 96), (1, 5, 128), (2, 33, 544), (17, 129, 160)):
            shape = f"{rows}x{outputs}x{columns}"
            cases[f"linear/{format_}/{shape}"] = partial(
                _linear, next(samples), format_, rows, outputs, columns
            )
    for format_ in SUPER_BLOCKS:
        for rows, outputs, columns in ((1, 1, 256), (3, 129, 512), (2, 33, 1280), (17, 129, 512)):
            shape = f"{rows}x{outputs}x{columns}"
            cases[f"linear/{format_}/{shape}"] = partial(
                _linear, next(samples), format_, rows, outputs, columns
            )
    cases["linear/q8_0/near ties"] = partial(_near_ties, "q8_0", 32)
    cases["linear/q6_k/near ties"] = partial(_near_ties, "q6_k", 256)
    for format_ in (*FLOAT_FORMATS, *BLOCKS_OF_32, *SUPER_BLOCKS):
        cases[f"embed/{format_}"] = partial(_embed, next(samples), format_)
    for format_ in FLOAT_FORMATS[1:]:
        cases[f"every half/{format_}"] = partial(_every_half, format_)
    for width in WIDTHS:
        cases[f"norm/{width}"] = partial(_norm, next(samples), 3, 1, width)
    cases[f"norm/{LONG}"] = partial(_norm, next(samples), 1, 1, LONG)
    cases["norm/heads"] = partial(_norm, next(samples), 3, 5, 136)
    cases["norm/extremes"] = _norm_of_extremes
    for operator in ("add", "silu_gate", "gelu_gate"):
        for rows, width in ((1, 1), (3, 127), (2, 128), (2, 1029)):
            cases[f"{operator}/{rows}x{width}"] = partial(_pairs, operator, next(samples), rows, width)
        cases[f"{operator}/flushed"] = partial(_flush, operator)
    for cap in (1.0, 20.0, 50.0):
        cases[f"softcap/{cap:g}"] = partial(_softcap, next(samples), 2, 700, cap)
    for heads, pairs in ((1, 1), (3, 20), (2, 64), (1, 128)):
        cases[f"rope/{heads}x{2 * pairs}"] = partial(_rope, next(samples), heads, pairs)
    for heads, kv_heads, head_dim, window, softcap in (
        (1, 1, 8, None, None),
        (4, 2, 64, None, None),
        (2, 2, 136, 64, None),
        (3, 1, 256, 128, None),
        (2, 1, 40, 1, 30.0),
        (2, 1, 72, 200, 50.0),
    ):
        cases[f"attention/{heads}/{kv_heads}x{head_dim}/{window}/{softcap}"] = partial(
            _attention, next(samples), heads, kv_heads, head_dim, window, softcap
        )
    cases["take_rows"] = _take_rows
    for rows, width in ((1, 1), (2, 127), (3, 128), (2, 130), (2, LONG)):
        cases[f"choose/{rows}x{width}"] = partial(_choose, next(samples), rows, width)
    cases["faults"] = _faults
    return cases


SHAPES = _cases()
