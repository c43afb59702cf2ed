"""Operands that an fma made of float64 rounds twice: a product and a sum, then float32.

A float64 sum that is exactly half way between two float32 goes to the even one. Here the exact
result lies a little to one side of the middle, further than float64 sees, and the even neighbour
is on the other side. `T` * `T` is such a middle, and so is 5/4 of any significand whose last
two bits are 10; 2^-60 beside it is what float64 loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats, floats, put, stored_float
from mens_core.ops import AttentionSpec, Batch, Format, Ops, StoredTensor

__all__ = [
    "ODD",
    "QUARTERS",
    "ROUNDING",
    "T",
    "U",
    "encode",
    "head_norm",
    "linear",
    "pairs",
    "rms_norm",
    "rope",
    "squares",
]

Arrays = Iterator[npt.NDArray[Any]]

T = np.float32(1 + 2.0**-12)
"""Its square is 1 + 2^-11 + 2^-24: the middle above an even neighbour."""
U = np.float32(1 + 3 * 2.0**-12)
"""T * U is 1 + 2^-10 + 3 * 2^-24: the middle below an even neighbour."""
ODD = np.array([1 + m * 2.0**-12 for m in range(1, 400, 2)], np.float32)
"""All of them squared are middles above an even neighbour."""
EPS = 9.999999974752427e-07


def pairs(width: int) -> tuple[Floats, Floats]:
    """Factors whose chain meets a middle at each place of a row, from either side: [rows, width]."""
    count = width - 1
    a, b = np.zeros((2 * count, width), np.float32), np.zeros((2 * count, width), np.float32)
    for k in range(1, width):
        low, high = 2 * k - 2, 2 * k - 1
        a[low, k - 1], b[low, k - 1], a[low, k], b[low, k] = 2.0**-30, 2.0**-30, T, T
        a[high, k - 1], b[high, k - 1], a[high, k], b[high, k] = 2.0**-30, -(2.0**-30), T, U
    return a, b


def linear(ops: Ops) -> Arrays:
    # A vector's body, its tail, and the last place before and after the end of a chunk.
    for width in (9, 128, 131):
        a, b = pairs(width)
        if width > 9:
            a, b = a[-16:], b[-16:]
        for rows in (len(a), 1):
            matrix = ops.load_matrix(stored_float(b))
            yield ops.to_host(ops.linear(put(ops, a[:rows]), matrix, name="rounding"))


def squares(width: int) -> Floats:
    """Rows whose sum of squares meets a middle, at different places; some last bits outlive the root."""
    rows = max(12, width - 1)
    x = np.zeros((rows, width), np.float32)
    for row in range(rows):
        k = 1 + row % (width - 1)
        x[row, k - 1], x[row, k] = 2.0**-30, ODD[row]
    return x


def rms_norm(ops: Ops) -> Arrays:
    for width in (2, 8, 24):
        x = squares(width)
        w = ops.load_vector(stored_float(np.ones(width, np.float32)))
        yield ops.to_host(ops.rms_norm(put(ops, x), w, EPS, name="rounding"))


def head_norm(ops: Ops) -> Arrays:
    for width in (2, 16):
        x = squares(width)
        w = ops.load_vector(stored_float(np.ones(width, np.float32)))
        two = np.concatenate([x, x[::-1]], axis=1)
        yield ops.to_host(ops.head_norm(put(ops, two), w, 2, EPS, name="rounding"))


QUARTERS = np.array([5 / 4, 7 / 4, 9 / 8, 11 / 8, 13 / 8, 15 / 8], np.float32)
"""Times a significand that ends in one zero bit (the first two) or two, each is a middle."""


def rope(ops: Ops) -> Arrays:
    positions = np.arange(1, 13, dtype=np.int32)
    frequencies = [(1 << 128) // (7 + 13 * i) for i in range(12)]
    table = ops.rotary_table(frequencies, None)
    big = np.tile(QUARTERS, (12, 2))
    tiny = np.full((12, 12), 2.0**-60, np.float32)
    tiny[:, ::2] *= -1
    for halves in ((big, tiny), (tiny, big)):
        x = np.concatenate(halves, axis=1)
        yield ops.to_host(ops.rope(put(ops, x), 1, table, positions, name="rounding"))


def attention(ops: Ops) -> Arrays:
    """In the scores, in the weighted sum of values, and where two blocks are joined."""
    # Scores: 8 channels whose chain meets a middle; the second key's score is 0.
    a, b = pairs(8)
    for row in range(len(a)):
        k = np.stack([np.zeros(8, np.float32), b[row]])
        v = floats(181 + row, 2, 8)
        yield _attend(ops, np.stack([a[row], a[row]]), k, v, heads=1)
    # Values: 16 heads weigh the last position differently; what is before it is tiny.
    v = np.tile(QUARTERS, 4)[:8] * np.ones((2, 1), np.float32)
    v[0] = 2.0**-60 * np.where(np.arange(8) % 2, 1, -1)
    k = np.zeros((2, 8), np.float32)
    k[1, 0] = -1
    q = np.zeros((2, 16, 8), np.float32)
    q[:, :, 0] = np.abs(floats(180, 16, span=1)) + np.float32(0.125)
    yield _attend(ops, q.reshape(2, -1), k, v, heads=16)
    # Blocks: the first sums to a quarter's multiple, the second is tiny and has the greater score.
    k, v = np.zeros((129, 8), np.float32), np.zeros((129, 8), np.float32)
    v[0] = np.tile(QUARTERS, 2)[:8]
    k[128, 0], v[128] = 1, 2.0**-60 * np.where(np.arange(8) % 2, 1, -1)
    yield _attend(ops, np.tile(q.reshape(2, -1)[:1], (129, 1)), k, v, heads=16)


def _attend(ops: Ops, q: Floats, k: Floats, v: Floats, heads: int) -> npt.NDArray[np.float32]:
    """Return what the last position sees."""
    count = len(k)
    spec = AttentionSpec(heads=heads, kv_heads=1, head_dim=8, scale=1.0)
    cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=8, blocks=2)
    ops.kv_append(cache, 0, put(ops, k), put(ops, v), _batch(0, count))
    last = _batch(count - 1, 1)
    return ops.to_host(ops.attention(put(ops, q[-1:]), cache, 0, last, spec, name="rounding"))


def _batch(start: int, count: int) -> Batch:
    return Batch(
        token_ids=np.zeros(count, np.int32),
        positions=np.arange(start, start + count, dtype=np.int32),
        starts=np.array([0, count], np.int32),
        block_tables=np.array([[1, 0]], np.int32),
        logit_rows=np.array([], np.int32),
    )


_SCALE = 127 * T
"""The greatest activation of a block whose int8 scale is `T`, exactly."""


def quantised(format_: Format, ops: Ops) -> Arrays:
    """Products of a block's scale and its integer sum, 4097 times a power of two, that are middles."""
    yield from (_super_block if format_ in ("q4_k", "q5_k") else _blocks)(format_, ops)


