"""Training on the CUDA lane's operators, the CPU in a GPU's place."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from conformance.test_cuda_same_bits import CapturingShim
from grid_shim import build as shim
from grid_shim.device import ShimDevice
from grid_shim.training_shapes import attention
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from lanes.training import LAYER_TARGETS, a_config, finish, random_adapter, read, some_examples
from mens_core import grid_backward_ops, grid_training_ops
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.conformance.inputs import floats, put, weight
from mens_core.trainer import Trainer
from mens_torch_cuda.kernel_text import cuda_source
from mens_torch_cuda.lane import CudaOps
from mens_torch_cuda.packed import PackedMatrix
from mens_torch_cuda.training_lane import CudaTrainingOps

CONFIG = BY_FAMILY["qwen3"] | {"num_hidden_layers": 1, "torch_dtype": "bfloat16"}


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
    """300 rows are padded to 320; three blocks of a row have room for four scales."""
    matrix = lane().load_matrix(weight(format_, 9, 300, 96))
    assert isinstance(matrix, PackedMatrix)
    assert matrix.nbytes == 320 * each
    assert matrix.nbytes == sum(len(bytes(lane()._device.get(b, np.uint8, (-1,)))) for b in matrix.buffers)


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
