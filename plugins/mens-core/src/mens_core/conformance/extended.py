"""More cases than a start has time for: tails, many rows, many sequences, extreme values, tripwires.

Each is a call where some implementation is known to go wrong: a last chunk that is not full, a
vector that is not, a row that takes another path when it comes alone, a zero with a sign, a
number that must flush, a sum whose order shows in its last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases import Case
from mens_core.conformance.cases_rounding import ROUNDING
from mens_core.conformance.inputs import BLOCKS, Floats, floats, put, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, Ops, StoredTensor

__all__ = ["EXTENDED"]

Arrays = Iterator[npt.NDArray[Any]]

_TAILS = ((1, 1, 1), (2, 15, 127), (3, 16, 128), (5, 17, 129), (17, 33, 255), (9, 1, 384))
"""Rows, outputs and inputs of a product; inputs in whole blocks where the format has them."""
_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", *BLOCKS)

_FUSED = (0x3EB97EF9, 0x3FC00000)
"""a and b with fma(a, b, 1) != a * b + 1 in the last bit."""


def _bits(*words: int) -> Floats:
    return np.array(words, np.uint32).view(np.float32)


def _linear_tails(format_: Format, ops: Ops) -> Arrays:
    block = BLOCKS[format_][0] if format_ in BLOCKS else 1
    for sample, (rows, outputs, columns) in enumerate(_TAILS):
        columns = -(-columns // block) * block
        matrix = ops.load_matrix(weight(format_, 40 + sample, outputs, columns))
        x = put(ops, floats(50 + sample, rows, columns, span=2, binades=9))
        yield ops.to_host(ops.linear(x, matrix, name="tail"))


def _linear_extremes(format_: Format, ops: Ops) -> Arrays:
    """Every code at its least and at its greatest, against activations at theirs."""
    size, length, scales = BLOCKS[format_]
    blocks, columns = 2, 2 * size
    rows = []
    # Negative scales too: a zero sum must not keep their sign.
    for fill, high in ((0x00, 0x1C), (0x7F, 0x1C), (0x80, 0x1C), (0xFF, 0x1C), (0x00, 0x9C), (0x7F, 0x9C)):
        raw = np.full((blocks, length), fill, np.uint8)
        for place in scales:
            raw[:, place], raw[:, place + 1] = 0x55, high
        rows.append(raw.tobytes())
    data = memoryview(b"".join(rows))
    matrix = ops.load_matrix(StoredTensor("extremes", format_, (len(rows), columns), data))
    x = np.empty((4, columns), np.float32)
    x[0], x[1], x[2], x[3] = 127, -127, 0, np.float32(-0.0)
    x[2, ::3] = np.ldexp(np.float32(1), -100)
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="extremes"))


def _linear_tripwires(ops: Ops) -> Arrays:
    """Products short enough to be followed by hand; each outcome but one is a known mistake."""
    a, b = _bits(*_FUSED)
    tiny = np.ldexp(np.float32(1), -24)
    x = np.zeros((4, 130), np.float32)
    w = np.zeros((4, 130), np.float32)
    # A product that is rounded before it is added.
    x[0, :2], w[0, :2] = (1, a), (1, b)
    # (1 + t) + t is 1, 1 + (t + t) is not; inside a chunk, and across chunks.
    x[1, :3], w[1, :3] = 1, (1, tiny, tiny)
    x[2, [0, 127, 128, 129]], w[2, [0, 127, 128, 129]] = 1, (1, tiny, tiny, tiny)
    # Results that flush, with either sign.
    x[3, 0], w[3, 0] = np.ldexp(np.float32(-1), -70), np.ldexp(np.float32(1), -70)
    yield ops.to_host(ops.linear(put(ops, x), ops.load_matrix(stored_float(w)), name="tripwires"))
    # Weights that are subnormal in the file count as zero.
    flushed = _bits(0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000).reshape(6, 1)
    big = np.full((1, 1), np.ldexp(np.float32(1), 100), np.float32)
    yield ops.to_host(ops.linear(put(ops, big), ops.load_matrix(stored_float(flushed)), name="flushed"))


def _embed_extremes(ops: Ops) -> Arrays:
    values = _bits(0x80000000, 0x00000001, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000).reshape(2, 3)
    table = ops.load_matrix(stored_float(values))
    for scale in (None, 0.5):
        yield ops.to_host(ops.embed(table, np.array([1, 0, 1], np.int32), scale, name="extremes"))


def _norm_widths(ops: Ops) -> Arrays:
    # 1701: eight chunks, four, one, and a tail; 300 in nine rows: eight side by side, and one.
    shapes = ((4, 1), (4, 15), (4, 127), (4, 128), (4, 129), (4, 640), (4, 1701), (9, 300))
    for sample, (rows, width) in enumerate(shapes):
        x = floats(70 + sample, rows, width, span=3, binades=14)
        x[1] = 0
        x[2] = np.ldexp(x[2], -40)  # eps decides
        x[3, ::2] = np.float32(-0.0)
        w = ops.load_vector(stored_float(floats(80 + sample, width)))
        yield ops.to_host(ops.rms_norm(put(ops, x), w, 9.999999974752427e-07, name="norm"))


def _head_norm_widths(ops: Ops) -> Arrays:
    for sample, (heads, width) in enumerate(((1, 8), (5, 16), (2, 129), (8, 64), (3, 256))):
        w = ops.load_vector(stored_float(floats(90 + sample, width)), plus_one=sample % 2 == 1)
        x = put(ops, floats(94 + sample, 3, heads * width, span=2, binades=9))
        yield ops.to_host(ops.head_norm(x, w, heads, 9.999999974752427e-07, name="norm"))


def _rope_widths(ops: Ops) -> Arrays:
    positions = np.array([0, 1, 2, 255, 256, 1000], np.int32)
    for sample, (heads, width) in enumerate(((1, 2), (3, 34), (5, 128))):
        frequencies = [(1 << 128) // (3 + 5 * i) for i in range(width // 2)]
        x = put(ops, floats(100 + sample, len(positions), heads * width, span=1, binades=4))
        yield ops.to_host(ops.rope(x, heads, ops.rotary_table(frequencies, None), positions, name="rope"))


def _rope_ties(ops: Ops) -> Arrays:
    """Position 0 under attention factors half way between two float32: cosines are 1 and ties go to even."""
    x = put(ops, np.array([[1, 1, 0, 0], [0, 0, 1, 1]], np.float32))
    for odd in (1, 3):
        table = ops.rotary_table([1 << 100, 1 << 120], ((1 << 24) + odd, 1 << 24))
        yield ops.to_host(ops.rope(x, 1, table, np.array([0, 0], np.int32), name="ties"))


def _attention_shapes(ops: Ops) -> Arrays:
    """Head widths, groups and windows that the quick cases leave out; 270 positions are three blocks."""
    shapes: tuple[tuple[int, int, int, int | None], ...] = (
        (1, 1, 8, None), (6, 2, 16, 1), (4, 4, 33, 128), (8, 1, 64, 129),
    )  # fmt: skip
    for sample, (heads, kv_heads, width, window) in enumerate(shapes):
        spec = AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=width, scale=0.25, window=window)
        cache = ops.new_kv_cache(layers=1, kv_heads=kv_heads, head_dim=width, blocks=3)
        batch = _ragged([(0, 270)], [[2, 0, 1]])
        k, v = (floats(110 + 2 * sample + i, 270, kv_heads * width, span=1, binades=3) for i in (0, 1))
        ops.kv_append(cache, 0, put(ops, k), put(ops, v), batch)
        last = _ragged([(130 * sample % 200, 3)], [[2, 0, 1]])
        q = put(ops, floats(120 + sample, 3, heads * width, span=3, binades=3))
        yield ops.to_host(ops.attention(q, cache, 0, last, spec, name="attention"))


def _attention_company(ops: Ops) -> Arrays:
    """Four sequences in one step, long and short, prefill and decode: nobody sees a neighbour."""
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=16, scale=0.25)
    cache = ops.new_kv_cache(layers=1, kv_heads=2, head_dim=16, blocks=7)
    tables = [[6, 1], [0, -1], [5, 2], [3, -1]]
    first = _ragged([(0, 131), (0, 1), (0, 128), (0, 40)], tables)
    second = _ragged([(131, 1), (1, 1), (128, 5), (40, 1)], tables)
    for batch, sample in ((first, 130), (second, 133)):
        rows = len(batch.positions)
        q = put(ops, floats(sample, rows, 64, span=2, binades=3))
        k = put(ops, floats(sample + 1, rows, 32, span=1, binades=3))
        v = put(ops, floats(sample + 2, rows, 32, span=1, binades=3))
        ops.kv_append(cache, 0, k, v, batch)
        made = ops.to_host(ops.attention(q, cache, 0, batch, spec, name="attention"))
        # Of a long prefill the edges: the first rows and the last of each sequence.
        kept = [r for s in range(4) for r in {int(batch.starts[s]), int(batch.starts[s + 1]) - 1}]
        yield made[sorted(kept)]


def _attention_scores(ops: Ops) -> Arrays:
    """Equal scores, and scores so far apart that all weights but one are zero."""
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=4, scale=1.0)
    cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=4, blocks=2)
    batch = _ragged([(0, 140)], [[1, 0]])
    k = np.ones((140, 4), np.float32)
    k[70], k[135] = 30, -30
    ops.kv_append(cache, 0, put(ops, k), put(ops, floats(140, 140, 4, span=4, binades=12)), batch)
    q = np.array([[0, 0, 0, 0], [1, 1, 1, 1], [-8, 0, 0, 0]], np.float32)
    last = _ragged([(137, 3)], [[1, 0]])
    yield ops.to_host(ops.attention(put(ops, q), cache, 0, last, spec, name="attention"))


def _ragged(slices: list[tuple[int, int]], tables: list[list[int]]) -> Batch:
    positions = np.concatenate([np.arange(start, start + count) for start, count in slices])
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        starts=np.cumsum([0, *(count for _, count in slices)]).astype(np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.array([], np.int32),
    )


def _add_edges(ops: Ops) -> Arrays:
    a = _bits(0x80000000, 0x00000000, 0x00800001, 0x3F800000, 0x7F000000, 0x3F800000, 0xBF800001)
    b = _bits(0x80000000, 0x80000000, 0x80800000, 0x33800000, 0x7E000000, 0x33800001, 0x3F800000)
    yield ops.to_host(ops.add(put(ops, a[None]), put(ops, b[None]), name="add"))


_EDGES = (0.0, -0.0, 2.0**-100, -(2.0**-100), 2.0**-30, 0.5, 0.625, 1.0, 15.0, 16.7, 17.4, 31.0, 62.0,
          86.9, 87.0, 87.3, 87.5, 88.0, 88.7, 89.0, 100.0, 103.9, 104.1, 1e4, 2.0**60,
          0.625, 87.0)  # fmt: skip
"""Where exponentials and what is made of them begin to flush, to round to 1, or to overflow; the
thresholds themselves twice, so that a vector's body and its tail both meet them."""


