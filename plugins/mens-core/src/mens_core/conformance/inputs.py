"""Operands of the conformance cases, made from Philox words by exact steps.

The same bytes on every machine: no file of inputs is shipped, and no floating-point arithmetic
that could round takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mens_core.ops import Format, Ops, StoredTensor, Tensor
from mens_core.philox import STREAM_VECTORS, philox_words

__all__ = ["BLOCKS", "Floats", "floats", "put", "stored_float", "weight"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_SEED = 0x766F785F686F7374

BLOCKS: Mapping[Format, tuple[int, int, tuple[int, ...]]] = MappingProxyType(
    {
        "q8_0": (32, 34, (0,)),
        "q5_0": (32, 22, (0,)),
        "q4_0": (32, 18, (0,)),
        "q4_k": (256, 144, (0, 2)),
        "q5_k": (256, 176, (0, 2)),
        "q6_k": (256, 210, (208,)),
    }
)
"""Weights and bytes of a block, and where its float16 scales lie."""


def floats(sample: int, *shape: int, span: int = 0, binades: int = 0) -> Floats:
    """Return float32 numbers of full 23-bit significands in (-2^span, 2^span).

    Args:
        sample: which numbers; two cases that share it share them.
        span: exponent of the bound.
        binades: how many powers of two below the bound they are spread over.
    """
    words = philox_words(_SEED, STREAM_VECTORS, sample, int(np.prod(shape))).astype(np.int64)
    significands = ((words >> 8) - (1 << 23)).astype(np.float32)  # under 2^24: exact
    exponents = (words & 0xFF) * (binades + 1) >> 8
    return np.ldexp(significands, (span - 23 - exponents).astype(np.int32)).reshape(shape)


def stored_float(values: Floats, name: str = "operand") -> StoredTensor:
    """Return numbers as a float32 tensor of a checkpoint."""
    data = memoryview(np.ascontiguousarray(values, dtype="<f4").tobytes())
    return StoredTensor(name=name, format="f32", shape=values.shape, data=data)


def put(ops: Ops, values: Floats) -> Tensor:
    """Return rows of numbers as the lane's tensor: the contract's way in is an embedding."""
    table = ops.load_matrix(stored_float(values))
    return ops.embed(table, np.arange(len(values), dtype=np.int32), None, name="operand")


def weight(format_: Format, sample: int, rows: int, columns: int) -> StoredTensor:
    """Return a weight whose every bit but the scales' exponents is random."""
    if format_ == "f32":
        return stored_float(floats(sample, rows, columns, span=-2, binades=6), f"weight.{format_}")
    if format_ in ("f16", "bf16"):
        data = _halves(format_, _words16(sample, rows * columns)).tobytes()
    else:
        data = _blocks(format_, sample, rows * columns).tobytes()
    return StoredTensor(f"weight.{format_}", format_, (rows, columns), memoryview(data))


def _words16(sample: int, count: int) -> npt.NDArray[np.uint16]:
    return philox_words(_SEED, STREAM_VECTORS, sample, -(-count // 2)).view(np.uint16)[:count]


def _halves(format_: Format, words: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
    """Sign and fraction stay random, the exponent becomes one of eight below 1."""
    if format_ == "f16":
        exponents = np.uint16(7) + ((words >> np.uint16(10)) & np.uint16(7))
        return ((words & np.uint16(0x83FF)) | (exponents << np.uint16(10))).astype("<u2")
    exponents = np.uint16(119) + ((words >> np.uint16(7)) & np.uint16(7))
    return ((words & np.uint16(0x807F)) | (exponents << np.uint16(7))).astype("<u2")


def _blocks(format_: Format, sample: int, count: int) -> Bytes:
    size, length, scales = BLOCKS[format_]
    blocks = count // size
    words = philox_words(_SEED, STREAM_VECTORS, sample, -(-blocks * length // 4)).astype("<u4")
    raw = words.view(np.uint8)[: blocks * length].reshape(blocks, length).copy()
    for place in scales:
        # A positive float16 from 2^-10 to 2^-6, as converters write them.
        bits = raw[:, place].astype(np.uint16) | (raw[:, place + 1].astype(np.uint16) << np.uint16(8))
        bits = (bits & np.uint16(0x03FF)) | ((np.uint16(5) + (bits >> np.uint16(14))) << np.uint16(10))
        raw[:, place], raw[:, place + 1] = bits & np.uint16(0xFF), bits >> np.uint16(8)
    return raw
