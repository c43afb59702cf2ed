"""The lane's own kernels and its recordings, run on the CPU in a GPU's place, beside the CPU lane.

This says nothing of NVIDIA's compiler and hardware: `tests/gpu/check_lane.py` does.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest

from gpu.shape_model import QWEN3_06B, write_shape
from grid_shim.device import ShimDevice
from grid_shim.shapes import SHAPES
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from mens_core.conformance.cases import CASES
from mens_core.conformance.inputs import floats, put, weight
from mens_core.kernel_source import GROUP
from mens_torch_cuda import lane
from mens_torch_cuda.foresight import Pace
from mens_torch_cuda.kernel_text import cuda_source
from mens_torch_cuda.lane import CudaOps
from mens_torch_cuda.nodes import UnrecordableError
from mens_torch_cuda.packed import PackedMatrix
from mens_torch_cuda.replay import MOST_ROWS


class CapturingShim(ShimDevice):
    """Launches can be recorded and made later, as often as wanted; nothing runs while recording."""

    def __init__(self, library):
        super().__init__(library)
        self.recorded = None
        self.captures = 0
        self.replays = 0
        self.pieces = 0
        self.waits = 0
        self.marks = 0
        self.recorded_kernels = []

    def capture(self, call, side=0, piece=0):
        self.recorded, self.piece = [], piece
        self.logs = [self.recorded]
        self.captures += 1
        try:
            call()
        finally:
            self.recorded = None

        def replayed(log, is_first):
            self.replays += is_first
            self.pieces += 1
            for step in log:
                step()

        return tuple(partial(replayed, log, log is self.logs[0]) for log in self.logs)

    def launch(self, launch):
        if self.recorded is None:
            super().launch(launch)
        else:
            self.recorded_kernels.append(launch.kernel)
            if self.piece and len(self.recorded) >= self.piece:
                self.recorded = []
                self.logs.append(self.recorded)
            self.recorded.append(lambda: ShimDevice.launch(self, launch))

    def zeros(self, nbytes):
        if self.recorded is None:
            return super().zeros(nbytes)
        buffer = self.empty(nbytes)
        self.recorded.append(lambda: buffer.fill(0))
        return buffer

    def put(self, array):
        if self.recorded is not None:
            raise UnrecordableError("a copy from the host")
        return super().put(array)

    def get(self, buffer, dtype, shape):
        if self.recorded is not None:
            raise UnrecordableError("a copy to the host")
        return super().get(buffer, dtype, shape)

    def fetch(self, buffer, nbytes):
        out = np.zeros(nbytes // 4, np.int32)
        self.recorded.append(lambda: np.copyto(out, buffer[:nbytes].view(np.int32)))
        return out

    def mark(self, side):
        self.marks += 1

    def wait(self, side):
        self.waits += 1

    def write(self, target, array):
        target[:] = np.frombuffer(array.tobytes(), np.uint8)


@pytest.fixture
def built(cuda_library):
    return cuda_library


@pytest.fixture(scope="module")
def reference(library):
    from mens_cpu_ref.reference_lane import ReferenceOps

    return ReferenceOps


def results(case, ops):
    ops.take_faults()
    arrays = [np.asarray(array).tobytes() for array in case(ops)]
    return [*arrays, *((fault.name, fault.rows) for fault in ops.take_faults())]


@pytest.mark.parametrize("name", [*CASES, *SHAPES])
def test_every_operator_gives_the_reference_s_bytes(built, reference, name):
    case = {**CASES, **SHAPES}[name]
    assert results(case, CudaOps(ShimDevice(built), facts={})) == results(case, reference())


@pytest.mark.parametrize("format_", ["f16", "bf16", "q8_0", "q5_0", "q4_0"])
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 17])
@pytest.mark.parametrize(("outputs", "columns"), [(1, 32), (16, 128), (17, 160), (33, 1024), (40, 1312)])
def test_packed_weights_give_the_reference_s_bytes(built, reference, format_, rows, outputs, columns):
    """Groups that are not full, chunks that are not whole, more rounds than one."""
    same_packed(built, reference, format_, rows, outputs, columns)


@pytest.mark.parametrize("format_", ["q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("outputs", "columns"), [(17, 256), (33, 2304)])
def test_packed_super_blocks_give_the_reference_s_bytes(built, reference, format_, rows, outputs, columns):
    same_packed(built, reference, format_, rows, outputs, columns)


def same_packed(built, reference, format_, rows, outputs, columns):
    def case(ops):
        matrix = ops.load_matrix(weight(format_, 5, outputs, columns))
        x = put(ops, floats(6, rows, columns, span=2, binades=9))
        yield ops.to_host(ops.linear(x, matrix, name="linear"))
        ids = np.array([outputs - 1, 0], np.int32)
        yield ops.to_host(ops.embed(matrix, ids, 1.5, name="embed"))

    lane = CudaOps(ShimDevice(built), facts={})
    assert isinstance(lane.load_matrix(weight(format_, 5, outputs, columns)), PackedMatrix)
    assert results(case, lane) == results(case, reference())


def steps():
    """Prompts that come and go, over a border of two blocks, and a batch that is large again."""
    sequences = Sequences()
    yield sequences.step([(0, [i % 97 for i in range(1, 120)]), (1, [5, 6, 7])])
    for i in range(14):
        yield sequences.step([(0, [i]), (1, [2 * i + 1])])
    yield sequences.step([(2, [9] * (MOST_ROWS + 1))])
    for i in range(3):
        yield sequences.step([(2, [i]), (0, [3])])
        yield sequences.step([(1, [i])])


def run(path, ops):
    model = open_model(path, ops).model
    made = []
    for cache in (model.new_cache(8), model.new_cache(8)):
        for batch in steps():
            result = model.forward(batch, cache)
            made.append((ops.to_host(result.logits).tobytes(), result.faults))
    return made


@pytest.mark.parametrize("family", BY_FAMILY)
def test_recorded_steps_give_the_cpu_lane_s_bytes(built, library, family, tmp_path):
    from mens_cpu_ref.lane import CpuOps

    path = write_model(tmp_path, BY_FAMILY[family])
    device = CapturingShim(built)
    assert run(path, CudaOps(device, facts={})) == run(path, CpuOps(library.kernels))
    # Two shapes of step, recorded for each cache, and again when the rotary tables grew.
    assert 4 <= device.captures <= 10
    assert device.replays >= 2 * 14


SMALL = {
    **QWEN3_06B,
    "hidden_size": 160,
    "intermediate_size": 2208,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 97,
}
"""Chunks, groups and turns of slices that are not full."""


@pytest.mark.parametrize("weight_format", ["bf16", "f16", "q8_0"])
def test_joined_kernels_give_the_cpu_lane_s_bytes(built, library, weight_format, tmp_path):
    """One row a step: norms, residuals, gates and codes inside the products; a second KV block is reached."""
    from mens_cpu_ref.lane import CpuOps

    path = write_shape(tmp_path, weight_format, layers=2, shape=SMALL)

    def decode(ops):
        model = open_model(path, ops).model
        cache, sequences = model.new_cache(6), Sequences()
        made = []
        prompts = [[(0, [i % 97 for i in range(125)])], [(1, [5] * 20)], [(2, [7] * 40), (3, [8])]]
        ones = [[(0, [i])] for i in range(7)]
        for rows in (*prompts, *ones, [(1, [3]), (0, [4])], [(1, [4]), (0, [5])]):
            result = model.forward(sequences.step(rows), cache)
            made.append((ops.to_host(result.logits).tobytes(), list(ops.argmax(result.logits))))
        return made

    device = CapturingShim(built)
    assert decode(CudaOps(device, facts={})) == decode(CpuOps(library.kernels))
    # One row over one block, one row over two and what may come after it, two rows. The highest token
    # never comes: two steps are begun for nothing.
    assert (device.captures, device.replays, device.marks) == (4, 8, 8)
    kernels = Counter(device.recorded_kernels)
    assert kernels[f"vox_step_{weight_format}_8"] == 3 * 4
    normed = (kernels[f"vox_step_normed_{weight_format}_{outputs}"] for outputs in (16, 32))
    assert sum(normed) == 3 * 5
    assert kernels["vox_step_one_row"] == 3 * 2
    assert kernels["vox_step_some_rows_2_6"] == 2
    # Of two rows: norms and gates by themselves, products of whole chunks of columns by tiles of few rows.
    assert (kernels["vox_step_between_norm"], kernels["vox_step_between_gate"]) == (2 * 2 + 1, 2)
    if weight_format == "q8_0":
        assert (kernels["vox_step_tiles_q8_0_16"], kernels["vox_step_tiles_q8_0_16x32"]) == (7, 2)
        apart = ("vox_norm", "vox_add", "vox_silu", "vox_rope")
        assert not any(kernel.startswith(apart) for kernel in kernels)


class WarpgroupShim(ShimDevice):
    has_warpgroups = True


@pytest.mark.parametrize(
    ("shim", "tile"),
    [(ShimDevice, "32x32by2"), (WarpgroupShim, "WarpgroupHalf")],
    ids=["warps", "warpgroups"],
)
def test_many_rows_of_whole_chunks_give_the_cpu_lane_s_bytes(built, library, shim, tile, tmp_path):
    """What norms, gates and attention make, as codes in the order of the products; rows fill no tile."""
    from mens_cpu_ref.lane import CpuOps

    shape = {**SMALL, "hidden_size": 256, "intermediate_size": 384}
    path = write_shape(tmp_path, "q8_0", layers=1, shape=shape)
    prompts = Sequences().step([(0, [i % 97 for i in range(71)]), (1, [5] * 10)])

    def logits(ops):
        model = open_model(path, ops).model
        return ops.to_host(model.forward(prompts, model.new_cache(2)).logits).tobytes()

    launched: list[str] = []
    device = shim(built, watch=lambda launch, _: launched.append(launch.kernel))
    assert logits(CudaOps(device, facts={})) == logits(CpuOps(library.kernels))
    kernels = Counter(launched)
    assert kernels[f"vox_step_tiles_q8_0_{tile}"] == 4
    # Two norms of rows and the last one, and a gate; attention makes its output's codes by itself.
    assert (kernels["vox_step_between_norm"], kernels["vox_step_between_gate"]) == (3, 1)
    assert not any(kernel.startswith("vox_quantise") for kernel in launched)


def one_by_one(ops, path, prompt, tokens):
    """Logits of steps of one row."""
    model = open_model(path, ops).model
    cache, sequences = model.new_cache(4), Sequences()
    rows = [prompt, *([token] for token in tokens)]
    return [ops.to_host(model.forward(sequences.step([(0, row)]), cache).logits).tobytes() for row in rows]


@pytest.mark.parametrize("weight_format", ["bf16", "q8_0"])
def test_rows_too_long_for_a_norm_in_front_give_the_cpu_lane_s_bytes(built, library, weight_format, tmp_path):
    """The norm stands by itself then: a gate's product reads the row, chunks of both weights in one turn."""
    from mens_cpu_ref.lane import CpuOps

    shape = {**SMALL, "hidden_size": 49 * 128, "intermediate_size": 64, "num_attention_heads": 2}
    path = write_shape(tmp_path, weight_format, layers=1, shape={**shape, "num_key_value_heads": 1})
    prompt, tokens = [1, 2, 3], [4, 5, 6]
    device = CapturingShim(built)
    found = one_by_one(CudaOps(device, facts={}), path, prompt, tokens)
    assert device.replays and found == one_by_one(CpuOps(library.kernels), path, prompt, tokens)
    assert not any(kernel.startswith("vox_step_normed") for kernel in device.recorded_kernels)


