"""Cases of training's operators beyond the conformance vectors, as `shapes` has them for those that serve.

Each case is a function of its shapes, the lane last: `test_grid_training` draws others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from grid_shim.shapes import LONG, WIDTHS
from mens_core.conformance.inputs import Floats, floats, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, Ints
from mens_core.training_ops import AdamW, DropoutKey, TrainingOps

__all__ = ["FORMATS", "TRAINING_SHAPES", "columns_of"]

Arrays = Iterator[npt.NDArray[Any]]
FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
_EPS = 9.999999974752427e-07


def columns_of(format_: Format, blocks: int) -> int:
    """Columns of so many blocks; of a float format, about as many as of 32."""
    return blocks * (256 if format_.endswith("_k") else 32) + (0 if format_.startswith("q") else blocks - 32)


def starts_of(lengths: Sequence[int]) -> Ints:
    return np.cumsum([0, *lengths]).astype(np.int32)


def linear_backward(sample: int, format_: Format, rows: int, outputs: int, columns: int, ops: Any) -> Arrays:
    matrix = ops.load_matrix(weight(format_, sample, outputs, columns))
    dy = ops.from_host(floats(sample + 1, rows, outputs, span=2, binades=12))
    yield ops.to_host(ops.linear_backward(dy, matrix, name="dx"))


def matrix(sample: int, rows: int, columns: int, ops: TrainingOps) -> Arrays:
    x = ops.from_host(_flushing(sample, rows, columns))
    made = ops.matrix(x, name="w")
    dy = ops.from_host(floats(sample + 1, 3, rows, span=2, binades=12))
    yield ops.to_host(ops.linear_backward(dy, made, name="dx"))
    yield ops.to_host(ops.linear(ops.from_host(floats(sample + 2, 3, columns, binades=8)), made, name="y"))


def norm_backward(sample: int, rows: int, heads: int, width: int, ops: TrainingOps) -> Arrays:
    x, dy = (ops.from_host(floats(sample + i, rows, heads * width, span=2, binades=20)) for i in range(2))
    w = ops.load_vector(stored_float(floats(sample + 2, width)))
    yield ops.to_host(ops.head_norm_backward(dy, x, w, heads, _EPS, name="dx"))


def rope_backward(sample: int, heads: int, pairs: int, ops: TrainingOps) -> Arrays:
    positions = np.array([0, 5, 127, 128, 1000], np.int32)
    table = ops.rotary_table([(1 << 128) // (5 + 11 * i) for i in range(pairs)], None)
    dy = ops.from_host(floats(sample, len(positions), heads * 2 * pairs, span=2, binades=8))
    yield ops.to_host(ops.rope_backward(dy, heads, table, positions, name="dx"))


def gate_backward(operator: str, sample: int, rows: int, width: int, ops: TrainingOps) -> Arrays:
    dy, gate, up = (ops.from_host(_flushing(sample + i, rows, width)) for i in range(3))
    for gradient in getattr(ops, operator)(dy, gate, up, name="gate"):
        yield ops.to_host(gradient)


def softcap_backward(sample: int, rows: int, width: int, cap: float, ops: TrainingOps) -> Arrays:
    dy, x = (ops.from_host(floats(sample + i, rows, width, span=5, binades=20)) for i in range(2))
    yield ops.to_host(ops.softcap_backward(dy, x, cap, name="dx"))


def attention(
    sample: int,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    ops: TrainingOps,
) -> Arrays:
    """Forward with what it saves, then all three gradients; KV blocks lie anywhere."""
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.158203125, window, softcap)
    rows, most = sum(lengths), max(1, *(-(-length // 128) for length in lengths))
    tables = np.full((len(lengths), most), -1, np.int32)
    blocks = len(lengths) * most
    for s, length in enumerate(lengths):
        for b in range(-(-length // 128)):
            tables[s, b] = (7 * (s * most + b) + 3) % blocks if blocks % 7 else s * most + b
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    none = np.array([], np.int32)
    batch = Batch(np.zeros(rows, np.int32), positions, starts_of(lengths), tables, none)
    cache = ops.new_kv_cache(layers=1, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)
    k, v = (ops.from_host(floats(sample + i, rows, kv_heads * head_dim, binades=5)) for i in range(2))
    q, dy = (ops.from_host(floats(sample + 2 + i, rows, heads * head_dim, binades=5)) for i in range(2))
    ops.kv_append(cache, 0, k, v, batch)
    saved = ops.attention_saving(q, cache, 0, batch, spec, name="out")
    yield from (ops.to_host(x) for x in (saved.out, saved.m, saved.l))
    made = ops.attention_backward(dy, q, saved, cache, 0, batch, spec, name="attention")
    yield from (ops.to_host(x) for x in made)


def cross_entropy(sample: int, rows: int, width: int, ops: TrainingOps) -> Arrays:
    logits = floats(sample, rows, width, span=4, binades=6)
    logits[:, ::7] = np.float32(-0.0)
    targets = (np.arange(rows, dtype=np.int32) * 31 + width - 1) % width
    losses, gradients = ops.cross_entropy(ops.from_host(logits), targets.astype(np.int32), name="loss")
    yield ops.to_host(losses)
    yield ops.to_host(gradients)


def example_sums(sample: int, lengths: Sequence[int], every: int, ops: TrainingOps) -> Arrays:
    """Every so many positions have a loss, so that chunks have few or none."""
    kept = [np.arange(length * every, step=every, dtype=np.int32) for length in lengths]
    positions = np.concatenate(kept)
    losses = ops.from_host(floats(sample, len(positions), span=3, binades=12))
    yield ops.to_host(ops.example_sums(losses, positions, starts_of(lengths)))


def example_products(sample: int, lengths: Sequence[int], p: int, q: int, ops: TrainingOps) -> Arrays:
    a, b = (
        ops.from_host(floats(sample + i, sum(lengths), n, span=1, binades=10)) for i, n in enumerate((p, q))
    )
    for gradient in ops.example_products(a, b, starts_of(lengths), name="dw"):
        yield ops.to_host(gradient)


def embed_backward(sample: int, lengths: Sequence[int], table: int, width: int, ops: TrainingOps) -> Arrays:
    rows = sum(lengths)
    ids = (np.arange(rows, dtype=np.int64) ** 2 % (2 * table) // 2).astype(np.int32)
    dy = ops.from_host(floats(sample, rows, width, span=1, binades=12))
    for gradient in ops.embed_backward(dy, ids, starts_of(lengths), table, name="de"):
        yield ops.to_host(gradient)


def scaled(sample: int, rows: int, width: int, factor: float, ops: TrainingOps) -> Arrays:
    x, y = (ops.from_host(_flushing(sample + i, rows, width)) for i in range(2))
    yield ops.to_host(ops.scale(x, factor, name="scaled"))
    yield ops.to_host(ops.add_scaled(y, x, factor, name="added"))


def dropout(sample: int, rows: int, width: int, rate: float, key: DropoutKey, ops: TrainingOps) -> Arrays:
    x = ops.from_host(floats(sample, rows, width, span=1, binades=6))
    positions = (np.arange(rows, dtype=np.int64) * 715_827_881 % (1 << 31)).astype(np.int32)
    examples = (np.arange(rows) * 21_845 % (1 << 16)).astype(np.int32)
    yield ops.to_host(ops.dropout(x, rate, key, positions, examples, name="dropped"))


def sum_of_squares(sample: int, rows: int, width: int, ops: TrainingOps) -> Arrays:
    x = ops.from_host(floats(sample, rows, width, span=1, binades=12))
    yield np.asarray(ops.sum_of_squares(x, name="squares"), np.float32).reshape(1)


def adamw(sample: int, rows: int, width: int, ops: TrainingOps) -> Arrays:
    constants = (3e-4, 0.9, 0.1, 0.999, 1e-3, 1e-8, 1 - 3e-6, 0.1, 1e-3)
    by = AdamW(*(float(np.float32(x)) for x in constants))
    p, g, m, v = (floats(sample + i, rows, width, span=1, binades=40) for i in range(4))
    g[0, 0] = 0
    parameter, m, v = ops.from_host(p), ops.from_host(m), ops.from_host(np.abs(v))
    for _ in range(2):
        ops.adamw(parameter, ops.from_host(g), m, v, by, name="w")
    yield from (ops.to_host(x) for x in (parameter, m, v))


def rows_moved(sample: int, ops: TrainingOps) -> Arrays:
    """To other places and one below the other, subnormals unchanged."""
    x, y = _flushing(sample, 3, 33), _flushing(sample + 1, 5, 33)
    yield ops.to_host(ops.put_rows(ops.from_host(x), np.array([1, 2, 6], np.int32), 7))
    yield ops.to_host(ops.join_rows([ops.from_host(x), ops.from_host(y), ops.from_host(x[:1])]))


def faults(ops: TrainingOps) -> Arrays:
    """Rows or examples that are not finite, by the operators' own account."""
    x = floats(94, 6, 256, span=3)
    x[[1, 4], 7] = np.ldexp(np.float32(1), 127)
    bad, w = ops.from_host(x), ops.load_vector(stored_float(floats(95, 256)))
    starts = starts_of((1, 2, 0, 3))
    by = AdamW(*[1.0] * 9)
    key = DropoutKey(1, 2, 3)
    positions = np.arange(6, dtype=np.int32)
    calls: dict[str, Callable[[], Any]] = {
        "scale": lambda: ops.scale(bad, 4.0, name="scale"),
        "add_scaled": lambda: ops.add_scaled(bad, bad, 4.0, name="add_scaled"),
        "gate": lambda: ops.gelu_gate_backward(bad, bad, bad, name="gate"),
        "cap": lambda: ops.softcap_backward(ops.scale(bad, 4.0, name="x"), bad, 1e-3, name="cap"),
        "norm": lambda: ops.rms_norm_backward(bad, bad, w, 1e-6, name="norm"),
        "products": lambda: ops.example_products(bad, bad, starts, name="products"),
        "embed": lambda: ops.embed_backward(ops.add(bad, bad, name="x"), positions, starts, 6, name="embed"),
        "linear": lambda: ops.linear_backward(
            ops.scale(bad, 4.0, name="x"), ops.matrix(ops.from_host(x[:1].T.copy()), name="w"), name="linear"
        ),
        "dropout": lambda: ops.dropout(bad, 0.75, key, positions, positions, name="dropout"),
        "squares": lambda: ops.sum_of_squares(bad, name="squares"),
        "adamw": lambda: ops.adamw(*(ops.from_host(x) for _ in range(4)), by, name="adamw"),
        "matrix": lambda: ops.matrix(ops.add(bad, bad, name="x"), name="matrix"),
        "loss": lambda: ops.cross_entropy(ops.add(bad, bad, name="x"), positions, name="loss"),
        "sums": lambda: ops.example_sums(
            ops.from_host(np.where(x[:, 7] > 16, np.float32(np.inf), x[:, 7])), positions, starts
        ),
    }
    for name, call in calls.items():
        ops.take_faults()
        call()
        rows = sorted({row for fault in ops.take_faults() if fault.name != "x" for row in fault.rows})
        assert rows or name == "linear", name
        yield np.array([len(name), *rows], np.int32)


