"""SIMD-group matrices: a probe tells every order of adding apart, and only one of them is ever used."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations

import numpy as np
import pytest

from grid_shim.device import LaunchError
from lanes.tiny_models import QWEN3, write_model
from mens_core.conformance.inputs import floats, put, weight
from mens_torch_mps import matrices, start
from mens_torch_mps.kernel_text import metal_matrix_source
from mens_torch_mps.lane import _MATRIX_ROWS
from mens_torch_mps.matrix_orders import CANONICAL, ORDERS, UNKNOWN, VECTORS, classify, expected
from metal_shim.stand_in import CpuStandIn
from torch_mps.test_planted import is_caught, swapped
from torch_mps.test_same_bits import run

NUMBERS = {name: number for number, name in enumerate(ORDERS)}
"""As grid_shim/matrices.cpp has them."""
NOT_LISTED = len(ORDERS)
WIDE = {"exact pairs, ascending", "exact fours, ascending", "exact, rounded once", "aligned and cut off",
        "exact products, then the sum"}  # fmt: skip


def counted(started):
    """How often each kernel was launched, from now on."""
    launched = []

    def change(name, arguments):
        launched.append(name)
        return arguments

    started.runtime.change = change
    return launched


# --- the probe -----------------------------------------------------------------------------------


def test_no_two_orders_give_the_same_bits():
    assert len(ORDERS) >= 16
    for one, other in combinations(ORDERS, 2):
        assert expected(one) != expected(other), (one, other)


@pytest.fixture(scope="module")
def any_hardware(started):
    """A lane's GPU whose matrices can be made to add in another order."""
    return started()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_is_told_and_only_the_rules_own_is_used(any_hardware, order):
    """By hardware that does it, in the machine's own arithmetic; the names are from exact rationals."""
    if order in WIDE and np.finfo(np.longdouble).nmant < 63:
        pytest.skip("this machine's long double is too narrow to play exact sums")
    any_hardware.runtime.matrices = NUMBERS[order]
    found = matrices.probe(any_hardware.device, any_hardware.simd_width)
    assert (found.order, found.is_usable) == (order, order == CANONICAL)
    says = "used" if order == CANONICAL else "not used, scalar tiles instead"
    assert found.described() == f"{says}: {order}"


def test_what_is_on_no_list_is_unknown_and_not_used(started):
    ready = started(matrices=NOT_LISTED)
    assert (ready.matrices.order, ready.matrices.is_usable) == (UNKNOWN, False)
    said = f"not used, scalar tiles instead: {UNKNOWN}"
    assert ready.lane().facts()["simdgroup_matrices"] == said


def test_an_element_that_adds_otherwise_makes_the_whole_unknown():
    rows = [[bits] * 64 for bits in expected(CANONICAL)]
    assert classify(rows) == CANONICAL
    other = expected("fma, descending")
    vector = next(i for i in range(len(VECTORS)) if other[i] != rows[i][0])
    rows[vector][63] = other[vector]
    assert classify(rows) == UNKNOWN


def test_an_order_is_not_enough_where_tiles_differ(started, monkeypatch):
    """Planted: a tile that forgets the fold of its chunks, though its matrices add as they should."""
    right = metal_matrix_source()
    wrong = right.replace(
        "y[i] = chunk_folded(chunk == 0, y[i], sums", "y[i] = chunk_folded(true, y[i], sums"
    )
    assert wrong != right
    monkeypatch.setattr(start, "metal_matrix_source", lambda: wrong)
    found = started().matrices
    assert (found.order, found.is_usable) == (f"{CANONICAL}, but tiles of f32 differ", False)


@pytest.mark.parametrize("simd", [16, 64])
def test_another_simd_width_has_no_known_matrices(started, simd):
    found = started(simd=simd).matrices
    assert (found.order, found.is_usable) == (f"SIMD groups of {simd} threads", False)


def test_a_compiler_without_matrices_keeps_nothing_from_starting(started, library, tmp_path):
    from mens_cpu_ref.lane import CpuOps

    ready = started(matrices=None)
    assert ready.facts["simdgroup_matrices"].startswith("not used, scalar tiles instead: not compiled")
    path = write_model(tmp_path, {**QWEN3, "num_hidden_layers": 1})
    assert run(path, ready.lane()) == run(path, CpuOps(library.kernels))


# --- tiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["f32", "f16", "bf16"])
def test_tiles_give_the_reference_s_bytes(started, reference, format_):
    """Rows and outputs that are not whole tiles, chunks that are not whole, one side and many."""
    ready = started(order=1)
    lane, launched = ready.lane(), counted(ready)
    for rows, outputs, columns in ((_MATRIX_ROWS, 1, 8), (33, 45, 264), (40, 32, 128)):
        stored, x = weight(format_, 5, outputs, columns), floats(6, rows, columns, span=2, binades=9)
        made = []
        for ops in (lane, reference()):
            out = ops.linear(put(ops, x), ops.load_matrix(stored), name="linear")
            made.append(np.asarray(ops.to_host(out)).tobytes())
        assert made[0] == made[1], (rows, outputs, columns)
    assert launched.count(f"vox_matrices_{format_}") == 3


