"""What the operators over grid kernels ask of a device: few reads and uploads; faults by operator and row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lanes.batches import Sequences
from lanes.tiny_models import QWEN3, open_model, write_model
from mens_core.grid_device import Launch
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridOps
from mens_core.rotary_blocks import make_angles
from vox_plugin_api.backend import BackendError


class CountingDevice:
    """Memory that is plain bytes, and kernels that do nothing but what a test plants."""

    def __init__(self):
        self.calls = Counter()
        self.launched = []
        self.room = None
        """Buffers that may still be made; None: any number."""

    def put(self, array):
        self.calls["put"] += 1
        return np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)

    def zeros(self, nbytes):
        self.calls["zeros"] += 1
        return np.zeros(nbytes, np.uint8)

    def empty(self, nbytes):
        self.calls["empty"] += 1
        if self.room is not None:
            self.room -= 1
            if self.room < 0:
                raise BackendError("out-of-device-memory", "no room")
        return np.zeros(nbytes, np.uint8)

    def part(self, buffer, first, nbytes):
        assert first % 16 == 0
        return buffer[first : first + nbytes]

    def get(self, buffer, dtype, shape):
        self.calls["get"] += 1
        return buffer.view(dtype).reshape(shape).copy()

    def launch(self, launch: Launch):
        self.launched.append(launch)


def stepped(tmp_path, layers):
    """A model of so many layers after its first step, and what the second step asks for."""
    device = CountingDevice()
    path = write_model(tmp_path / str(layers), {**QWEN3, "num_hidden_layers": layers})
    model = open_model(path, GridOps(device, make_angles)).model
    cache, sequences = model.new_cache(4), Sequences()
    model.forward(sequences.step([(0, [1, 2, 3]), (1, [4])]), cache)
    device.calls.clear()
    device.launched.clear()
    model.forward(sequences.step([(0, [5]), (1, [6])]), cache)
    return device


def test_reads_and_uploads_of_a_step_do_not_grow_with_the_layers(tmp_path):
    few, many = (stepped(tmp_path, layers) for layers in (1, 6))
    assert len(many.launched) > 3 * len(few.launched)
    for call in ("get", "put", "zeros"):
        assert many.calls[call] == few.calls[call], call
    # The faults of the layers and those of the head.
    assert many.calls["get"] == 2


def test_indices_that_changed_in_place_are_copied_again():
    device = CountingDevice()
    ops = GridOps(device, make_angles)
    ids = np.array([1, 2], np.int32)
    before = ops._ints(ids)
    assert ops._ints(ids.copy()) is before
    ids[0] = 7
    assert list(ops._ints(ids).view(np.int32)) == [7, 2]


def test_indices_are_let_go_at_the_end_of_a_step():
    ops = GridOps(CountingDevice(), make_angles)
    before = ops._ints(np.array([1, 2], np.int32))
    ops.take_faults()
    assert ops._ints(np.array([1, 2], np.int32)) is not before


def test_flags_come_back_by_operator_and_row_in_the_order_of_the_calls():
    device = CountingDevice()
    flags = RowFlags(device)
    reserved = {}
    for name, rows in (("a", 3), ("b", 5000), ("c", 1), ("d", 0), ("e", 3000), ("f", 9000)):
        reserved[name] = flags.reserve(name, rows)
        assert reserved[name].size == 4 * rows
        assert not reserved[name].any()
    for name, rows in (("a", [2]), ("b", [0, 4999]), ("e", [2999]), ("f", [8999])):
        reserved[name].view(np.int32)[rows] = 1
    assert [(f.name, f.rows) for f in flags.take()] == [
        ("a", (2,)), ("b", (0, 4999)), ("e", (2999,)), ("f", (8999,)),
    ]  # fmt: skip
    assert flags.take() == []


def test_a_step_that_ran_out_of_memory_leaves_no_faults_to_the_next(tmp_path):
    device = CountingDevice()
    model = open_model(write_model(tmp_path, QWEN3), GridOps(device, make_angles)).model
    cache, sequences = model.new_cache(4), Sequences()
    model.forward(sequences.step([(0, [1, 2, 3])]), cache)
    device.launched.clear()
    device.room = 6
    with pytest.raises(BackendError, match="no room"):
        model.forward(sequences.step([(0, [4, 5, 6])]), cache)
    device.room = None
    # The flags of the operator that had run are the last buffer of its launch.
    device.launched[0].buffers[-1].view(np.int32)[2] = 1
    assert model.forward(sequences.step([(0, [7])]), cache).faults == ()