def _flushing(sample: int, rows: int, width: int) -> Floats:
    """Numbers of all sizes, some of them subnormal, some both zeros."""
    x = floats(sample, rows, width, span=3, binades=30)
    x[:, ::5] = np.ldexp(x[:, ::5], -127)
    x[:, 3::11] = np.float32(-0.0)
    return x


RAGGED = ((1,), (3, 0, 130), (128, 129, 1), (257,))


def _cases() -> dict[str, Callable[[Any], Arrays]]:
    cases: dict[str, Callable[[Any], Arrays]] = {}
    samples = count(9000, 20)
    for format_ in FORMATS:
        for rows, outputs, blocks in ((1, 1, 1), (17, 129, 3), (3, 128, 1), (16, 257, 2)):
            case = partial(
                linear_backward, next(samples), format_, rows, outputs, columns_of(format_, blocks)
            )
            cases[f"linear_backward/{format_}/{rows}x{outputs}x{blocks}"] = case
    for rows, columns in ((1, 1), (16, 130), (130, 7)):
        cases[f"matrix/{rows}x{columns}"] = partial(matrix, next(samples), rows, columns)
    for width in (*WIDTHS, LONG):
        cases[f"norm_backward/{width}"] = partial(norm_backward, next(samples), 2, 1, width)
    cases["norm_backward/heads"] = partial(norm_backward, next(samples), 3, 5, 136)
    for heads, pairs in ((1, 1), (3, 20), (1, 128)):
        cases[f"rope_backward/{heads}x{2 * pairs}"] = partial(rope_backward, next(samples), heads, pairs)
    for operator in ("silu_gate_backward", "gelu_gate_backward"):
        for rows, width in ((1, 1), (3, 127), (2, 1029)):
            case = partial(gate_backward, operator, next(samples), rows, width)
            cases[f"{operator}/{rows}x{width}"] = case
    for cap in (1.0, 50.0):
        cases[f"softcap_backward/{cap:g}"] = partial(softcap_backward, next(samples), 2, 700, cap)
    for lengths, heads, kv_heads, head_dim, window, softcap in (
        ((1,), 1, 1, 8, None, None),
        ((131, 0, 9), 4, 2, 64, None, None),
        ((130, 1, 7), 2, 1, 136, 64, None),
        ((257,), 2, 2, 24, 128, 30.0),
        ((40, 129), 3, 1, 256, 1, None),
        ((300, 8), 2, 1, 8, 200, 50.0),
    ):
        name = f"attention_backward/{heads}/{kv_heads}x{head_dim}/{window}/{softcap}"
        cases[name] = partial(attention, next(samples), lengths, heads, kv_heads, head_dim, window, softcap)
    for rows, width in ((1, 1), (2, 127), (3, 128), (2, 130), (2, LONG)):
        cases[f"cross_entropy/{rows}x{width}"] = partial(cross_entropy, next(samples), rows, width)
    for lengths in RAGGED:
        shape = "+".join(map(str, lengths))
        cases[f"example_sums/{shape}"] = partial(example_sums, next(samples), lengths, 3)
        cases[f"embed_backward/{shape}"] = partial(embed_backward, next(samples), lengths, 5, 33)
        for p, q in ((1, 1), (17, 129), (130, 16)):
            cases[f"example_products/{shape}/{p}x{q}"] = partial(
                example_products, next(samples), lengths, p, q
            )
    cases["example_sums/sparse"] = partial(example_sums, next(samples), (5, 9), 200)
    for rows, width, factor in ((1, 1, 2.0), (3, 127, 0.1), (2, 1029, 2.0**-120)):
        cases[f"scaled/{rows}x{width}"] = partial(
            scaled, next(samples), rows, width, float(np.float32(factor))
        )
    for rows, width, rate in ((1, 1, 0.5), (3, 5, 0.1), (4, 203, 0.999), (2, 128, 0.0)):
        key = DropoutKey(next(samples) << 33 | 5, (1 << 32) - rows, width)
        cases[f"dropout/{rows}x{width}"] = partial(dropout, next(samples), rows, width, rate, key)
    for rows, width in ((1, 1), (3, 43), (2, 64), (5, 26), (129, 130)):
        cases[f"sum_of_squares/{rows}x{width}"] = partial(sum_of_squares, next(samples), rows, width)
    for rows, width in ((1, 1), (3, 127), (70, 5)):
        cases[f"adamw/{rows}x{width}"] = partial(adamw, next(samples), rows, width)
    cases["rows moved"] = partial(rows_moved, next(samples))
    cases["training faults"] = faults
    return cases


TRAINING_SHAPES = _cases()