def test_steps_begun_ahead_give_the_cpu_lane_s_bytes(built, library, tmp_path):
    """The highest token is taken, over the border of a block; in between another, and another sequence."""
    from mens_cpu_ref.lane import CpuOps

    path = write_shape(tmp_path, "bf16", layers=1, shape=SMALL)

    def decode(ops):
        model = open_model(path, ops).model
        cache, sequences = model.new_cache(5), Sequences()
        made, token = [], 0

        def step(sequence, tokens):
            result = model.forward(sequences.step([(sequence, tokens)]), cache)
            highest = int(ops.argmax(result.logits)[0])
            made.append((ops.to_host(result.logits).tobytes(), highest))
            return highest

        token = step(0, [i % 97 for i in range(120)])
        for i in range(16):
            token = step(0, [(token + 1) % 97 if i == 5 else token])
            if i == 13:
                step(1, [5, 6, 7])
        return made

    device = CapturingShim(built)
    assert decode(CudaOps(device, facts={})) == decode(CpuOps(library.kernels))
    # Of 16 steps, the first of each width of tables is run as it is found. Begun for nothing: one before
    # another token came, one before another sequence, and the last.
    assert (device.captures, device.replays) == (4, 14 + 3)


def test_steps_of_several_rows_begun_ahead_give_the_cpu_lane_s_bytes(built, library, tmp_path, monkeypatch):
    """Five sequences with their highest tokens, over a border of blocks. In between another token, a prompt
    beside them, and one that has ended: what was begun is a piece, and it was for nothing."""
    from mens_cpu_ref.lane import CpuOps

    monkeypatch.setattr(lane, "_PIECE", 3)
    monkeypatch.setattr(lane, "_TIMES_AHEAD", 1)
    monkeypatch.setattr(Pace, "pieces", lambda pace, count: 2)
    path = write_shape(tmp_path, "q8_0", layers=1, shape=SMALL)

    def decode(ops):
        model = open_model(path, ops).model
        cache, sequences, made = model.new_cache(14), Sequences(), []

        def step(rows):
            result = model.forward(sequences.step(rows), cache)
            highest = [int(token) for token in ops.argmax(result.logits)]
            made.append((ops.to_host(result.logits).tobytes(), result.faults, highest))
            return highest

        tokens = step([(n, [(7 * n + i) % 97 for i in range(110 + n)]) for n in range(5)])
        for i in range(36):
            rows = [(n, [token]) for n, token in enumerate(tokens)]
            if i == 8:
                rows[3] = (3, [(tokens[3] + 1) % 97])
            if i == 24:
                step([*rows, (9, [1, 2])])
                tokens = [5] * 5
                continue
            tokens = step(rows[: 4 if i >= 30 else 5])
        return made

    device = CapturingShim(built)
    assert decode(CudaOps(device, facts={})) == decode(CpuOps(library.kernels))
    # 36 steps of the rows; the first of each shape and the one with a prompt are run as they are found. Two
    # recordings of each of three shapes; of four steps, two pieces were begun for nothing.
    assert (device.captures, device.replays) == (6, 32 + 4)
    assert len(device.logs) > 4
    assert device.pieces == 32 * len(device.logs) + 4 * 2


