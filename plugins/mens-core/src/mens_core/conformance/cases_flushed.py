"""Operands and results below 2^-126, so placed that a kernel which keeps them makes other bytes.

A flushed number must be seen behind its flush: as the output itself, or where a later step makes it large
again. Nothing here lies in the interval just below 2^-126 that docs/numerics.md excludes: all numbers
have few significant bits or are scaled by powers of two, so what is exact below 2^-126 stays exact, and a
result in that interval takes 25 bits.

In serving an operator's tensors hold no subnormal, since `embed` and every other operator flush. So the
operands here that are subnormal are weights as they lie in a file and the numbers that come with a call;
tensors that hold some come in with training (`cases_training_flushed`). No operand and no result of
`take_rows` and `kv_append` is computed with, and no result of `argmax` and `log_normaliser` can be
subnormal where no logit is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases import Case
from mens_core.conformance.inputs import BLOCKS, Floats, put, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, Ops, StoredTensor

__all__ = ["FLUSHED", "SMALLEST", "codes", "large", "small", "stored"]

Arrays = Iterator[npt.NDArray[Any]]

F32 = np.float32
SMALLEST = 2.0**-126
_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", *BLOCKS)


def small(exponent: int, *shape: int) -> Floats:
    """Return numbers of magnitude 1, 1 + 1/8, ... 1 + 6/8 times 2^exponent, of both signs.

    No row of fewer than 42 is the next one's.
    """
    at = np.arange(int(np.prod(shape)))
    values = (1 + (at % 7) / 8) * np.where(at // 3 % 2, -1, 1)
    return np.ldexp(values, exponent).astype(F32).reshape(shape)


def stored(format_: Format, values: Floats) -> StoredTensor:
    """Return numbers, which the format holds exactly, as a tensor of it."""
    if format_ == "f32":
        return stored_float(values)
    if format_ == "f16":
        data = values.astype("<f2").tobytes()
    else:
        data = (np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()
    return StoredTensor(f"operand.{format_}", format_, values.shape, memoryview(data))


def large(format_: Format, sample: int, rows: int, columns: int) -> StoredTensor:
    """Return a quantised weight with random codes, all scales being 2^14."""
    _, length, scales = BLOCKS[format_]
    data = np.frombuffer(weight(format_, sample, rows, columns).data, np.uint8).reshape(-1, length).copy()
    for place in scales:
        data[:, place : place + 2] = np.frombuffer(np.array(2.0**14, "<f2").tobytes(), np.uint8)
    return StoredTensor(f"weight.{format_}", format_, (rows, columns), memoryview(data.tobytes()))


def _columns(format_: Format) -> int:
    """More than a chunk, or a chunk and a part of one."""
    return 512 if format_.endswith("_k") else 160 if format_.startswith("q") else 136


def _embed(format_: Format, ops: Ops) -> Arrays:
    columns = _columns(format_)
    rows = np.array([0, 2, 1], np.int32)
    table = ops.load_matrix(weight(format_, 301, 3, columns))
    yield ops.to_host(ops.embed(table, rows, 2.0**-121, name="results"))
    # A scale that is subnormal, of numbers that would make it great again.
    if format_.startswith("q"):
        great = large(format_, 302, 3, columns)
    else:
        great = stored(format_, small(15, 3, columns))
    yield ops.to_host(ops.embed(ops.load_matrix(great), rows, 2.0**-127, name="scale"))
    if format_ in ("f32", "bf16"):
        table = ops.load_matrix(stored(format_, small(-130, 3, columns)))
        yield ops.to_host(ops.embed(table, rows, 2.0**100, name="operands"))


_SIZES = ((1, 5), (3, 5), (17, 130))
"""Rows and outputs of a product: one row, several, and enough of both for a tile."""
_FLOAT_SIZES = (*((*size, 136) for size in _SIZES), (3, 5, 131), (17, 132, 131), (17, 132, 136))
"""With inputs: in whole vectors and not, for lanes that lay out such weights anew."""


def _linear(format_: Format, ops: Ops) -> Arrays:
    """Sums of products that are all flushed, and would be a normal number together; a fold that is."""
    for rows, outputs, columns in _FLOAT_SIZES:
        x, w = np.abs(small(-118, rows, columns)), small(-12, outputs, columns)
        w[0] = np.abs(w[0])
        matrix = ops.load_matrix(stored(format_, w))
        yield ops.to_host(ops.linear(put(ops, x), matrix, name="products"))
        # (1 + 1/2) 2^-126, less 2^-126 in another chunk.
        x[:], w[:, [0, 130]] = 0, 2.0**-12
        x[:, 0], x[:, 130] = 1.5 * 2.0**-114, -(2.0**-114)
        matrix = ops.load_matrix(stored(format_, w))
        yield ops.to_host(ops.linear(put(ops, x), matrix, name="fold"))
        if format_ != "f16":
            matrix = ops.load_matrix(stored(format_, small(-130, outputs, columns)))
            yield ops.to_host(ops.linear(put(ops, small(100, rows, columns)), matrix, name="weights"))


def codes(rows: int, columns: int, exponent: int) -> Floats:
    """Activations whose int8 scale is 2^exponent, exactly, and whose codes are integers."""
    x = np.arange(rows * columns).reshape(rows, columns) * 37 % 255 - 127
    x[:, ::32] = 127
    return np.ldexp(x, exponent).astype(F32)


def _quantised(format_: Format, ops: Ops) -> Arrays:
    """Products of two scales that are flushed, and would be normal numbers times a block's integer."""
    columns = _columns(format_)
    for rows, outputs in _SIZES:
        matrix = ops.load_matrix(weight(format_, 303, outputs, columns))
        yield ops.to_host(ops.linear(put(ops, codes(rows, columns, -120)), matrix, name="results"))
        # An activation's scale that is flushed, against weights that would make it great again.
        matrix = ops.load_matrix(large(format_, 304, outputs, columns))
        yield ops.to_host(ops.linear(put(ops, codes(rows, columns, -130)), matrix, name="activations"))