def _blocks(format_: Format, ops: Ops) -> Arrays:
    # 4097 = 127 * (7 + 7 + 7 + 7 + 4) + 11 * 3. The first block is tiny, with scale 2^-70.
    codes = np.zeros((2, 32), np.int64)
    codes[0, 0], codes[1, :6] = 1, (7, 7, 7, 7, 4, 3)
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = 127 * 2.0**-70
    x[0, 32:37], x[0, 37] = _SCALE, 11 * T
    raw = b"".join(encode(format_, block) for block in codes)
    matrix = ops.load_matrix(StoredTensor("rounding", format_, (1, 64), memoryview(raw)))
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="rounding"))


def encode(format_: Format, codes: npt.NDArray[np.int64]) -> bytes:
    scale = bytes(np.array(1, "<f2").data)
    if format_ == "q8_0":
        return scale + bytes(codes.astype(np.int8).data)
    unsigned = codes + (8 if format_ == "q4_0" else 16)
    nibbles = bytes(((unsigned[:16] & 15) | ((unsigned[16:] & 15) << 4)).astype(np.uint8).data)
    if format_ == "q4_0":
        return scale + nibbles
    high = sum(int(code >> 4) << i for i, code in enumerate(unsigned))
    return scale + high.to_bytes(4, "little") + nibbles


def _super_block(format_: Format, ops: Ops) -> Arrays:
    """V is 4097 * 2^8 and its scale 2^15 * T; U is -1, and its scale 2^-24 * T."""
    x = np.zeros((1, 256), np.float32)
    x[0, :192] = _SCALE  # sums of 127 * 32, six times: 43 * 6 * 4064 of V
    x[0, 192:224] = 2 * T  # a sum of 64: the other 5 * 64
    x[0, 224] = -T
    minima = (43, 43, 43, 43, 43, 43, 5, 0)
    scales = (0, 0, 0, 0, 0, 0, 0, 1)
    packed = bytearray(12)
    for j, (scale, minimum) in enumerate(zip(scales, minima, strict=True)):
        if j < 4:
            packed[j], packed[j + 4] = packed[j] | scale, packed[j + 4] | minimum
        else:
            packed[j + 4] = (scale & 15) | (minimum & 15) << 4
            packed[j - 4] |= (scale >> 4) << 6
            packed[j] |= (minimum >> 4) << 6
    nibbles = bytearray(128)
    nibbles[96] = 0x10  # column 224 has code 1, all others 0
    raw = np.array([2.0**-24, 2.0**15], "<f2").tobytes() + bytes(packed)
    raw += (bytes(32) if format_ == "q5_k" else b"") + bytes(nibbles)
    matrix = ops.load_matrix(StoredTensor("rounding", format_, (1, 256), memoryview(raw)))
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="rounding"))


ROUNDING: Mapping[str, Any] = MappingProxyType(
    {
        **{f"linear/{f}/rounding": partial(quantised, f) for f in ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k")},
        "attention/rounding": attention,
    }
)
"""Those that no quick case runs, by name; the part before the first slash is the operator.

Q6_K has no sum after a product."""
