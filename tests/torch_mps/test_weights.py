"""Weights come into the GPU's memory once: one copy from the file's mapping, and nothing beside it."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from lanes.tiny_models import QWEN3, open_model, write_model
from mens_core import grid_weights
from mens_core.conformance.inputs import weight
from metal_shim.submissions import Submissions

LARGE = 3 << 20
"""Bytes, and more."""
SHARE = 0.3
"""Of a tensor's bytes that loading may take of the host for a moment: scales, pieces that are looked at."""


def loaded(lane, stored):
    """What torch copied and made for a matrix, and the host's peak."""
    tracemalloc.start()
    try:
        with Submissions() as torch_does:
            matrix = lane.load_matrix(stored)
        return matrix, torch_does, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("format_", ["f32", "f16", "bf16", "q8_0", "q4_k"])
def test_a_weight_is_copied_once_and_lies_nowhere_else(started, format_):
    lane = started().lane()
    rows = {"f32": 768, "f16": 1536, "bf16": 1536, "q8_0": 3072, "q4_k": 6144}[format_]
    stored = weight(format_, 5, rows, 1024)
    assert stored.data.nbytes >= LARGE
    loaded(lane, weight(format_, 5, 4, 1024))  # what is made once, at the first load
    matrix, torch_does, peak = loaded(lane, stored)
    assert torch_does.copied == torch_does.made == [stored.data.nbytes]
    assert matrix.buffer.numpy().tobytes() == bytes(stored.data)
    assert peak < SHARE * stored.data.nbytes, f"{peak} bytes of the host beside {stored.data.nbytes}"


@pytest.mark.parametrize("planted", ["copy", "look"])
def test_a_second_copy_is_seen(started, monkeypatch, planted):
    """Planted: the array laid out anew before it is copied; and a look at all of it at once."""
    lane = started().lane()
    stored = weight("bf16", 5, 1536, 1024)
    loaded(lane, weight("bf16", 5, 4, 1024))
    if planted == "copy":
        put = type(lane._memory).put
        monkeypatch.setattr(type(lane._memory), "put", lambda device, array: put(device, np.array(array)))
    else:
        monkeypatch.setattr(grid_weights, "_PIECE", 1 << 40)
    assert loaded(lane, stored)[2] > SHARE * stored.data.nbytes


def test_a_model_takes_its_weights_bytes_and_no_more(started, tmp_path):
    """Every tensor of a model, through the loader."""
    path = write_model(tmp_path, {**QWEN3, "num_hidden_layers": 2})
    ops = started().lane()
    with Submissions() as torch_does:
        model = open_model(path, ops).model
    held = {id(linear.weight): linear.weight.nbytes for linear in model.linears.values()}
    held[id(model.head.embedding.weight)] = model.head.embedding.weight.nbytes
    # Vectors are widened to float32 by a kernel; nothing but them is made twice.
    vectors = [nbytes for nbytes in torch_does.made if nbytes not in held.values()]
    assert sum(torch_does.made) - sum(vectors) == sum(held.values())
    assert sum(vectors) < 0.1 * sum(held.values())