def _linear_many(ops: Ops) -> Arrays:
    weights = (weight("q8_0", 305, 9, 256), weight("q4_k", 306, 10, 256), stored_float(small(-12, 11, 256)))
    x = put(ops, codes(2, 256, -121))
    names = [stored.format for stored in weights]
    for y in ops.linear_many(x, [ops.load_matrix(stored) for stored in weights], names=names):
        yield ops.to_host(y)


def _norm_rows(width: int) -> Floats:
    """Squares that are flushed; a mean that is; products with the inverse root that are."""
    x = np.zeros((3, width), F32)
    x[0] = small(-64, width)
    x[1, 0], x[1, 1] = 2.0**-63, 2.0**-70
    x[2] = small(-80, width)
    x[2, 0] = 2.0**60
    return x


def _norm(operator: str, ops: Ops) -> Arrays:
    heads = 3 if operator == "head_norm" else 1
    for width in (16, 144):

        def made(x: Floats, w: Floats, eps: float, name: str) -> npt.NDArray[Any]:
            tensor, vector = put(ops, np.tile(x, heads)), ops.load_vector(stored_float(w))
            if operator == "head_norm":
                return ops.to_host(ops.head_norm(tensor, vector, heads, eps, name=name))
            return ops.to_host(ops.rms_norm(tensor, vector, eps, name=name))

        yield made(_norm_rows(width), small(60, width), SMALLEST, "sums")
        yield made(small(0, 2, width), np.full(width, SMALLEST, F32), 2.0**-20, "results")
        # A mean that is small, and an eps that is smaller.
        x = np.zeros((1, width), F32)
        x[0, :2] = 2.0**-59
        yield made(x, np.ones(width, F32), SMALLEST / 2, "eps")


