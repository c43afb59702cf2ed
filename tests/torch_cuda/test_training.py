"""Training on the CUDA lane's operators, the CPU in a GPU's place."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from conformance.test_cuda_same_bits import CapturingShim
from grid_shim import build as shim
from grid_shim import training_shapes as shapes
from grid_shim.check import results
from grid_shim.device import ShimDevice
from grid_shim.training_shapes import attention
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import LAYER_TARGETS, a_config, finish, random_adapter, read, some_examples
from mens_core import grid_backward_ops, grid_training_ops
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.conformance.inputs import floats, put, stored_float, weight
from mens_core.trainer import Trainer
from mens_core.training_ops import AdamW
from mens_torch_cuda import pairs, training_lane
from mens_torch_cuda.kernel_text import cuda_source
from mens_torch_cuda.lane import CudaOps
from mens_torch_cuda.packed import PackedMatrix
from mens_torch_cuda.tile_choice import BROAD_TILES, broad_tile
from mens_torch_cuda.training_lane import CudaTrainingOps

CONFIG = BY_FAMILY["qwen3"] | {"num_hidden_layers": 1, "torch_dtype": "bfloat16"}


def _linear(format_, rows, outputs, columns, ops):
    matrix = ops.load_matrix(weight(format_, 5, outputs, columns))
    x = put(ops, floats(6, rows, columns, span=2, binades=12))
    yield ops.to_host(ops.linear(x, matrix, name="y"))


def _norm(sample, rows, heads, width, ops):
    x = put(ops, floats(sample, rows, heads * width, span=2, binades=20))
    w = ops.load_vector(stored_float(floats(sample + 2, width)))
    yield ops.to_host(ops.head_norm(x, w, heads, 1e-6, name="norm"))


def _adapter(rows, columns, rank, ops):
    """Its products in both directions; copies and sums that are read together."""
    a, b = (
        ops.matrix(put(ops, floats(7 + i, *shape, span=1, binades=10)), name="m")
        for i, shape in enumerate(((rank, columns), (columns, rank)))
    )
    x = put(ops, floats(9, rows, columns, span=1, binades=10))
    u = ops.linear(x, a, name="u")
    yield ops.to_host(ops.linear(u, b, name="v"))
    yield ops.to_host(ops.linear_backward(x, b, name="du"))
    yield ops.to_host(ops.linear_backward(u, a, name="dx"))
    yield from ops.all_to_host([ops.copy(u), x, u])
    yield np.array(ops.sums_of_squares([x, u], ["x", "u"]))
    yield np.array(ops.sums_of_squares(ops.copies([x, u, x]), ["x", "u", "x again"]))
    yield ops.to_host(ops.add_product(x, u, b, 0.75, product="v", name="y"))
    yield ops.to_host(ops.add_product_backward(x, u, a, product="dv", name="dx"))


def _runs(starts, p, q, ops):
    """Gradients of examples, and the sums of some neighbours."""
    rows = starts[-1]
    a, b = (put(ops, floats(11 + i, rows, width, span=1, binades=10)) for i, width in enumerate((p, q)))
    made = ops.example_products(a, b, np.array(starts, np.int32), name="gradient")
    for first, end in ((0, 1), (0, 2), (2, 4), (4, 8), (0, 8)):
        yield ops.to_host(ops.sum_run(made[first:end], name="sum"))
    yield ops.to_host(ops.sum_run([made[1], made[0]], name="sum"))


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")
    built = shim.build(tmp_path_factory.mktemp("cuda"), cuda_source(), "cuda", optimise="-O0")

    def make(device=ShimDevice):
        there = device(built)
        return CudaTrainingOps(there, CudaOps(there, facts={}))

    return make


@pytest.fixture(scope="module")
def reference():
    training_lane = pytest.importorskip("mens_cpu_ref.training_lane")
    return training_lane.ReferenceTrainingOps


@pytest.mark.parametrize("format_", ["bf16", "f16", "q8_0"])
def test_packed_weights_go_backward_piece_by_piece(lane, reference, monkeypatch, format_):
    """A piece is a chunk of outputs here: the next one goes on where the last one ended."""
    monkeypatch.setattr(grid_backward_ops, "PIECE", 1)
    made = []
    for ops in (lane(), reference()):
        matrix = ops.load_matrix(weight(format_, 9, 300, 96))
        dy = put(ops, floats(10, 17, 300, span=2, binades=12))
        made.append(ops.to_host(ops.linear_backward(dy, matrix, name="dx")).tobytes())
    assert isinstance(lane().load_matrix(weight(format_, 9, 300, 96)), PackedMatrix)
    assert made[0] == made[1]


@pytest.mark.parametrize(("format_", "each"), [("bf16", 2 * 96), ("q8_0", 96 + 2 * 4)])
def test_a_packed_weight_tells_what_it_takes(lane, format_, each):
    """300 rows are padded to 384; three blocks of a row have room for four scales."""
    matrix = lane().load_matrix(weight(format_, 9, 300, 96))
    assert isinstance(matrix, PackedMatrix)
    assert matrix.nbytes == 384 * each
    assert matrix.nbytes == sum(len(bytes(lane()._device.get(b, np.uint8, (-1,)))) for b in matrix.buffers)


@pytest.mark.parametrize("tile", BROAD_TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize("direction", ["forth", "back"])
@pytest.mark.parametrize("format_", ["bf16", "q8_0"])
def test_every_broad_tile_gives_the_reference_s_bytes(lane, reference, monkeypatch, format_, direction, tile):
    """Whole chunks and a last one that is not; groups that are not full on either side."""
    taken = []
    monkeypatch.setattr(training_lane, "broad_tile", lambda *sizes: taken.append(sizes) or tile)
    make = shapes.linear_backward if direction == "back" else None
    for rows, outputs, columns in ((133, 300, 160), (17, 132, 392 if format_ == "bf16" else 416)):
        if make is None:
            case = partial(_linear, format_, rows, outputs, columns)
        else:
            case = partial(make, 5, format_, rows, outputs, columns)
        expected = results(case, reference())
        for order in (0, 1):
            found = results(case, lane(partial(ShimDevice, order=order)))
            assert found == expected, (rows, outputs, columns, order)
    assert bool(taken) is (direction == "back" or format_ == "bf16")


def test_a_broad_tile_is_the_one_whose_groups_come_out_even():
    sizes = [(4096, 4096), (512, 4096), (512, 6144), (8, 64)]
    assert [broad_tile(*size).name for size in sizes] == ["Most", "High", "Low", "Low"]
    assert all(tile.shared <= 99 << 10 for tile in BROAD_TILES), "more than every GPU that we take has"


CASES = {
    # More rows than a group has, ragged ends of rows, terms and columns; fewer groups than a GPU has at once.
    **{
        f"backward/{format_}/{rows}x{outputs}x{columns}": partial(
            shapes.linear_backward, 5, format_, rows, outputs, columns
        )
        for format_ in ("bf16", "f16", "q8_0")
        for rows, outputs, columns in ((17, 300, 96), (70, 20, 160))
    },
    **{
        f"forward/{format_}/{rows}x{outputs}x{columns}": partial(_linear, format_, rows, outputs, columns)
        for format_ in ("bf16", "q8_0")
        for rows, outputs, columns in ((17, 132, 160), (70, 7, 64))
    },
    **{f"adapter/{rank}": partial(_adapter, 70, 260, rank) for rank in (5, 8, 12, 16, 20)},
    "runs": partial(_runs, (0, 3, 4, 130, 130, 140, 141, 150, 153), 3, 20),
    **{
        f"products/{p}x{q}": partial(shapes.example_products, 3, (0, 257, 9, 128), p, q)
        for p, q in ((8, 132), (260, 12), (3, 7), (9, 4100), (8, 8200))
    },
    **{
        f"{name}/{heads}x{width}": partial(case, 9, 17, heads, width)
        for name, case in (("norm", _norm), ("norm_backward", shapes.norm_backward))
        for heads, width in ((3, 128), (1, 300), (4, 96))
    },
    "attention": partial(shapes.attention, 11, (130, 0, 3), 4, 2, 64, None, None),
    "attention/window": partial(shapes.attention, 11, (129, 17), 2, 1, 32, 40, None),
    "attention/softcap": partial(shapes.attention, 11, (70,), 2, 2, 132, None, 5.0),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_training_give_the_reference_s_bytes(lane, reference, name):
    """In both orders of the threads of a group."""
    expected = results(CASES[name], reference())
    for order in (0, 1):
        assert results(CASES[name], lane(partial(ShimDevice, order=order))) == expected


@pytest.mark.parametrize("case", ["attention", "attention/window"])
def test_heads_whose_pairs_do_not_fit_take_turns(lane, reference, monkeypatch, case):
    """One head at a time, and none at all: then the grid kernels."""
    expected = results(CASES[case], reference())
    rows, longest = (133, 132) if case == "attention" else (146, 132)
    for most in (2 * 4 * rows * longest, 1):
        monkeypatch.setattr(pairs, "MOST_BYTES", most)
        assert results(CASES[case], lane()) == expected


def test_more_rows_of_logits_at_once_change_nothing(lane, reference, tmp_path, monkeypatch):
    """Two chunks of an example's logits in one slice, with an update on the output matrix, and one by one."""
    path, made = write_model(tmp_path, CONFIG, seed=3), []
    examples = read(some_examples((300, 2)))
    for ops, rows in ((lane(), 1024), (reference(), 128)):
        monkeypatch.setattr(ops, "logit_rows_at_once", rows)
        trainer = Trainer(open_model(path, ops).model, ops, a_config(["lm_head"], max_gradient_norm=0.5))
        made.append(finish(trainer.train_step(examples)))
    assert made[0] == made[1]


