"""A bf16 matrix in twelve bits a weight holds the very bits of its file.

Every operator that reads it gives the bytes of the scalar reference, which knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes.cpu_calls import Native, address, as_format, assert_same
from mens_core.ops import StoredTensor
from mens_cpu_ref.float_weights import load_float_matrix
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import Library
from mens_cpu_ref.update_library import UPDATE_OPERATORS
from vox_plugin_api.backend import BackendError

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
seeds, threads = st.integers(0, 2**32 - 1), st.integers(1, 4)
COMPACT = 3
LINE, CHUNK, BLOCK, KEPT = 64, 8, 192, 32
"""Bytes of a cache line, of a chunk's entry, of a block of 8 columns, of a kept column (compact_layout.h)."""


@dataclass(frozen=True)
class Packed:
    """What the native functions made of a matrix, whether it pays or not."""

    rows: int
    columns: int
    tables: np.ndarray
    kept: np.ndarray
    memory: np.ndarray
    address: int


def pack(side: Native, weight: np.ndarray) -> tuple[Packed | None, int]:
    rows, columns = weight.shape
    panels = -(-rows // 16)
    tables, kept = np.full((panels, 16), 255, np.uint8), np.full(panels, -1, np.int64)
    with side.functions() as f:
        code = f["compact_measure"](address(weight), rows, columns, address(tables), address(kept))
        if code:
            return None, code
        size = f["compact_bytes"](rows, columns, int(kept.sum()))
        memory = np.full(size + 2 * LINE, 0xA5, np.uint8)  # neither zero before nor after
        at = -(-address(memory) // LINE) * LINE
        firsts = np.cumsum(kept) - kept
        code = f["compact_pack"](address(weight), rows, columns, address(tables), address(firsts), at)
    assert (memory[at - address(memory) + size :] == 0xA5).all(), "written beyond its end"
    return Packed(rows, columns, tables, kept, memory, at), code


def linear(side: Native, weight: Packed, x: np.ndarray) -> tuple[np.ndarray, int]:
    out = np.empty((len(x), weight.rows), np.float32)
    with side.functions() as f:
        code = f["linear"](
            COMPACT, weight.address, weight.rows, weight.columns, address(x), len(x), address(out)
        )
    return out, code


def embed(side: Native, table: Packed, ids: np.ndarray, scale: float) -> tuple[np.ndarray, int]:
    out = np.empty((len(ids), table.columns), np.float32)
    with side.functions() as f:
        code = f["embed"](
            COMPACT, table.address, table.rows, table.columns, address(ids), len(ids), scale, address(out)
        )
    return out, code


def drawn(rng: np.random.Generator, rows: int, columns: int, kind: str) -> np.ndarray:
    """bf16 bits [rows, columns]; the kinds need no kept column, a few, or many."""
    values = rng.normal(0, max(1, columns) ** -0.5, (rows, columns)).astype(np.float32)
    if kind == "spread":
        values = np.ldexp(values, rng.integers(-30, 8, (rows, columns))).astype(np.float32)
    bits = as_format(values, "bf16")
    if kind == "trained":  # zeros of both signs, subnormals, outliers
        lot = rng.integers(0, 40, (rows, columns))
        for number, value in enumerate((0x0000, 0x8000, 0x0001, 0x807F, 0x42C8, 0xC2C8, 0x7F7F, 0xFF7F)):
            bits = np.where((lot == number) & (rng.integers(0, 4, bits.shape) == 0), value, bits)
    if kind == "narrow":
        bits = (bits & 0x807F) | 0x3C80
    return np.ascontiguousarray(bits, np.uint16)


@pytest.mark.parametrize("order", ["ascending", "mixed", "by columns"])
def test_every_finite_bf16_comes_back(reference, kernels, order):
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    assert bits.size == 65_280
    if order == "mixed":
        bits = np.random.default_rng(4).permutation(bits)
    table = bits.reshape(-1, 255) if order != "by columns" else np.ascontiguousarray(bits.reshape(-1, 256).T)
    side, ids = kernels(2), np.arange(len(table), dtype=np.int32)
    packed, code = pack(side, table)
    assert code == 0
    # 2^-1: no great value overflows, and the reference flushes the same ones.
    assert_same(embed(side, packed, ids, 0.5), reference.embed(table, "bf16", ids, 0.5))
    for column in (0, 7, 8, 127, 128, 200, table.shape[1] - 1):
        x = np.zeros((1, table.shape[1]), np.float32)
        x[0, column] = 0.5
        assert_same(linear(side, packed, x), reference.linear(x, table, "bf16"))


@pytest.mark.parametrize("kind", ["normal", "trained", "spread", "narrow"])
@few
@given(
    seed=seeds,
    threads=threads,
    rows=st.one_of(st.integers(1, 14), st.sampled_from([24, 25, 97])),
    outputs=st.one_of(st.integers(1, 70), st.just(200)),
    inputs=st.one_of(st.integers(1, 140), st.sampled_from([256, 511, 512, 640, 1100])),
)
def test_products_and_rows_have_the_references_bytes(
    reference, kernels, kind, seed, threads, rows, outputs, inputs
):
    rng = np.random.default_rng(seed)
    weight, side = drawn(rng, outputs, inputs, kind), kernels(threads)
    packed, code = pack(side, weight)
    assert code == 0
    x = np.ldexp(rng.standard_normal((rows, inputs)), rng.integers(-12, 3, (rows, inputs))).astype(np.float32)
    assert_same(linear(side, packed, x), reference.linear(x, weight, "bf16"))
    assert_same(linear(side, packed, x[-1:].copy()), reference.linear(x[-1:].copy(), weight, "bf16"))
    ids = rng.integers(0, outputs, rows).astype(np.int32)
    assert_same(embed(side, packed, ids, 25.25), reference.embed(weight, "bf16", ids, 25.25))


@pytest.mark.parametrize("kind", ["normal", "trained", "spread"])
@few
@given(
    seed=seeds,
    rows=st.integers(1, 30),
    outputs=st.one_of(st.integers(1, 70), st.just(150)),
    inputs=st.one_of(st.integers(1, 90), st.sampled_from([136, 256])),
)
def test_gradients_of_inputs_have_the_references_bytes(reference, kernels, kind, seed, rows, outputs, inputs):
    rng = np.random.default_rng(seed)
    weight, side = drawn(rng, outputs, inputs, kind), kernels(2)
    packed, _ = pack(side, weight)
    plain, _ = reference.pack(weight, "bf16")
    dy = rng.standard_normal((rows, outputs)).astype(np.float32)
    found, expected = np.empty((2, rows, inputs), np.float32)
    sizes = (outputs, inputs, address(dy), rows)
    with side.functions():
        backward = side.library.bind("vox_", UPDATE_OPERATORS)["linear_backward"]
        code = backward(COMPACT, packed.address, *sizes, address(found))
    backward = reference.library.bind("ref_", UPDATE_OPERATORS)["linear_backward"]
    assert_same((found, code), (expected, backward(2, address(plain), *sizes, address(expected))))


@few
@given(
    seed=seeds,
    rows=st.integers(1, 50),
    columns=st.integers(1, 300),
    kind=st.sampled_from(["normal", "trained", "spread", "narrow"]),
)
def test_a_table_has_the_commonest_upper_bytes_and_others_are_kept(kernels, seed, rows, columns, kind):
    weight = drawn(np.random.default_rng(seed), rows, columns, kind)
    packed, _ = pack(kernels(2), weight)
    for panel in range(len(packed.tables)):
        upper = (weight[16 * panel : 16 * panel + 16] >> 8).astype(int)
        counts = np.bincount(upper.ravel(), minlength=256)
        table = sorted(sorted(range(256), key=lambda byte: (-counts[byte], byte))[:16])
        assert packed.tables[panel].tolist() == table
        assert packed.kept[panel] == np.count_nonzero(~np.isin(upper, table).all(axis=0))
    header = -(-(16 + CHUNK * (-(-columns // 128) + 1)) // LINE) * LINE
    size = len(packed.tables) * (header + BLOCK * -(-columns // 8)) + KEPT * int(packed.kept.sum())
    assert packed.memory.size == size + 2 * LINE


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7F81, 0xFFFF])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (17, 8), (20, 8), (5, 3)])
def test_a_weight_that_is_not_finite_is_named_by_its_row(kernels, value, row, column):
    weight = drawn(np.random.default_rng(1), 21, 9, "trained")
    weight[row, column] = value
    weight[20, 0] = 0x7F80  # the first counts
    assert pack(kernels(2), weight) == (None, 1 + row)


def stored(bits: np.ndarray) -> StoredTensor:
    return StoredTensor("w", "bf16", bits.shape, memoryview(bits.tobytes()))


def test_the_lane_packs_closer_what_pays(library: Library):
    rng, functions = np.random.default_rng(3), library.kernels
    lane = CpuOps(functions)
    normal = lane.load_matrix(stored(drawn(rng, 160, 512, "normal")))
    assert normal.number == COMPACT
    assert normal.nbytes < 0.765 * 2 * 160 * 512
    spread = lane.load_matrix(stored(drawn(rng, 160, 512, "spread")))
    assert (spread.number, spread.nbytes) == (2, 2 * 160 * 512)
    small = lane.load_matrix(stored(drawn(rng, 16, 8, "narrow")))
    assert (small.number, small.nbytes) == (2, 2 * 16 * 8)
    assert CpuOps(library.reference).load_matrix(stored(drawn(rng, 160, 512, "normal"))).number == 2


@pytest.mark.parametrize("kind", ["normal", "spread"])
def test_a_matrix_that_is_not_finite_is_refused_packed_closer_or_not(library: Library, kind):
    bits = drawn(np.random.default_rng(5), 40, 256, kind)
    bits[33, 200] = 0x7FC0
    with pytest.raises(BackendError) as problem:
        load_float_matrix(library.kernels, stored(bits), CpuOps(library.kernels)._weights)
    assert problem.value.error.code == "weights-not-finite"
    assert problem.value.error.facts == {"tensor": "w", "row": 33}
