"""Rows of quantised matrices in float32: GGML's formulas, each operation rounded once."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from mens_core.ops import StoredTensor
from mens_cpu_ref import quantised
from mens_cpu_ref.library import load_library
from oracle import quantised_integers as exact
from oracle.ggml_blocks import BYTES, COLUMNS, FORMATS, random_blocks

CASES = Path(__file__).parents[1] / "cases"
INDEX = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] == "Q4"]


def both():
    library = load_library()
    return (library.kernels, library.reference)


def rows_of(functions, weight_format: str, blocks: np.ndarray, rows: int, ids, scale=None) -> np.ndarray:
    columns = blocks.size // rows // BYTES[weight_format] * COLUMNS[weight_format]
    matrix = quantised.pack_matrix(
        functions, StoredTensor("w", weight_format, (rows, columns), memoryview(blocks.reshape(-1)))
    )
    values, code = quantised.take_rows(functions, matrix, np.array(ids, np.int32), scale)
    assert code == 0
    return values


@pytest.mark.parametrize("case", INDEX, ids=[case["file"] for case in INDEX])
def test_golden_blocks_are_equal_by_bytes(case):
    assert case["expect"]["value"] == "byte equality"
    golden = json.loads((CASES / case["file"]).read_text())
    assert golden
    for functions in both():
        for item in golden:
            block = np.frombuffer(bytes.fromhex(item["block_hex"]), np.uint8).copy()
            values = rows_of(functions, item["type"].lower(), block, 1, [0])
            assert values.astype("<f4").tobytes().hex() == item["f32_le_hex"]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_the_gguf_package_reads_the_same_weights(weight_format):
    rng = np.random.default_rng(6)
    for scales in ("ordinary", "subnormal", "largest"):
        blocks = random_blocks(weight_format, 37 * 3, rng, scales).reshape(37, -1)
        theirs = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[weight_format.upper()])
        for functions in both():
            ours = rows_of(functions, weight_format, blocks, 37, range(37))
            assert ours.tobytes() == theirs.astype(np.float32).tobytes(), scales


@pytest.mark.parametrize("weight_format", FORMATS)
def test_integers_alone_give_the_same_weights(weight_format):
    rng = np.random.default_rng(12)
    for codes in ("any", "lowest", "highest"):
        for scales in ("ordinary", "subnormal", "zero"):
            block = random_blocks(weight_format, 1, rng, scales, codes)
            expected = exact.dequantised(weight_format, block.tobytes())
            for functions in both():
                found = rows_of(functions, weight_format, block, 1, [0]).view(np.uint32)[0].tolist()
                assert found == expected, (codes, scales)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_any_rows_in_any_order_times_a_scale(weight_format):
    rng = np.random.default_rng(13)
    blocks = random_blocks(weight_format, 50 * 3, rng)
    ids = rng.integers(0, 50, 131)
    for functions in both():
        plain = rows_of(functions, weight_format, blocks, 50, range(50))
        scaled = rows_of(functions, weight_format, blocks, 50, ids, 25.25)
        assert scaled.tobytes() == (plain[ids] * np.float32(25.25)).tobytes()


@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_outside_the_matrix_is_refused_and_nothing_written(bad):
    blocks = random_blocks("q8_0", 50, np.random.default_rng(1))
    for functions in both():
        matrix = quantised.pack_matrix(
            functions, StoredTensor("w", "q8_0", (50, 32), memoryview(blocks.reshape(-1)))
        )
        assert quantised.take_rows(functions, matrix, np.array([3, bad], np.int32), None)[1] == -2


@pytest.mark.parametrize("weight_format", FORMATS)
def test_packing_in_pieces_makes_the_same_matrix_and_gives_each_piece_back(weight_format, monkeypatch):
    rows, columns = 53, 512
    blocks = random_blocks(weight_format, rows * columns // COLUMNS[weight_format], np.random.default_rng(5))
    given_back: list[int] = []
    stored = StoredTensor(
        "w", weight_format, (rows, columns), memoryview(blocks.reshape(-1)), taken=given_back.append
    )
    for functions in both():
        whole = quantised.pack_matrix(functions, stored)
        monkeypatch.setattr(quantised, "_PIECE_BYTES", 16 * columns)
        given_back.clear()
        pieces = quantised.pack_matrix(functions, stored)
        monkeypatch.undo()
        assert np.array_equal(whole.packed, pieces.packed)
        assert len(given_back) > 1 and given_back == sorted(given_back)
        assert given_back[-1] == stored.data.nbytes