def test_rows_begun_ahead_go_on_in_blocks_that_were_found_in_between(built, library, tmp_path, monkeypatch):
    """Two of three sequences come to another block, each while steps are begun ahead of it."""
    from mens_cpu_ref.lane import CpuOps

    monkeypatch.setattr(lane, "_PIECE", 4)
    monkeypatch.setattr(lane, "_TIMES_AHEAD", 1)
    monkeypatch.setattr(Pace, "pieces", lambda pace, count: 3)
    path = write_shape(tmp_path, "bf16", layers=1, shape=SMALL)

    def decode(ops):
        model = open_model(path, ops).model
        cache, sequences, made = model.new_cache(6), Sequences(ahead=1), []
        rows = [(n, [(5 * n + i) % 97 for i in range(count)]) for n, count in enumerate((140, 120, 119))]
        for _ in range(15):
            result = model.forward(sequences.step(rows), cache)
            tokens = ops.argmax(result.logits)
            made.append((ops.to_host(result.logits).tobytes(), tokens.tolist()))
            rows = [(n, [int(token)]) for n, token in enumerate(tokens)]
        return made

    device = CapturingShim(built)
    assert decode(CudaOps(device, facts={})) == decode(CpuOps(library.kernels))
    # The first step of each shape is run as it is found; only the last that was begun was for nothing.
    assert (device.captures, device.replays) == (2, 13 + 1)


