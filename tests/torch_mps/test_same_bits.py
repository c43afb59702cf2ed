"""The Metal lane, run on the CPU in an Apple GPU's place, beside the scalar reference and the CPU lane.

This says nothing of Apple's compiler and hardware: a certificate does (docs/certificates).
"""

from __future__ import annotations

import numpy as np
import pytest

from grid_shim import build as shim
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from mens_core.conformance.cases import CASES
from mens_core.conformance.inputs import floats, put, weight
from mens_core.kernel_source import grid_source
from mens_torch_mps.kernel_text import metal_matrix_source, metal_source, metal_training_source
from mens_torch_mps.lane import _FEW_ROWS


def results(case, ops):
    ops.take_faults()
    arrays = [np.asarray(array).tobytes() for array in case(ops)]
    faults = [(fault.name, fault.rows) for fault in ops.take_faults()]
    assert arrays or faults, "the case compares nothing"
    return [*arrays, *faults]


def test_every_operator_gives_the_reference_s_bytes(started, reference):
    """A group's threads run last to first, and the start of each buffer is guarded to the byte; the other
    order and side are those of `test_grid_kernels`, and of the models here."""
    lane = started(order=1, at_end=False).lane()
    for name, case in CASES.items():
        assert results(case, lane) == results(case, reference()), name


FORMATS = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")


def linear(format_, outputs, columns, ops):
    matrix = ops.load_matrix(weight(format_, 5, outputs, columns))
    for rows in (1, _FEW_ROWS, _FEW_ROWS + 1):
        x = put(ops, floats(6 + rows, rows, columns, span=2, binades=9))
        yield ops.to_host(ops.linear(x, matrix, name="linear"))


@pytest.mark.parametrize("simd", [32, 16, 64])
@pytest.mark.parametrize("format_", FORMATS)
def test_chunks_are_shared_and_folded_in_order_at_any_simd_width(started, reference, format_, simd):
    """Chunks that are not whole, fewer and more of them than threads, SIMD groups without an output."""
    lane = started(simd=simd).lane()
    wide = 128 * simd + 256 if format_ in ("f32", "q6_k") else 1280
    small = 256 if format_.endswith("_k") else 32
    for outputs, columns in ((1, small), (9, wide), (5, 1280 + small)):
        found = [a.tobytes() for a in linear(format_, outputs, columns, lane)]
        assert found == [a.tobytes() for a in linear(format_, outputs, columns, reference())]
        assert lane.take_faults() == []


def test_a_row_that_is_not_finite_is_told_by_the_shared_kernels(started):
    lane = started().lane()
    x = floats(3, 2, 256)
    x[1] = np.ldexp(np.float32(1), 127)
    for format_ in ("f32", "q8_0"):
        matrix, rows = lane.load_matrix(weight(format_, 4, 40, 256)), put(lane, x)
        lane.take_faults()
        lane.linear(rows, matrix, name="linear")
        assert [(fault.name, fault.rows) for fault in lane.take_faults()] == [("linear", (1,))]


def steps():
    """A prompt over a border of two blocks, one beside it, decoding, a chunk that goes on."""
    sequences = Sequences()
    yield sequences.step([(0, [i % 97 for i in range(1, 131)]), (1, [5, 6, 7])])
    for i in range(2):
        yield sequences.step([(0, [i]), (1, [2 * i + 1])])
    yield sequences.step([(1, [9] * 6), (0, [3])])


def run(path, ops):
    model = open_model(path, ops).model
    cache = model.new_cache(8)
    made = []
    for batch in steps():
        result = model.forward(batch, cache)
        made.append((ops.to_host(result.logits).tobytes(), result.faults))
    return made


@pytest.mark.parametrize("family", BY_FAMILY)
def test_both_models_give_the_cpu_lane_s_bytes(started, library, family, tmp_path):
    from mens_cpu_ref.lane import CpuOps

    # Layers of both kinds of attention, where there are two.
    layers = {"qwen3": 1, "gemma3": 6}[family]
    path = write_model(tmp_path, {**BY_FAMILY[family], "num_hidden_layers": layers})
    assert run(path, started().lane()) == run(path, CpuOps(library.kernels))


@pytest.mark.parametrize("words", [0, 1, 999, 1000, 1001, 7001, 8001])
def test_what_is_sent_arrives(started, words):
    device = started().device
    sent = (np.arange(words, dtype=np.int64) * 2654435761 % (1 << 32)).astype(np.uint32)
    buffer = device.put(sent)
    sent += np.uint32(1)  # the caller's again
    found = device.get(buffer, np.uint32, (words,))
    assert found.tobytes() == (sent - np.uint32(1)).tobytes()
    odd = device.put(np.arange(7, dtype=np.uint8))
    assert device.get(odd, np.uint8, (7,)).tolist() == list(range(7))


def test_the_text_is_the_grid_s_with_the_lane_s_own_behind_it():
    text = metal_source()
    assert text.startswith(grid_source("metal", "serving"))
    # torch hands it over as ASCII, and compiles nothing at all of a text that isn't.
    assert text.isascii()


@pytest.mark.parametrize("text", [metal_source(), metal_training_source(), metal_matrix_source()])
def test_every_text_asks_for_no_contraction_and_the_written_order_before_its_first_line_of_code(text):
    first = text.index("static inline")
    for pragma in ("#pragma METAL fp contract(off)", "#pragma METAL fp math_mode(safe)"):
        assert text.count(pragma) == 1
        assert text.index(pragma) < first
    assert shim.fp_problems(shim.preprocessed(text, "metal")) == []
    code = "\n".join(line.partition("//")[0] for line in text.splitlines())
    for word in ("simd_sum", "simd_prefix", "double", "atomic", "metal::exp", "rsqrt", "fast::"):
        assert word not in code, word
