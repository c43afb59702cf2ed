"""Weights with an infinity or NaN are refused, by the host and by the GPU alike."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mens_core.grid_weights import load_matrix  # noqa: E402
from mens_core.ops import StoredTensor  # noqa: E402
from mens_torch_cuda import finite  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402


class LookingDevice:
    """`CudaDevice.put_finite` on the CPU's memory, by the function that looks on the GPU."""

    def put_finite(self, source, floats):
        buffer = torch.from_numpy(source.copy())
        return buffer if finite.are_finite(buffer, floats) else None


class HostDevice:
    def put(self, array):
        return array


ROWS, COLUMNS = 7, 512
"""Bytes of a block, and where its floats lie."""
LAYOUTS = {
    "f32": (4, (0,), 4, 0x7F800000),
    "f16": (2, (0,), 2, 0x7C00),
    "bf16": (2, (0,), 2, 0x7F80),
    "q8_0": (34, (0,), 2, 0x7C00),
    "q5_0": (22, (0,), 2, 0x7C00),
    "q4_0": (18, (0,), 2, 0x7C00),
    "q4_k": (144, (0, 2), 2, 0x7C00),
    "q5_k": (176, (0, 2), 2, 0x7C00),
    "q6_k": (210, (208,), 2, 0x7C00),
}
WEIGHTS = {4: 1, 2: 1, 34: 32, 22: 32, 18: 32, 144: 256, 176: 256, 210: 256}


@pytest.mark.parametrize("weight_format", LAYOUTS)
def test_the_gpu_refuses_the_weights_that_the_host_refuses(monkeypatch, weight_format):
    block, places, size, exponent = LAYOUTS[weight_format]
    # Several pieces, the last one not full.
    monkeypatch.setattr(finite, "_LOOKED_AT", 5 * block // size)
    lanes = LookingDevice(), HostDevice()
    count = ROWS * COLUMNS // WEIGHTS[block]
    # Everything is ones but the floats: codes are no exponents.
    blocks = np.full((count, block), 0xFF, np.uint8)
    kind = np.uint16 if size == 2 else np.uint32
    for place in places:
        blocks[:, place : place + size] = np.full((count, 1), exponent - 1, kind).view(np.uint8)

    def load(device):
        data = memoryview(blocks.reshape(-1)).toreadonly()
        return load_matrix(device, StoredTensor("w", weight_format, (ROWS, COLUMNS), data))

    for lane in lanes:
        assert bytes(np.asarray(load(lane).buffer).tobytes()) == blocks.tobytes()
    for row in (0, count // 2, count - 1):
        for place in places:
            kept = blocks[row, place : place + size].copy()
            for bad in (exponent, exponent | 1, exponent | 1 << (8 * size - 1)):
                blocks[row, place : place + size] = np.array([bad], kind).view(np.uint8)
                for lane in lanes:
                    with pytest.raises(BackendError, match="'w' holds an infinity or NaN"):
                        load(lane)
            blocks[row, place : place + size] = kept
