"""The greatest output found without the others is the reference's argmax of all outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance.test_quant_linear import (
    ACTIVATIONS,
    activations,
    assert_same,
    isas,
    product,
    stored,
    weights,
)
from lanes.batches import Sequences
from lanes.quantised_model import write_both
from lanes.tiny_models import BY_FAMILY, open_model
from mens_core.models.linear import Lora
from mens_core.models.passes import ForwardPass
from mens_core.wishes import Penalty, Wish
from mens_cpu_ref import quantised, searching
from mens_cpu_ref.arrays import Rows, address_of
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import Library, load_library
from mens_cpu_ref.quantised import QuantisedMatrix
from mens_cpu_ref.reference_lane import ReferenceOps
from mens_cpu_ref.searching import Search
from mens_cpu_ref.update_library import UPDATE_OPERATORS


@pytest.fixture(autouse=True)
def every_matrix_lies_in_halves(monkeypatch):
    monkeypatch.setattr(quantised, "MANY_ROWS", 1)


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    loaded = load_library()
    yield loaded
    loaded.force_isa("")
    loaded.set_threads(2)


def greatest(library: Library, x: np.ndarray, matrix: QuantisedMatrix) -> tuple[np.ndarray, int]:
    """Ids, and how many groups of 16 outputs were computed."""
    search = Search(library.kernels)
    shape = (matrix.rows, matrix.columns, len(x))
    memory = np.zeros(library.kernels["quant_choose_bytes"](*shape) + 64, np.uint8)
    ids, searched = np.full(len(x), -2, np.int32), np.zeros(1, np.int64)
    place = -(-address_of(memory) // 64) * 64
    code = library.kernels["quant_choose"](
        matrix.address, *shape[:2], address_of(x), len(x), place, address_of(ids), address_of(searched)
    )
    assert code == 0
    if len(x) <= 4 and ids.min() >= 0:
        assert np.array_equal(search.greatest(x, matrix), ids)
    return ids, int(searched[0])


def expected_ids(library: Library, weight, x: np.ndarray) -> np.ndarray:
    outputs, code = product(library.reference, weight, x)
    assert code == 0
    ids = np.empty(len(x), np.int32)
    library.reference["argmax"](address_of(outputs), *outputs.shape, address_of(ids))
    return ids


def bounded(x: np.ndarray) -> bool:
    return bool(np.isfinite(x).all() and np.abs(x).max() / 127 < 2.0**60)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    outputs=st.sampled_from([1, 15, 16, 17, 70, 1500, 2100]),
    blocks=st.integers(1, 9),
    rows=st.integers(1, 9),
    threads=st.sampled_from([1, 2, 3]),
    scales=st.sampled_from(["ordinary", "ordinary", "subnormal", "largest", "zero"]),
    codes=st.sampled_from(["any", "any", "lowest", "highest"]),
    kind=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_the_references_argmax(library, outputs, blocks, rows, threads, scales, codes, kind, seed):
    rng = np.random.default_rng(seed)
    weight = weights("q8_0", outputs, 32 * blocks, rng, scales, codes)
    x = activations(kind, rows, 32 * blocks, rng)
    library.set_threads(threads)
    for isa in isas(library):
        library.force_isa(isa)
        matrix = quantised.pack_matrix(library.kernels, weight)
        assert matrix.number == quantised.UPPER
        ids, _ = greatest(library, x, matrix)
        if bounded(x):
            assert np.array_equal(ids, expected_ids(library, weight, x)), isa
        else:
            assert (ids == -1).all()


@pytest.mark.parametrize("rows", [1, 5, 13])
def test_every_other_operator_gives_the_same_bytes_from_halves(library, rows):
    rng = np.random.default_rng(rows)
    weight = weights("q8_0", 70, 96, rng)
    x = rng.standard_normal((rows, 96), dtype=np.float32)
    reference = quantised.pack_matrix(library.reference, weight)
    ids = np.array([69, 0, 16, 15], np.int32)
    dy = rng.standard_normal((rows, 70), dtype=np.float32)
    gradients = {}
    for isa in isas(library):
        library.force_isa(isa)
        matrix = quantised.pack_matrix(library.kernels, weight)
        assert_same(product(library.kernels, weight, x), product(library.reference, weight, x))
        found, _ = quantised.take_rows(library.kernels, matrix, ids, 3.5)
        assert found.tobytes() == quantised.take_rows(library.reference, reference, ids, 3.5)[0].tobytes()
        for prefix, w in (("vox_", matrix), ("ref_", reference)):
            backward = library.bind(prefix, UPDATE_OPERATORS)["quant_linear_backward"]
            gradients[prefix] = np.empty((rows, 96), np.float32)
            place = address_of(gradients[prefix])
            assert backward(w.number, w.address, 70, 96, address_of(dy), rows, place) == 0
        assert gradients["vox_"].tobytes() == gradients["ref_"].tobytes()


def tight_rows(rng: np.random.Generator, outputs: int, q: np.ndarray) -> np.ndarray:
    """Codes whose lower four bits all pull one way: the bounds are then as tight as bounds can be.

    Upper bits are alike in all rows, so that an estimate says nothing of which output is the greatest.
    """
    upper = rng.integers(0, 16, len(q))[None].repeat(outputs, 0)
    up = rng.random((outputs, 1)) < 0.5
    lower = np.where((q[None] > 0) == up, 15, 0)
    lower[rng.random(lower.shape) < 0.02] = 7
    return (16 * upper + lower - 128).astype(np.int8)


@pytest.mark.parametrize("columns", [64, 256])
def test_outputs_at_the_very_edge_of_their_bounds_are_found(library, columns):
    """64 columns have few enough lines that a second look has them all, 256 have twice as many."""
    rng = np.random.default_rng(columns)
    for trial in range(30):
        q = rng.integers(-127, 128, columns)
        q[::32] = 127
        x = q.astype(np.float32)[None]  # d_a = 1 and the codes are the values
        codes = tight_rows(rng, 600, q)
        # The lowest estimate hides the greatest output: its radius has to be all there.
        codes[:, 0] = -128 + 15
        winner = int(rng.integers(0, 600))
        codes[winner] = (
            16 * ((codes[winner].astype(int) + 128) // 16) + np.where(q > 0, 15, 0) - 128
        ).astype(np.int8)
        blocks = np.zeros((600, columns // 32, 34), np.uint8)
        blocks[:, :, :2] = np.float16(1).view(np.uint16).astype("<u2").reshape(1).view(np.uint8)
        blocks[:, :, 2:] = codes.view(np.uint8).reshape(600, -1, 32)
        weight = stored("q8_0", blocks.reshape(-1, 34), 600)
        for isa in isas(library):
            library.force_isa(isa)
            ids, _ = greatest(library, x, quantised.pack_matrix(library.kernels, weight))
            assert np.array_equal(ids, expected_ids(library, weight, x)), (trial, isa)


def test_equal_outputs_give_the_lowest_id_and_padding_is_no_output(library):
    rng = np.random.default_rng(8)
    x = np.abs(rng.standard_normal((2, 64), dtype=np.float32))
    one = weights("q8_0", 1, 64, rng).data
    same = np.frombuffer(one, np.uint8).reshape(1, -1).repeat(1500, 0)
    below_zero = same.reshape(1500, 2, 34).copy()
    below_zero[:, :, 2:] = np.uint8(0x9D)  # -99: all outputs are below the zeros of the last group's padding
    below_zero[:, :, :2] = np.float16(0.01).view(np.uint16).astype("<u2").reshape(1).view(np.uint8)
    for rows in (same.reshape(-1, 34), below_zero.reshape(-1, 34)):
        weight = stored("q8_0", np.ascontiguousarray(rows), 1500)
        for isa in isas(library):
            library.force_isa(isa)
            ids, _ = greatest(library, x, quantised.pack_matrix(library.kernels, weight))
            assert (ids == 0).all()


def test_what_can_not_be_bounded_is_left_to_all_outputs(library):
    rng = np.random.default_rng(9)
    matrix = quantised.pack_matrix(library.kernels, weights("q8_0", 40, 64, rng))
    for bad in (np.nan, np.inf, -np.inf, 2.0**68):
        x = rng.standard_normal((2, 64), dtype=np.float32)
        x[1, 5] = bad
        assert (greatest(library, x, matrix)[0] == -1).all()
        assert Search(library.kernels).greatest(x, matrix) is None


def test_little_is_searched_where_one_output_stands_out_and_a_long_search_is_not_repeated_at_once(library):
    rng = np.random.default_rng(10)
    standing_out = rng.integers(-8, 8, (2048, 1024)).astype(np.int8)
    standing_out[1234] = 127
    flat = rng.integers(-8, 8, (2048, 1024)).astype(np.int8)
    x = np.ones((1, 1024), np.float32)
    matrices = []
    for codes in (standing_out, flat):
        blocks = np.zeros((2048, 32, 34), np.uint8)
        blocks[:, :, :2] = np.float16(0.01).view(np.uint16).astype("<u2").reshape(1).view(np.uint8)
        blocks[:, :, 2:] = codes.view(np.uint8).reshape(2048, 32, 32)
        weight = stored("q8_0", blocks.reshape(-1, 34), 2048)
        matrices.append(quantised.pack_matrix(library.kernels, weight))
    search = Search(library.kernels)
    for _ in range(3):
        assert search.greatest(x, matrices[0]).tolist() == [1234]
        assert search.searched[0] == 1
    pauses = []
    for _ in range(8):
        waited = 0
        while search.greatest(x, matrices[1]) is None:
            waited += 1
        assert search.searched[0] > searching._WORTHWHILE * 128
        pauses.append(waited)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64]
    for _ in range(64):
        assert search.greatest(x, matrices[0]) is None
    assert search.greatest(x, matrices[0]).tolist() == [1234]
    assert search.greatest(x, matrices[0]).tolist() == [1234]


def test_many_rows_and_other_packings_are_left_to_all_outputs(library, monkeypatch):
    rng = np.random.default_rng(11)
    weight = weights("q8_0", 40, 64, rng)
    x = rng.standard_normal((5, 64), dtype=np.float32)
    search = Search(library.kernels)
    matrix = quantised.pack_matrix(library.kernels, weight)
    assert search.greatest(x[:4].copy(), matrix) is not None
    assert search.greatest(x, matrix) is None
    monkeypatch.setattr(quantised, "MANY_ROWS", 41)
    whole = quantised.pack_matrix(library.kernels, weight)
    assert whole.number == 0 and search.greatest(x[:1].copy(), whole) is None
    monkeypatch.setattr(quantised, "MANY_ROWS", 1)
    assert quantised.pack_matrix(library.reference, weight).number == 0


# --- all outputs, none kept ----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    weight_format=st.sampled_from(["q8_0", "q8_0 in halves", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"]),
    outputs=st.sampled_from([1, 15, 16, 17, 70, 600, 1100]),
    rows=st.integers(1, 16),
    threads=st.sampled_from([1, 2, 3]),
    kind=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_greatest_of_all_outputs_is_the_references_argmax(
    library, weight_format, outputs, rows, threads, kind, seed
):
    rng = np.random.default_rng(seed)
    weight = weights(weight_format.split()[0], outputs, 256, rng)
    x = activations(kind, rows, 256, rng)
    library.set_threads(threads)
    reference, code = product(library.reference, weight, x)
    for isa in isas(library):
        library.force_isa(isa)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantised, "MANY_ROWS", 1 if "halves" in weight_format else 1 << 14)
            matrix = quantised.pack_matrix(library.kernels, weight)
        ids = quantised.greatest(library.kernels, x, matrix)
        if code != 0:  # some output is not finite
            assert ids is None, isa
        else:
            assert ids is not None and np.array_equal(ids, reference.argmax(1)), isa


def of_rows(values: np.ndarray) -> QuantisedMatrix:
    """A matrix of 64 columns whose rows are codes all alike."""
    blocks = np.zeros((len(values), 2, 34), np.uint8)
    blocks[:, :, :2] = np.float16(0.01).view(np.uint16).astype("<u2").reshape(1).view(np.uint8)
    blocks[:, :, 2:] = values.astype(np.int8).view(np.uint8)[:, None, None]
    return quantised.pack_matrix(load_library().kernels, stored("q8_0", blocks.reshape(-1, 34), len(values)))


def test_of_equal_outputs_the_lowest_id_is_found_and_padding_is_no_output(library):
    x = np.ones((3, 64), np.float32)
    values = np.full(1100, -5)
    for equal in ([45, 60, 700], [60, 76], [12, 1099], [600, 1099], [0, 1099]):
        here = values.copy()
        here[equal] = 9
        for isa in isas(library):
            library.force_isa(isa)
            assert quantised.greatest(library.kernels, x, of_rows(here)).tolist() == 3 * equal[:1]
            # Nothing but what lies below the zeros of the last group's padding.
            assert quantised.greatest(library.kernels, x, of_rows(values)).tolist() == [0, 0, 0]


def test_more_rows_and_outputs_that_are_not_finite_are_left_to_the_logits(library):
    matrix = of_rows(np.arange(40))
    x = np.ones((17, 64), np.float32)
    assert quantised.greatest(library.kernels, x, matrix) is None
    assert quantised.greatest(library.kernels, x[:16].copy(), matrix).tolist() == 16 * [39]
    for row in (0, 15):
        bad = x[:16].copy()
        bad[row, 3] = np.nan
        assert quantised.greatest(library.kernels, bad, matrix) is None
    assert quantised.greatest(library.reference, x[:2].copy(), matrix) is None


# --- whole steps -------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
}
MODELS = {
    "gemma3": BY_FAMILY["gemma3"] | SIZES | {"final_logit_softcapping": None},
    "qwen3": BY_FAMILY["qwen3"] | SIZES | {"tie_word_embeddings": False},
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def quantised_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return write_both(folder, MODELS[request.param], formats=("Q8_0",))[0]


def steps(ops, folder, wishes_of, count=2):
    """What three steps of some sequences gave: readings, faults, and whether logits were made."""
    model = open_model(folder, ops).model
    cache, sequences, made = model.new_cache(8), Sequences(), []
    for ids in ([3, 4, 5], [6], [7]):
        batch = sequences.step([(0, ids), *((i, ids[:1]) for i in range(1, count))])
        result = model.forward(batch, cache, wishes_of())
        readings = [
            (r.token_id, r.fault, None if r.logits is None else r.logits.tobytes()) for r in result.readings
        ]
        made.append((readings, result.faults, result.logits is not None))
    return made


def greedy(count: int = 2) -> list[Wish]:
    return [Wish(i, is_chosen=True) for i in range(count)]


@pytest.mark.parametrize("count", [2, 5])
def test_a_greedy_step_makes_no_logits_and_chooses_what_they_would_say(quantised_folder, library, count):
    found = steps(CpuOps(library.kernels), quantised_folder, lambda: greedy(count), count)
    expected = steps(ReferenceOps(), quantised_folder, lambda: greedy(count), count)
    assert [readings for readings, *_ in found] == [readings for readings, *_ in expected]
    assert not any(has_logits for *_, has_logits in found)


@pytest.mark.parametrize("other", ["scored", "penalty", "draw"])
def test_a_step_that_is_asked_for_more_makes_logits(quantised_folder, library, other):
    penalty = Penalty(np.array([9], np.int32), np.ones(1, np.float32), np.full(1, 50, np.float32))
    more = {
        "scored": Wish(1, is_scored=True, is_chosen=True),
        "penalty": Wish(1, penalty=penalty, is_chosen=True),
        "draw": Wish(1, is_chosen=True, draw=lambda weights: int(weights.argmin()), temperature=1.0),
    }

    def wishes() -> list[Wish]:
        return [Wish(0, is_chosen=True), more[other]]

    found = steps(CpuOps(library.kernels), quantised_folder, wishes)
    assert found == steps(ReferenceOps(), quantised_folder, wishes)
    assert all(has_logits for *_, has_logits in found)


def test_a_row_that_is_not_finite_fails_alone_and_by_the_same_name(quantised_folder, library):
    made = []
    for ops in (CpuOps(library.kernels), ReferenceOps()):
        model = open_model(quantised_folder, ops).model
        batch = Sequences().step([(0, [3]), (1, [4, 5])])
        norm = replace(
            model.head.norm, weight=Rows(np.full_like(model.head.norm.weight.values, np.float32(3e38)))
        )
        broken = replace(model, head=replace(model.head, norm=norm))
        result = broken.forward(batch, broken.new_cache(4), greedy())
        made.append((result.faults, result.readings))
    assert made[0] == made[1]
    assert made[0][0]


def test_a_softcap_or_an_update_of_the_head_is_left_to_all_logits(quantised_folder, library):
    ops = CpuOps(library.kernels)
    head = open_model(quantised_folder, ops).model.head
    hidden = Rows(np.ones((1, head.norm.weight.values.size), np.float32))
    run = ForwardPass(ops, Sequences().step([(0, [3])]), None)
    assert head.greatest(run, hidden).tolist() == ops.argmax(head.logits(run, hidden)).tolist()
    assert replace(head, softcap=3.0).greatest(run, hidden) is None
    lora = Lora(a=None, b=None, rank=1, scale=1.0, number=0, is_zero=True)
    assert replace(head, output=replace(head.output, lora=lora)).greatest(run, hidden) is None