def _rope(ops: Ops) -> Arrays:
    positions = np.array([0, 1, 2, 129, 1000], np.int32)
    x = np.copysign(F32(SMALLEST), small(0, len(positions), 2 * 24))
    x[1, ::3] = 0
    table = ops.rotary_table([(1 << 128) // (7 + 13 * i) for i in range(12)], None)
    yield ops.to_host(ops.rope(put(ops, x), 2, table, positions, name="results"))


def _attend(
    ops: Ops, q: Floats, k: Floats, v: Floats, *, scale: float, softcap: float | None = None
) -> npt.NDArray[Any]:
    """What the last rows q of a sequence see of it: q [N, 2 * 8], k and v [rows, 2 * 8]."""
    rows = len(k)
    spec = AttentionSpec(heads=2, kv_heads=2, head_dim=8, scale=scale, softcap=softcap)
    cache = ops.new_kv_cache(layers=1, kv_heads=2, head_dim=8, blocks=2)
    ops.kv_append(cache, 0, put(ops, k), put(ops, v), _batch(0, rows))
    last = _batch(rows - len(q), rows)
    return ops.to_host(ops.attention(put(ops, q), cache, 0, last, spec, name="attention"))


def _batch(first: int, rows: int) -> Batch:
    return Batch(
        token_ids=np.zeros(rows - first, np.int32),
        positions=np.arange(first, rows, dtype=np.int32),
        starts=np.array([0, rows - first], np.int32),
        block_tables=np.array([[1, 0]], np.int32),
        logit_rows=np.array([], np.int32),
    )


def _attention(ops: Ops) -> Arrays:
    # Products that are flushed, and would be scores; in one block and over the end of one.
    for rows, last in ((5, 5), (129, 2), (129, 1)):
        q, k = np.abs(small(-66, last, 16)), np.abs(small(-66, rows, 16))
        yield _attend(ops, q, k, small(0, rows, 16), scale=2.0**127)
    # Weighted values and quotients that are flushed.
    q, k = small(-1, 5, 16), small(-2, 5, 16)
    yield _attend(ops, q, k, np.copysign(F32(SMALLEST), small(0, 5, 16)), scale=1.0)
    # A scale that is subnormal.
    q, k = np.abs(small(60, 5, 16)), np.abs(small(60, 5, 16))
    yield _attend(ops, q, k, small(0, 5, 16), scale=2.0**-128)


def _attention_softcap(ops: Ops) -> Arrays:
    """Scores over the cap that are flushed, and would be the scores again."""
    q, k = np.abs(small(-2, 5, 16)), np.abs(small(-2, 5, 16))
    yield _attend(ops, q, k, small(0, 5, 16), scale=0.5, softcap=2.0**127)


def _add(ops: Ops) -> Arrays:
    a, b = np.abs(small(-126, 2, 37)), np.full((2, 37), -SMALLEST, F32)
    b[1], a[1] = -b[1], -a[1]
    yield ops.to_host(ops.add(put(ops, a), put(ops, b), name="results"))


def _gate(operator: str, ops: Ops) -> Arrays:
    gates = (
        (small(0, 37), np.full(37, SMALLEST, F32)),  # the product with up
        (small(-126, 37), small(60, 37)),  # the activation, half of a gate that is small
        (small(-70, 37), small(-70, 37)),
    )
    gate, up = (np.stack(rows) for rows in zip(*gates, strict=True))
    yield ops.to_host(getattr(ops, operator)(put(ops, gate), put(ops, up), name="results"))


def _softcap(ops: Ops) -> Arrays:
    """Quotients that are flushed, and would be the numbers themselves again; then what is made of them."""
    for exponent, cap in ((-100, 2.0**40), (-126, SMALLEST)):
        yield ops.to_host(ops.softcap(put(ops, small(exponent, 2, 37)), cap, name="results"))


def _penalise(ops: Ops) -> Arrays:
    ids = np.arange(0, 37, 2, dtype=np.int32)
    ones, nothing = np.ones(len(ids), F32), np.zeros(len(ids), F32)
    for logits, repetition, subtract in (
        (small(-100, 2, 37), small(40, len(ids)), nothing),  # quotients
        (-np.abs(small(-100, 2, 37)), np.abs(small(-40, len(ids))), nothing),  # products
        (np.abs(small(-126, 2, 37)), ones, np.full(len(ids), SMALLEST, F32)),  # differences
        (np.abs(small(-126, 2, 37)), ones, np.abs(small(-128, len(ids)))),  # what is subtracted
    ):
        x = put(ops, logits)
        ops.penalise(x, 1, ids, repetition=np.abs(repetition), subtract=subtract)
        yield ops.to_host(x)


def _token_weights(ops: Ops) -> Arrays:
    """Differences that are flushed, over a temperature that would make them great again."""
    logits = np.abs(small(-126, 1, 37))
    yield np.asarray(ops.token_weights(put(ops, logits), 0, SMALLEST), np.uint64)


FLUSHED: Mapping[str, Case] = MappingProxyType(
    {
        **{f"embed/{f}/flushed": partial(_embed, f) for f in _FORMATS},
        **{f"linear/{f}/flushed": partial(_linear, f) for f in _FORMATS if f not in BLOCKS},
        **{f"linear/{f}/flushed": partial(_quantised, f) for f in BLOCKS},
        "linear_many/flushed": _linear_many,
        "rms_norm/flushed": partial(_norm, "rms_norm"),
        "head_norm/flushed": partial(_norm, "head_norm"),
        "rope/flushed": _rope,
        "attention/flushed": _attention,
        "attention/softcap/flushed": _attention_softcap,
        "add/flushed": _add,
        "silu_gate/flushed": partial(_gate, "silu_gate"),
        "gelu_gate/flushed": partial(_gate, "gelu_gate"),
        "softcap/flushed": _softcap,
        "penalise/flushed": _penalise,
        "token_weights/flushed": _token_weights,
    }
)
"""By name; the part before the first slash is the operator."""