def _gate_edges(operator: str, ops: Ops) -> Arrays:
    gate = np.array([sign * edge for edge in _EDGES for sign in (1, -1)], np.float32)[None]
    up = floats(150, 1, gate.shape[1])
    yield ops.to_host(getattr(ops, operator)(put(ops, gate), put(ops, up), name="gated"))
    gate, up = floats(151, 4, 600, span=4, binades=6), floats(152, 4, 600)
    yield ops.to_host(getattr(ops, operator)(put(ops, gate), put(ops, up), name="gated"))


def _softcap_edges(ops: Ops) -> Arrays:
    x = np.array([sign * edge for edge in _EDGES for sign in (1, -1)], np.float32)[None]
    for cap in (1.0, 30.0):
        yield ops.to_host(ops.softcap(put(ops, x), cap, name="capped"))
    yield ops.to_host(ops.softcap(put(ops, floats(153, 4, 600, span=2, binades=4)), 1.0, name="capped"))


def _penalise_many(ops: Ops) -> Arrays:
    """Products and differences enough that one rounding instead of two shows."""
    logits = put(ops, floats(145, 2, 601, span=5, binades=9))
    ids = np.arange(0, 601, 2, dtype=np.int32)
    repetition = np.abs(floats(146, len(ids))) + np.float32(0.5)
    ops.penalise(logits, 1, ids, repetition=repetition, subtract=floats(147, len(ids), span=3, binades=9))
    yield ops.to_host(logits)