def test_a_run_gives_the_reference_s_adapter(lane, reference, tmp_path):
    path = write_model(tmp_path, CONFIG, seed=3)
    config, outcomes = a_config(dropout=0.25, max_gradient_norm=0.5), []
    for ops in (lane(), reference()):
        trainer = Trainer(open_model(path, ops).model, ops, config)
        outcomes.append([finish(trainer.train_step(read(some_examples((9, 2), seed=i)))) for i in range(3)])
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(outcomes[0][-1].loss)


def test_an_adapter_is_served_from_recordings(lane, reference, tmp_path):
    """Loaded by a lane that serves, adapted by one that trains, as the backend does it; step after step."""
    path = write_model(tmp_path, CONFIG, seed=3)

    def decode(serving, adapting):
        model = open_model(path, serving).model
        plan = Trainer.plan_for(model, a_config((*LAYER_TARGETS, "embed_tokens")))
        tensors = to_lane(adapting, random_adapter(plan.shapes))
        model = dataclasses.replace(model, ops=adapting).adapted(make_loras(adapting, plan, tensors))
        cache, sequences, made = model.new_cache(4), Sequences(), []
        for rows in ([(0, [*range(90), *range(36)])], *([(0, [i])] for i in range(5))):
            result = model.forward(sequences.step(rows), cache)
            made.append((adapting.to_host(result.logits).tobytes(), result.faults))
        return made

    adapting = lane(CapturingShim)
    device = adapting._device
    serving = CudaOps(device, facts={})
    found = decode(serving, CudaTrainingOps(device, serving))
    expected = reference()
    assert found == decode(expected, expected)
    assert device.replays >= 3