def test_the_second_recording_of_several_rows_is_made_when_it_would_have_been_used_often(built, tmp_path):
    device = CapturingShim(built)
    ops = CudaOps(device, facts={})
    model = open_model(write_shape(tmp_path, "q8_0", layers=1, shape=SMALL), ops).model
    cache, sequences, rows, captures = model.new_cache(2), Sequences(), [(0, [1]), (1, [2])], []
    for _ in range(24):
        tokens = ops.argmax(model.forward(sequences.step(rows), cache).logits)
        captures.append(device.captures)
        rows = [(n, [int(token)]) for n, token in enumerate(tokens)]
    # Run as it is found, recorded, two that come as foreseen; the sixteenth step that wants it makes it.
    assert captures == [0] + [1] * 18 + [2] * 5


WHOLE = {**SMALL, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
"""Columns are whole chunks; four heads share one of keys."""


@pytest.mark.parametrize("weight_format", ["bf16", "q8_0"])
def test_steps_of_some_rows_give_the_cpu_lane_s_bytes(built, library, weight_format, tmp_path):
    """Two tiles of rows, over one KV block and two; logits of all rows, and of some."""
    from mens_cpu_ref.lane import CpuOps

    path = write_shape(tmp_path, weight_format, layers=2, shape=WHOLE)

    def decode(ops):
        model = open_model(path, ops).model
        cache, sequences, made = model.new_cache(40), Sequences(), []
        steps = [[(0, [i % 97 for i in range(126)])], [(i, [i, 5]) for i in range(1, 18)]]
        steps += [[(i, [i + j]) for i in range(18)] for j in range(3)]
        # A prompt beside: as many rows as before in all, and logits of its last one alone.
        steps += [[(0, [1, 2, 3]), *((i, [i + j]) for i in range(1, 16))] for j in range(2)]
        for rows in steps:
            result = model.forward(sequences.step(rows), cache)
            made.append((ops.to_host(result.logits).tobytes(), list(ops.argmax(result.logits))))
        return made

    device = CapturingShim(built)
    assert decode(CudaOps(device, facts={})) == decode(CpuOps(library.kernels))
    kernels = Counter(device.recorded_kernels)
    assert kernels["vox_step_some_rows_4_6"] and kernels["vox_step_attend_few_4"]
    assert not kernels["vox_norm_staged"]
    if weight_format == "q8_0":
        tiles = {kernel for kernel in kernels if kernel.startswith("vox_step_tiles")}
        assert tiles == {"vox_step_tiles_q8_0_32x16", "vox_step_tiles_q8_0_16x32"}


def test_a_row_that_is_not_finite_is_told_from_a_replay(built, tmp_path):
    """In the replay where it happens, and in no later one."""
    device = CapturingShim(built)
    ops = CudaOps(device, facts={})
    model = open_model(write_model(tmp_path, BY_FAMILY["qwen3"]), ops).model
    cache, sequences = model.new_cache(8), Sequences()
    model.forward(sequences.step([(0, [1, 2]), (1, [3])]), cache)
    faults = []
    for i in range(6):
        if i == 3:  # a key of the second sequence becomes NaN, in the block that it was given
            keys = cache.keys[1].view(np.float32).reshape(8, cache.kv_heads, cache.head_dim, 128)
            keys[1, :, :, 0] = np.nan
        if i == 4:
            keys[1, :, :, 0] = 0
            cache.values[1].view(np.float32)[:] = 0
        batch = sequences.step([(0, [i]), (1, [i])])
        faults.append([(fault.row, fault.name) for fault in model.forward(batch, cache).faults])
    assert device.replays >= 4
    assert faults[:3] == [[], [], []]
    assert faults[3] == [(1, "layers.1.self_attn.attention")]
    # What it wrote into the cache in that step is NaN too, in the layers behind.
    assert all(row == 1 for row, _ in faults[4])


def test_kernels_start_groups_of_the_size_they_are_written_for():
    assert "kSlices = kGroup / kOutputs" in cuda_source() and GROUP == 128