def _argmax_edges(ops: Ops) -> Arrays:
    logits = np.zeros((4, 67), np.float32)
    logits[0, [0, 66]] = 1  # first and last tie
    logits[1] = -1
    logits[1, 64] = np.float32(-0.0)
    logits[2] = np.float32(-0.0)
    logits[2, 5] = 0  # no greater than what stands before it
    logits[3, 66] = 2.0**-120
    yield np.asarray(ops.argmax(put(ops, logits)), np.int32)


def _token_weight_edges(ops: Ops) -> Arrays:
    logits = np.stack([np.linspace(-120, 0, 65), np.full(65, 3), np.linspace(88, -20, 65)]).astype(np.float32)
    # Steps of linspace are rounded by numpy: take multiples of 1/8, which are exact.
    logits = (np.rint(logits * 8) / 8).astype(np.float32)
    x = put(ops, logits)
    for row, temperature in ((0, 1.0), (0, 8.0), (1, 0.5), (2, 0.0009765625)):
        yield np.asarray(ops.token_weights(x, row, temperature), np.uint64)


def _log_normaliser_widths(ops: Ops) -> Arrays:
    for sample, width in enumerate((1, 2, 127, 128, 129, 1500)):
        x = put(ops, floats(160 + sample, 5, width, span=4, binades=6))
        yield np.asarray(ops.log_normaliser(x), np.float32)
    # Sums between 1 and 8 whose maximum is 0: the logarithm's own last bits, uncovered.
    x = floats(166, 16000, 4, span=2, binades=3)
    yield np.asarray(ops.log_normaliser(put(ops, x - x.max(axis=1, keepdims=True))), np.float32)


