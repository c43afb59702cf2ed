"""Kernels of the CUDA lane that make one row, run on the CPU beside the plain ones.

A model of a test is too narrow for chunks that all threads have as many of, which is what wide models have.
"""

from __future__ import annotations

import numpy as np
import pytest

from grid_shim.device import ShimDevice
from mens_core.grid_device import Launch, constants
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_torch_cuda.packed import linear_launch, packed

EPS = 1e-5
STORED, ADDED, SILU = 0, 1, 2
"""What is done with the outputs (kernels/step.h)."""


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(device, format_, outputs, columns):
    """Matrices side by side, packed."""
    made = []
    for seed, rows in enumerate(outputs):
        rng = np.random.default_rng(seed)
        if format_ == "q8_0":
            blocks = rng.integers(0, 256, (rows * columns // 32, 34)).astype(np.uint8)
            blocks[:, :2] = (rng.random((len(blocks), 1)) / 64 + 0.001).astype(np.float16).view(np.uint8)
            stored, block = blocks, 32
        else:
            # Numbers of many sizes: some products are flushed, and leave a -0.
            values = drawn(seed, rows, columns) * np.exp2(rng.integers(-75, 3, (rows, columns)))
            stored, block = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), 0
        made.append(packed(device, GridMatrix(format_, rows, columns, block, device.put(stored))))
    return made


class Plain:
    """The same by kernels of one operator each."""

    def __init__(self, device, columns):
        self.device, self.columns = device, columns
        self.flags = device.zeros(4)

    def normed(self, x, weight):
        out = self.device.empty(4 * self.columns)
        buffers = (self.device.put(x), self.device.put(weight), out, self.flags)
        self.device.launch(Launch("vox_norm", buffers, constants(1, self.columns, EPS), (GROUP, 1)))
        return out

    def codes(self, x):
        columns = len(x.view(np.float32))
        codes, scales = self.device.empty(columns), self.device.empty(columns // 8)
        args, threads = constants(columns), (columns // 32, 1)
        self.device.launch(Launch("vox_quantise_32", (x, codes, scales), args, threads))
        return codes, scales

    def linear(self, weight, activations):
        kernel, args, threads = linear_launch(weight, 1)
        out = self.device.empty(4 * weight.rows)
        self.device.launch(Launch(kernel, (*activations, *weight.buffers, out, self.flags), args, threads))
        return out

    def gated(self, gate, up):
        out = self.device.empty(len(gate))
        elements = len(gate) // 4
        buffers = (gate, up, out, self.flags)
        args = constants(1, elements, 0.0)
        self.device.launch(Launch("vox_silu_gate", buffers, args, (elements, 1)))
        return out


def one_row(
    device, name, across, matrices, source, side, *, started, mode=STORED, residual=None, coded=False
):
    """Launch a kernel of kernels/step.h: its outputs, codes and their scales, and the norm's flag."""
    none, is_gate = source, mode >= SILU
    outs = [device.empty(4 * matrix.rows) for matrix in (matrices[:1] if is_gate else matrices)]
    codes = (device.empty(matrices[0].rows), device.empty(matrices[0].rows // 8)) if coded else (none, none)
    flags = [device.zeros(4) for _ in range(3)]
    norm_flag = device.zeros(4) if "normed" in name else none
    groups = sum(-(-matrix.rows // across) for matrix in (matrices[:1] if is_gate else matrices))
    started = min(started, groups)

    def three(buffers):
        return (*buffers, *[none] * (3 - len(buffers)))

    scales = [matrix.buffers[1] for matrix in matrices] if matrices[0].block else []
    rows = [matrix.rows for matrix in matrices] + [0] * (3 - len(matrices))
    args = constants(*rows, matrices[0].columns, mode, int(coded), started, EPS)
    buffers = (
        *(source, side, *three([matrix.buffers[0] for matrix in matrices]), *three(scales)),
        *(none if residual is None else residual, *three(outs), *codes, *flags, norm_flag),
    )
    device.launch(Launch(f"{name}_{across}", buffers, args, (started * GROUP, 1)))
    return outs, codes, norm_flag


WHOLE, RAGGED = 4096, 1056
"""Columns: chunks that every thread has as many of, in turns; and a last one that is not whole."""


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("columns", [WHOLE, RAGGED])
@pytest.mark.parametrize("format_", ["bf16", "q8_0"])
def test_products_of_a_row_give_the_bytes_of_the_plain_kernels(cuda_library, format_, columns, order):
    """Three weights side by side, and one that a residual is added to; groups go on to further outputs."""
    device = ShimDevice(cuda_library, order=order)
    plain, matrices = Plain(device, columns), weights(device, format_, (37, 16, 9), columns)
    x = device.put(drawn(7, columns))
    source, side = plain.codes(x) if format_ == "q8_0" else (x, x)
    activations = (source, side) if format_ == "q8_0" else (x,)
    expected = [plain.linear(matrix, activations) for matrix in matrices]
    residual = drawn(8, 37)
    for across in (8, 16):
        name = f"vox_step_{format_}"
        found, _, _ = one_row(device, name, across, matrices, source, side, started=4)
        assert [out.tobytes() for out in found] == [out.tobytes() for out in expected], across
        (found,), _, _ = one_row(
            device,
            name,
            across,
            matrices[:1],
            source,
            side,
            started=2,
            mode=ADDED,
            residual=device.put(residual),
        )
        assert found.tobytes() == (residual + expected[0].view(np.float32)).tobytes(), across


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("columns", [WHOLE, RAGGED, 48 * 128])
@pytest.mark.parametrize("format_", ["bf16", "q8_0"])
def test_products_of_a_normed_row_give_the_bytes_of_the_plain_kernels(cuda_library, format_, columns, order):
    """Three weights side by side, and a gate of two whose outputs are wanted as codes."""
    device = ShimDevice(cuda_library, order=order)
    plain, side = Plain(device, columns), device.put(1 + drawn(5, columns) / 8)
    x = drawn(7, columns)
    x[64:96] = 0.0  # a block without codes

    def activations(x):
        y = plain.normed(x, side.view(np.float32))
        return plain.codes(y) if format_ == "q8_0" else (y,)

    matrices = weights(device, format_, (37, 16, 9), columns)
    expected = [plain.linear(matrix, activations(x)) for matrix in matrices]
    name = f"vox_step_normed_{format_}"
    for across in (16, 32):
        found, _, flag = one_row(device, name, across, matrices, device.put(x), side, started=2)
        assert [out.tobytes() for out in found] == [out.tobytes() for out in expected], across
        assert not flag.any()
    pair = weights(device, format_, (64, 64), columns)
    gated = plain.gated(*(plain.linear(matrix, activations(x)) for matrix in pair))
    (found,), codes, _ = one_row(
        device, name, 32, pair, device.put(x), side, started=1, mode=SILU, coded=format_ == "q8_0"
    )
    assert found.tobytes() == gated.tobytes()
    if format_ == "q8_0":
        assert [part.tobytes() for part in codes] == [part.tobytes() for part in plain.codes(gated)]
    x[3] = np.inf  # its square is: the row is not a number anywhere
    found, _, flag = one_row(device, name, 16, matrices, device.put(x), side, started=2)
    assert flag.view(np.int32) == [1]
    assert [out.tobytes() for out in found] == [
        plain.linear(matrix, activations(x)).tobytes() for matrix in matrices
    ]
