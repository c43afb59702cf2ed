"""The quantised kernels return the scalar reference's bytes, whatever runs them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mens_core.ops import StoredTensor
from mens_cpu_ref import quantised
from mens_cpu_ref.library import Library, load_library
from oracle import quantised_integers as exact
from oracle.ggml_blocks import BYTES, COLUMNS, FORMATS, SCALES_AT, random_blocks
from vox_plugin_api.backend import BackendError

ACTIVATIONS = ("ordinary", "zero_blocks", "huge", "tiny", "ties", "extremes")


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    loaded = load_library()
    yield loaded
    loaded.force_isa("")
    loaded.set_threads(2)


def isas(library: Library) -> list[str]:
    """Every instruction set this machine can run."""
    found = []
    for name in ("avx2", "avx512", "neon", "neon_dot"):
        try:
            library.force_isa(name)
        except ValueError:
            continue
        found.append(name)
    library.force_isa("")
    return found


def stored(weight_format: str, blocks: np.ndarray, rows: int) -> StoredTensor:
    columns = len(blocks) // rows * COLUMNS[weight_format]
    return StoredTensor("w", weight_format, (rows, columns), memoryview(blocks.reshape(-1)))


def weights(weight_format: str, rows: int, columns: int, rng, scales="ordinary", codes="any") -> StoredTensor:
    count = rows * columns // COLUMNS[weight_format]
    return stored(weight_format, random_blocks(weight_format, count, rng, scales, codes), rows)


def activations(kind: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "zero_blocks":
        x[rng.random(x.shape) < 0.5] = -0.0
        x[:, : columns // 2] = 0
    elif kind == "huge":
        x = np.clip(x, -3, 3) * np.float32(2.0**126)
    elif kind == "tiny":
        # Around 127 * 2^-126, where d is flushed, and among the subnormals.
        powers = rng.integers(-135, -115, (rows, columns // 32)).astype(np.float32)
        x *= np.exp2(powers).repeat(32, axis=1)
    elif kind == "ties":
        # amax = 127 makes d = id = 1: halves must go to the even code.
        x = (rng.integers(-253, 254, x.shape) / 2).astype(np.float32)
        x[:, ::32] = 127
    elif kind == "extremes":
        x = rng.choice(np.array([-1, 1], np.float32), x.shape)
    return x


def product(functions, weight: StoredTensor, x: np.ndarray) -> tuple[np.ndarray, int]:
    matrix = quantised.pack_matrix(functions, weight)
    return quantised.linear(functions, quantised.quantise(functions, x, matrix.block), matrix)


def assert_same(found: tuple[np.ndarray, int], expected: tuple[np.ndarray, int]) -> None:
    assert found[1] == expected[1]
    if expected[1] == 0:
        assert found[0].tobytes() == expected[0].tobytes()
        return
    # Which NaN it is, is not defined.
    finite = np.isfinite(expected[0])
    assert np.array_equal(np.isfinite(found[0]), finite)
    assert found[0][finite].tobytes() == expected[0][finite].tobytes()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    weight_format=st.sampled_from(FORMATS),
    outputs=st.integers(1, 70),
    blocks=st.integers(1, 23),
    rows=st.integers(1, 30),
    threads=st.sampled_from([1, 2, 3, 5]),
    scales=st.sampled_from(["ordinary", "subnormal", "largest", "zero"]),
    codes=st.sampled_from(["any", "any", "lowest", "highest"]),
    kind=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_kernels_return_the_reference_bytes(
    library, weight_format, outputs, blocks, rows, threads, scales, codes, kind, seed
):
    rng = np.random.default_rng(seed)
    columns = COLUMNS[weight_format] * (blocks if COLUMNS[weight_format] == 32 else 1 + blocks % 4)
    weight = weights(weight_format, outputs, columns, rng, scales, codes)
    x = activations(kind, rows, columns, rng)
    expected = product(library.reference, weight, x)
    library.set_threads(threads)
    for isa in isas(library):
        library.force_isa(isa)
        assert_same(product(library.kernels, weight, x), expected)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_row_does_not_depend_on_the_rows_beside_it(library, weight_format):
    rng = np.random.default_rng(5)
    matrix = quantised.pack_matrix(library.kernels, weights(weight_format, 40, 768, rng))
    x = rng.standard_normal((131, 768), dtype=np.float32)

    def rows_of(part: np.ndarray) -> np.ndarray:
        codes = quantised.quantise(library.kernels, np.ascontiguousarray(part), matrix.block)
        return quantised.linear(library.kernels, codes, matrix)[0]

    for isa in isas(library):
        library.force_isa(isa)
        together = rows_of(x)
        for size in (1, 2, 3, 5, 7, 8, 11, 12, 13, 95, 97):
            start = 17 % (len(x) - size)
            assert rows_of(x[start : start + size]).tobytes() == together[start : start + size].tobytes(), (
                size
            )


@pytest.mark.parametrize("weight_format", FORMATS)
def test_integers_alone_give_the_same_bits(library, weight_format):
    rng = np.random.default_rng(11)
    checked = 0
    for kind in ACTIVATIONS:
        for scales, codes in (("ordinary", "any"), ("subnormal", "highest"), ("ordinary", "lowest")):
            columns = 256 if COLUMNS[weight_format] == 32 else 512
            columns += 96 if COLUMNS[weight_format] == 32 else 0  # a chunk of three blocks
            weight = weights(weight_format, 2, columns, rng, scales, codes)
            x = activations(kind, 1, columns, rng)
            y, _ = product(library.reference, weight, x)
            raw, size = bytes(weight.data), columns // COLUMNS[weight_format] * BYTES[weight_format]
            for row in range(2):
                try:
                    bits = exact.output(
                        weight_format, raw[row * size : (row + 1) * size], x.view(np.uint32)[0].tolist()
                    )
                except (OverflowError, exact.BetweenLanesError):
                    continue
                assert bits == int(y.view(np.uint32)[0, row]), (kind, scales, codes)
                checked += 1
    assert checked >= 30


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_error_stays_within_what_the_definition_allows(library, weight_format):
    rng = np.random.default_rng(3)
    weight = weights(weight_format, 48, 1024, rng)
    x = rng.standard_normal((7, 1024), dtype=np.float32)
    y, _ = product(library.kernels, weight, x)
    matrix = quantised.pack_matrix(library.kernels, weight)
    w = quantised.take_rows(library.kernels, matrix, np.arange(48, dtype=np.int32), None)[0].astype(
        np.float64
    )
    true = x.astype(np.float64) @ w.T
    blocks = x.reshape(7, -1, matrix.block)
    d = np.abs(blocks).max(axis=2, keepdims=True).astype(np.float64) / 127
    # Half a code each, a little more where x * id was itself rounded, and d * q against x.
    code_error = np.broadcast_to(d * (0.5 + 130 * 2.0**-23), blocks.shape).reshape(7, 1024)
    staircase = code_error @ np.abs(w).T
    # Each block costs a few roundings of its own size. With a minimum, d U and dmin V are larger than
    # their difference: each is at most the sum over its parts.
    parts = _absolute_parts(weight, matrix.rows)
    rounding = (1024 // matrix.block + 6) * 2.0**-23 * ((np.abs(x) + code_error) @ parts.T)
    excess = np.abs(y - true) / (staircase + rounding)
    assert excess.max() <= 1
    assert excess.max() > 0.01  # a bound nothing comes near would prove nothing


def _absolute_parts(weight: StoredTensor, rows: int) -> np.ndarray:
    """|d scale q| + |dmin min| of every weight, in float64."""
    from oracle.ggml_blocks import parse_block

    size = BYTES[weight.format]
    raw = bytes(weight.data)
    out = []
    for at in range(0, len(raw), size):
        block = parse_block(weight.format, raw[at : at + size])
        d, dmin = (abs(float(exact.from_half(h).value)) for h in (block.d, block.dmin))
        width = len(block.codes) // len(block.scales)
        out += [
            d * abs(block.scales[i // width] * q) + dmin * block.mins[i // width]
            for i, q in enumerate(block.codes)
        ]
    return np.array(out).reshape(rows, -1)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_names_its_row(library, weight_format, bad):
    rng = np.random.default_rng(8)
    matrix = quantised.pack_matrix(library.kernels, weights(weight_format, 33, 512, rng))
    x = rng.standard_normal((14, 512), dtype=np.float32)
    x[9, 300] = bad
    for isa in isas(library):
        library.force_isa(isa)
        y, code = quantised.linear(
            library.kernels, quantised.quantise(library.kernels, x, matrix.block), matrix
        )
        assert code == 10
        assert np.isnan(y[9]).all()
        assert np.isfinite(np.delete(y, 9, axis=0)).all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_scale_that_is_not_finite_is_refused_by_row(library, weight_format):
    rng = np.random.default_rng(9)
    for at in SCALES_AT[weight_format]:
        blocks = random_blocks(weight_format, 40 * 2, rng)
        blocks[2 * 37 + 1, at : at + 2] = np.array([0x7C00], "<u2").view(np.uint8)
        for functions in (library.kernels, library.reference):
            with pytest.raises(BackendError) as refused:
                quantised.pack_matrix(functions, stored(weight_format, blocks, 40))
            assert refused.value.error.code == "weights-not-finite"
            assert refused.value.error.facts["row"] == 37
            # The import copies blocks as they are: to import the same file again would change nothing.
            assert "again" not in refused.value.error.remedy
            assert "the file that the model was imported from holds this" in refused.value.error.remedy


@pytest.mark.parametrize("weight_format", FORMATS)
def test_of_several_such_rows_the_lowest_is_named(library, weight_format):
    """Blocks are packed column by column, so the lowest is not the first that is met, nor the last."""
    at = SCALES_AT[weight_format][0]
    blocks = random_blocks(weight_format, 40 * 3, np.random.default_rng(10))
    for row, column in ((37, 0), (35, 1), (39, 2)):
        blocks[3 * row + column, at : at + 2] = np.array([0x7C00], "<u2").view(np.uint8)
    for functions in (library.kernels, library.reference):
        with pytest.raises(BackendError) as refused:
            quantised.pack_matrix(functions, stored(weight_format, blocks, 40))
        assert refused.value.error.facts["row"] == 35


def test_bytes_that_do_not_make_the_shape_are_refused(library):
    blocks = random_blocks("q4_k", 8, np.random.default_rng(0))
    for shape in ((8, 255), (7, 256), (8, 0), (2048,), (8, 512)):
        with pytest.raises(BackendError) as refused:
            quantised.pack_matrix(
                library.kernels, StoredTensor("w", "q4_k", shape, memoryview(blocks.reshape(-1)))
            )
        assert refused.value.error.code == "tensor-size"


@pytest.mark.parametrize("weight_format", FORMATS)
def test_packing_reads_and_writes_nothing_outside(library, weight_format):
    rng = np.random.default_rng(2)
    for outputs in (1, 15, 16, 17, 31):
        weight = weights(weight_format, outputs, 512, rng)
        number = FORMATS.index(weight_format)
        size = library.kernels["quant_packed_bytes"](number, outputs, 512)
        packed = np.full(size + 128, 0xA5, np.uint8)
        start = -packed.ctypes.data % 64
        packed[start : start + size] = 0
        file = np.frombuffer(weight.data, np.uint8)
        library.kernels["quant_pack"](number, file.ctypes.data, outputs, 512, packed.ctypes.data + start)
        assert (packed[:start] == 0xA5).all() and (packed[start + size :] == 0xA5).all()
        x = quantised.quantise(library.kernels, activations("ordinary", 5, 512, rng), COLUMNS[weight_format])
        y = np.full(5 * outputs + 32, 7, np.float32)
        for isa in isas(library):
            library.force_isa(isa)
            library.kernels["quant_linear"](
                number, packed.ctypes.data + start, outputs, 512, x.address, 5, y[16:].ctypes.data
            )
            assert (y[:16] == 7).all() and (y[16 + 5 * outputs :] == 7).all()


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_packed_form_is_as_small_as_the_file(library, weight_format):
    number = FORMATS.index(weight_format)
    for columns in (512, 640, 1024, 2048) if COLUMNS[weight_format] == 32 else (256, 1024, 2048):
        packed = library.kernels["quant_packed_bytes"](number, 4096, columns)
        assert packed <= 1.03 * library.kernels["quant_file_bytes"](number, 4096, columns)


def test_activations_fit_only_weights_of_their_block(library):
    rng = np.random.default_rng(1)
    matrix = quantised.pack_matrix(library.kernels, weights("q6_k", 4, 256, rng))
    with pytest.raises(ValueError, match="blocks of 32"):
        quantised.linear(
            library.kernels, quantised.quantise(library.kernels, np.ones((1, 256), np.float32), 32), matrix
        )