def _linear_long(format_: Format, ops: Ops) -> Arrays:
    """Nine chunks and a part: one row goes another way than several."""
    matrix = ops.load_matrix(weight(format_, 173, 18, 1193))
    x = floats(174, 3, 1193, span=1, binades=6)
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="many"))
    yield ops.to_host(ops.linear(put(ops, x[2:]), matrix, name="one"))
    # Products that are all -0 make +0: every chain begins with +0.
    for columns in (1024, 128):
        negative = ops.load_matrix(stored_float(-np.abs(floats(177, 3, columns)) - np.float32(1)))
        for rows in (1, 3):
            x = np.zeros((rows, columns), np.float32)
            yield ops.to_host(ops.linear(put(ops, x), negative, name="zeros"))


def _faults(operator: str, ops: Ops) -> Arrays:
    """Row 1 of five overflows everywhere, rows 3 and 4 in their last column, where no vector is whole.

    Compared is what is reported of them, and where a whole row must be NaN.
    """
    x = floats(170, 5, 37)
    x[1] = x[3:, -1] = np.ldexp(np.float32(1), 127)
    big = put(ops, x)
    if operator == "linear":
        for rows in (3, 20):
            eights = ops.load_matrix(stored_float(np.full((rows, 37), 8, np.float32)))
            ops.linear(big, eights, name=f"faulty/{rows}")
        q8_0 = ops.load_matrix(weight("q8_0", 171, 150, 32))
        ops.linear(put(ops, x[:, 5:]), q8_0, name="faulty/q8_0")
        # A fault in the first of many rows, and of 150 outputs in the first ones alone.
        blocks = bytearray(150 * 34)
        blocks[0:34] = np.array(1, "<f2").tobytes() + bytes([127]) * 32
        few = StoredTensor("first output", "q8_0", (150, 32), memoryview(bytes(blocks)))
        many = floats(179, 200, 32)
        many[1] = np.ldexp(np.float32(1), 127)
        ops.linear(put(ops, many), ops.load_matrix(few), name="faulty/q8_0 in the first output")
        infinite = ops.add(put(ops, x[:, 5:]), put(ops, x[:, 5:]), name="doubled")
        yield np.isnan(ops.to_host(ops.linear(infinite, q8_0, name="after it"))).astype(np.int32)
    elif operator == "rms_norm":
        ones = ops.load_vector(stored_float(np.ones(37, np.float32)))
        yield np.isnan(ops.to_host(ops.rms_norm(big, ones, 1e-6, name="faulty"))).astype(np.int32)
        # A finite sum of squares, and a last product that is not.
        multipliers = np.ones(37, np.float32)
        multipliers[-1] = np.ldexp(np.float32(1), 127)
        small = put(ops, np.where(np.arange(37) == 36, np.float32(8), floats(175, 2, 37, span=-3)))
        ops.rms_norm(small, ops.load_vector(stored_float(multipliers)), 1e-6, name="faulty product")
    elif operator == "head_norm":
        w = ops.load_vector(stored_float(np.ones(18, np.float32)))
        made = ops.head_norm(put(ops, x[:, 1:]), w, 2, 1e-6, name="faulty")
        yield np.isnan(ops.to_host(made)).astype(np.int32)
    elif operator == "attention":
        spec = AttentionSpec(heads=2, kv_heads=1, head_dim=16, scale=0.25)
        cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=16, blocks=2)
        batch = _ragged([(0, 2), (0, 3)], [[0, -1], [1, -1]])
        v = floats(172, 5, 16)
        v[2:4] = np.ldexp(np.float32(1), 127)
        ops.kv_append(cache, 0, put(ops, np.zeros((5, 16), np.float32)), put(ops, v), batch)
        ops.attention(put(ops, floats(176, 5, 32)), cache, 0, batch, spec, name="faulty")
    else:
        getattr(ops, operator)(big, big, name="faulty")
        last = floats(178, 5, 37)
        last[4, -1] = np.ldexp(np.float32(1), 127)
        getattr(ops, operator)(put(ops, last), put(ops, last), name="faulty in the very last element")