def test_an_operator_takes_no_more_than_the_plan_says(lane, monkeypatch):
    """Attention's backward takes most beside its results; index arrays are not counted."""
    monkeypatch.setattr(grid_training_ops, "PIECE", 0)
    ops, lengths, heads, kv_heads, head_dim = lane(), (3, 130), 4, 2, 64
    taken = []
    empty = ops._device.empty
    ops._device.empty = lambda nbytes: (taken.append(nbytes), empty(nbytes))[1]
    narrow, wide = kv_heads * head_dim, heads * head_dim
    rows = sum(lengths)
    cases = attention(9, lengths, heads, kv_heads, head_dim, None, None, ops)
    for _ in range(3):
        next(cases)  # the forward and what it saves
    taken.clear()
    list(cases)
    beside = sum(taken) - 4 * rows * (wide + 2 * narrow)
    said = ops.workspace_bytes(lengths=lengths, widest=wide, kv_heads=kv_heads, head_dim=head_dim)
    assert 0.75 * said < beside <= said


def test_operators_of_many_name_the_tensor_whose_value_is_not_finite(lane, reference):
    """Bytes and names as one by one, whether the tensors lie together already or not."""
    by = AdamW(0.1, 0.9, 0.1, 0.99, 0.01, 1e-8, 1.0, 0.1, 0.01)
    names, shapes_ = ["a", "b", "c"], ((3, 5), (2, 40), (7, 8))
    made = []
    for ops in (lane(), reference()):
        values = [put(ops, floats(5 + i, *shape, span=1, binades=4)) for i, shape in enumerate(shapes_)]
        values[1] = put(ops, np.full(shapes_[1], 3e38, np.float32))
        for _ in range(2):
            values = ops.copies(values)
            scaled = ops.scale_all(ops.copies(values), 2.0, names)
            nothing = ops.scale_all(ops.copies(values), 0.0, names)
            ops.adamw_all(values, scaled, ops.copies(values), nothing, by, names)
            every = (*values[::2], *scaled[::2])
            made.append(([x.tobytes() for x in ops.all_to_host(every)], {f.name for f in ops.take_faults()}))
    assert made[:2] == made[2:]
    assert made[0][1] == {"b"}