@pytest.mark.parametrize("order", [None, "fma, descending", CANONICAL])
def test_a_model_gives_the_same_bytes_with_matrices_and_without(started, library, tmp_path, order):
    from mens_cpu_ref.lane import CpuOps

    ready = started(matrices=None if order is None else NUMBERS[order])
    launched = counted(ready)
    path = write_model(tmp_path, {**QWEN3, "num_hidden_layers": 1})
    assert run(path, ready.lane()) == run(path, CpuOps(library.kernels))
    assert any(name.startswith("vox_matrices_") for name in launched) == (order == CANONICAL)


def test_what_is_not_whole_sides_or_not_finite(started, reference):
    ready = started()
    lane, launched = ready.lane(), counted(ready)
    x = floats(3, 12, 100)
    matrix, rows = lane.load_matrix(weight("f32", 4, 40, 100)), put(lane, x)
    lane.linear(rows, matrix, name="linear")
    assert "vox_matrices_f32" not in launched
    x = floats(3, 12, 256)
    x[7] = np.ldexp(np.float32(1), 127)
    matrix, rows = lane.load_matrix(weight("f32", 4, 40, 256)), put(lane, x)
    lane.take_faults()
    lane.linear(rows, matrix, name="linear")
    assert launched[-1] == "vox_matrices_f32"
    assert [(fault.name, fault.rows) for fault in lane.take_faults()] == [("linear", (7,))]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("VOX_BARRIER();  /* the sums of a chunk are there */", "", "no barrier|before it was written"),
        ("if (at >= args.width) return;", "if (vox_simd_lane == 3) return;", "meet at a shuffle"),
        (
            "(down * kMatrixTile + over), kMatrixTile)",
            "(down * kMatrixTile + over), 40)",
            "bounds|no barrier",
        ),
    ],
)
def test_a_mistake_in_the_tiles_is_told(started, monkeypatch, old, new, said):
    """Planted: a missing barrier, a thread that does not come, a stride that is another's."""
    right = metal_matrix_source()
    assert old in right
    monkeypatch.setattr(start, "metal_matrix_source", lambda: right.replace(old, new))
    with pytest.raises(LaunchError, match=said):
        started()


def test_arguments_of_the_tiles_in_another_order(started, reference):
    ready = started()
    stored, x = weight("f32", 5, 40, 128), floats(6, 40, 128)

    def case(ops):
        yield ops.to_host(ops.linear(put(ops, x), ops.load_matrix(stored), name="linear"))

    lane = ready.lane()
    assert not is_caught(case, lane, reference)
    ready.runtime.change = swapped("vox_matrices_f32", 0, 1)
    assert is_caught(case, lane, reference)


def test_a_buffer_of_the_tiles_one_element_short(started):
    """Each in turn, when the probe compares tiles; but for the flags, which nobody writes there."""
    for number in range(3):

        def change(name, arguments, number=number):
            if name != "vox_matrices_f16":
                return arguments
            element = 2 if number == 1 else 4
            return (*arguments[:number], arguments[number][:-element], *arguments[number + 1 :])

        with pytest.raises(LaunchError, match=rf"vox_matrices_f16, group .* of buffer {number}, which has"):
            started(change=change)


# --- what is remembered --------------------------------------------------------------------------------


FACTS = {"device": "Apple M9", "os_build": "99A1", "torch": "2.13.0"}


@pytest.fixture
def probes(monkeypatch):
    """How often the probe ran."""
    ran = []

    def probe(device, width):
        ran.append(width)
        return matrices.probe(device, width)

    monkeypatch.setattr(start, "probe", probe)
    return ran


def start_here(tmp_path, facts=FACTS, **stand_in):
    return start.start_on(CpuStandIn(**stand_in), facts, environment={"XDG_CACHE_HOME": str(tmp_path)})


@pytest.mark.parametrize("order", [CANONICAL, "fma in two halves"])
def test_a_chip_and_system_build_are_probed_once(started, probes, tmp_path, order):
    number = NUMBERS[order]
    first, again = (start_here(tmp_path, matrices=number).matrices for _ in range(2))
    assert len(probes) == 1
    assert again == dataclasses.replace(first, is_remembered=True)
    assert again.described().endswith(f"{order} (remembered)")
    for other in ({"os_build": "99A2"}, {"device": "Apple M8"}, {"torch": "2.14.0"}):
        start_here(tmp_path, {**FACTS, **other}, matrices=number)
    assert len(probes) == 4
    # Nothing names this machine: it is probed at every start.
    start_here(tmp_path, {**FACTS, "os_build": ""}, matrices=number)
    start_here(tmp_path, {**FACTS, "os_build": ""}, matrices=number)
    assert len(probes) == 6


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"order": 3, "is_usable": true}', '{"order": "unknown", "is_usable": true}']
)
def test_a_memory_that_is_no_finding_is_not_believed(started, probes, tmp_path, content):
    start_here(tmp_path, matrices=1)
    (kept,) = (tmp_path / "mens-torch-mps").iterdir()
    assert json.loads(kept.read_text()) == {"order": "fma, descending", "is_usable": False}
    kept.write_text(content)
    assert start_here(tmp_path, matrices=1).matrices.order == "fma, descending"
    assert len(probes) == 2


def test_a_folder_that_can_t_be_written_costs_a_probe_and_nothing_else(started, probes, tmp_path):
    (tmp_path / "mens-torch-mps").write_text("in the way")
    assert all(start_here(tmp_path).matrices.is_usable for _ in range(2))
    assert len(probes) == 2