_FAULTY = ("linear", "rms_norm", "head_norm", "attention", "add", "silu_gate", "gelu_gate")

EXTENDED: Mapping[str, Case] = MappingProxyType(
    {
        **{f"linear/{f}/tails": partial(_linear_tails, f) for f in _FORMATS},
        **{f"linear/{f}/extremes": partial(_linear_extremes, f) for f in BLOCKS},
        "linear/f32/long": partial(_linear_long, "f32"),
        "linear/bf16/long": partial(_linear_long, "bf16"),
        "linear/tripwires": _linear_tripwires,
        "embed/extremes": _embed_extremes,
        "rms_norm/widths": _norm_widths,
        "head_norm/widths": _head_norm_widths,
        "rope/widths": _rope_widths,
        "rope/ties": _rope_ties,
        "attention/shapes": _attention_shapes,
        "attention/company": _attention_company,
        "attention/scores": _attention_scores,
        "add/edges": _add_edges,
        "silu_gate/edges": partial(_gate_edges, "silu_gate"),
        "gelu_gate/edges": partial(_gate_edges, "gelu_gate"),
        "softcap/edges": _softcap_edges,
        "argmax/edges": _argmax_edges,
        "token_weights/edges": _token_weight_edges,
        "log_normaliser/widths": _log_normaliser_widths,
        "penalise/many": _penalise_many,
        **ROUNDING,
        **{f"{name}/faults": partial(_faults, name) for name in _FAULTY},
    }
)
"""By name; the part before the first slash is the operator."""
