"""Kernels of the CUDA lane that make several rows at once, run on the CPU beside the plain ones.

Their launches are made here, since a model takes one tile for a product and a step.
"""

from __future__ import annotations

import numpy as np
import pytest

from grid_shim.device import ShimDevice
from mens_core.grid_device import Launch, constants
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_torch_cuda.few_rows import FEW_TILES, few_tile, is_few
from mens_torch_cuda.packed import linear_launch, packed
from mens_torch_cuda.tile_choice import BROAD_TILES, CODE_TILES, FLOAT_TILES, code_tile, float_tile

SHAPES = [(1, 32, 1), (70, 160, 33), (204, 192, 131), (33, 1024, 9), (130, 544, 20), (64, 2208, 65)]
"""Outputs, columns, rows: groups that are not full, chunks that are not whole, slices without a chunk."""


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def wide(seed, *shape):
    """Numbers of many sizes: some products are flushed, and leave a -0."""
    rng = np.random.default_rng(seed)
    return (drawn(seed, *shape) * np.exp2(rng.integers(-75, 3, shape))).astype(np.float32)


def float_weights(device, format_, outputs, columns):
    values = wide(1, outputs, columns)
    values[0] = -1e-30  # with a row of 1e-30 its sum is -0: a chunk that isn't there would make it +0
    halves = values.astype(np.float16).view(np.uint16) if format_ == "f16" else values.view(np.uint32) >> 16
    return packed(device, GridMatrix(format_, outputs, columns, 0, device.put(halves.astype(np.uint16))))


def code_weights(device, outputs, columns):
    rng = np.random.default_rng(2)
    blocks = rng.integers(0, 256, (outputs * columns // 32, 34)).astype(np.uint8)
    scales = (rng.random((len(blocks), 1)) / 64 + 0.001).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8)
    return packed(device, GridMatrix("q8_0", outputs, columns, 32, device.put(blocks)))


def plain(device, weight, activations, rows):
    """The product by the kernel that makes eight rows."""
    kernel, args, threads = linear_launch(weight, rows)
    out = device.empty(4 * rows * weight.rows)
    device.launch(Launch(kernel, (*activations, *weight.buffers, out, device.zeros(4 * rows)), args, threads))
    return out.view(np.float32)


def tiled(device, tile, weight, activations, rows, residual):
    """The product by a tile, added to `residual` if there is one; and the flags."""
    out, none = device.empty(4 * rows * weight.rows), activations[0]
    flags = [device.zeros(4 * rows), device.zeros(4 * rows)]
    buffers = (
        *activations,
        *(buffer for buffer in weight.buffers for _ in range(3)),
        *(none if residual is None else residual, out, none, none),
        *(flags[0], none if residual is None else flags[1], none),
    )
    args = constants(weight.rows, 0, 0, weight.columns, rows, int(residual is not None))
    threads = (-(-weight.rows // tile.outputs) * tile.group, -(-rows // tile.rows))
    kernel = f"vox_step_tiles_{weight.format}_{tile.name}"
    device.launch(Launch(kernel, buffers, args, threads, shared=tile.shared, group=tile.group))
    return out.view(np.float32)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("format_", ["bf16", "f16", "q8_0"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_gives_the_bytes_of_the_plain_kernel(cuda_library, shape, format_, order):
    outputs, columns, rows = shape
    device = ShimDevice(cuda_library, order=order)
    if format_ == "q8_0":
        weight, tiles = code_weights(device, outputs, columns), CODE_TILES.values()
        codes = np.random.default_rng(3).integers(-127, 128, (rows, columns)).astype(np.int8)
        activations = (device.put(codes), device.put(np.abs(drawn(4, rows, columns // 32))))
    else:
        weight = float_weights(device, format_, outputs, columns)
        tiles = (*FLOAT_TILES, *(BROAD_TILES if outputs % 4 == 0 else ()))
        x = wide(5, rows, columns)
        x[0] = 1e-30
        activations = (device.put(x),)
    residual = drawn(6, rows, outputs)
    expected = plain(device, weight, activations, rows)
    assert format_ != "bf16" or np.signbit(expected[0])
    for tile in tiles:
        assert tiled(device, tile, weight, activations, rows, None).tobytes() == expected.tobytes(), tile
        found = tiled(device, tile, weight, activations, rows, device.put(residual))
        assert found.tobytes() == (residual.reshape(-1) + expected).tobytes(), tile


def in_tiles(codes):
    """Codes [rows, columns] in the order of kernels/few_rows.h; rows that are not there are 99."""
    rows, columns = codes.shape
    padded = np.full((-(-rows // 16) * 16, columns), 99, np.int8)
    padded[:rows] = codes
    # Tiles, halves of sixteen rows, rows, blocks, lanes of four, halves of eight columns, columns.
    parts = padded.reshape(-1, 2, 8, columns // 32, 4, 2, 4)
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 4, 5, 1, 6)).reshape(-1)


def scales_in_tiles(scales):
    """Scales [rows, blocks] beside them."""
    rows, blocks = scales.shape
    padded = np.full((-(-rows // 16) * 16, blocks), np.nan, np.float32)
    padded[:rows] = scales
    return np.ascontiguousarray(padded.reshape(-1, 16, blocks // 4, 4).transpose(0, 2, 1, 3)).reshape(-1)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    "shape", [(1, 128, 2), (70, 256, 33), (40, 640, 17), (130, 1152, 9), (136, 1024, 64)]
)
def test_tiles_of_few_rows_give_the_bytes_of_the_plain_kernel(cuda_library, shape, order):
    outputs, columns, rows = shape
    device = ShimDevice(cuda_library, order=order)
    weight = code_weights(device, outputs, columns)
    codes = np.random.default_rng(3).integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = np.abs(drawn(4, rows, columns // 32))
    expected = plain(device, weight, (device.put(codes), device.put(scales)), rows)
    residual = drawn(6, rows, outputs)
    activations = (device.put(in_tiles(codes)), device.put(scales_in_tiles(scales)))
    for tile in FEW_TILES.values():
        assert tiled(device, tile, weight, activations, rows, None).tobytes() == expected.tobytes(), tile
        found = tiled(device, tile, weight, activations, rows, device.put(residual))
        assert found.tobytes() == (residual.reshape(-1) + expected).tobytes(), tile


def test_tiles_of_few_rows_are_chosen_by_rows_and_outputs():
    assert [is_few(rows, 4096) for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert not is_few(8, 160)
    assert [few_tile(rows, [4096]).name for rows in (2, 16, 17, 64)] == ["16x32", "16x32", "32x16", "32x32"]
    several = ([4096, 1024, 1024], [12288, 12288], [151936])
    assert [few_tile(64, outputs).name for outputs in several] == ["32x16", "64x64", "64x64"]
    assert [few_tile(rows, [12288, 12288]).name for rows in (8, 32)] == ["16x64", "32x64"]
    assert all(tile.shared <= 99 << 10 for tile in FEW_TILES.values()), "more than every GPU that we take has"


def test_tiles_are_chosen_by_rows_and_by_how_many_groups_there_are():
    rows = (2, 9, 16, 32, 64, 512)
    assert [float_tile(count, [4096]).name for count in rows] == ["8", "8", "8", "Deep", "Wide", "High"]
    chosen = ["8", "Deep", "Deep", "Wide", "Low", "Most"]
    assert [float_tile(count, [12288, 12288]).name for count in rows] == chosen
    assert float_tile(32, [1024]).name == "8", "few groups"
    assert float_tile(512, [24574]).name == "Wide", "sums go out by fours"
    assert all(tile.shared <= 99 << 10 for tile in FLOAT_TILES), "more than every GPU that we take has"
    assert [code_tile(rows, [4096]).name for rows in (2, 17, 33, 512)] == ["16", "32", "Wide", "Many"]
    assert code_tile(32, [1024]).name == "Thin" and code_tile(32, [12288, 12288]).name == "Wide"


SEQUENCES = {
    "several sequences, borders of blocks": ((4, 2, 64), 0, 0.0, [(0, 70), (130, 9), (127, 1)]),
    "all heads share one": ((4, 1, 128), 0, 0.0, [(100, 60), (0, 5)]),
    "a window, a softcap, queries left over": ((3, 1, 80), 100, 30.0, [(0, 40), (250, 12), (90, 30)]),
    "a window shorter than a tile": ((8, 8, 32), 7, 0.0, [(0, 33), (380, 10)]),
    "blocks that all see whole": ((2, 1, 128), 200, 0.0, [(300, 20)]),
}


class Attending:
    """A batch and a cache, and what attention makes of them."""

    def __init__(self, device, shape, window, softcap, sequences):
        (heads, kv_heads, head_dim), self.device = shape, device
        rng, counts = np.random.default_rng(7), [count for _, count in sequences]
        self.rows, self.starts, stride = sum(counts), np.cumsum([0, *counts]), -(-head_dim // 16) * 16
        blocks = [-(-(first + count) // 128) for first, count in sequences]
        tables = np.full((len(sequences), max(blocks)), -1, np.int32)
        for i, count in enumerate(blocks):
            tables[i, :count] = sum(blocks[:i]) + rng.permutation(count)
        values = wide(10, sum(blocks), kv_heads, 128, stride)
        # Products that are flushed, between zeros: what is not seen must not turn a -0 into +0.
        values[..., :8] = rng.choice(np.array([-1.3e-38, 0.0], np.float32), values[..., :8].shape)
        positions = np.concatenate([np.arange(first, first + count) for first, count in sequences])
        self.inputs = [
            device.put(array)
            for array in (
                drawn(8, self.rows, heads * head_dim),
                drawn(9, sum(blocks), kv_heads, head_dim, 128),
                values,
                positions.astype(np.int32),
                np.repeat(np.arange(len(sequences)), counts).astype(np.int32),
                tables,
            )
        ]
        self.heads, self.width, self.blocks = heads, head_dim, max(blocks)
        self.shape, self.ends = (
            (heads, kv_heads, head_dim, stride, max(blocks), window),
            (head_dim**-0.5, softcap),
        )

    def made(self, kernel, between, args, threads, behind=()):
        out, flags = (
            self.device.empty(4 * self.rows * self.heads * self.width),
            self.device.zeros(4 * self.rows),
        )
        buffers = (*self.inputs, *between, out, *behind, flags)
        self.device.launch(Launch(kernel, buffers, args, threads))
        return out.tobytes(), flags.tobytes()

    def plain(self):
        return self.made(
            "vox_attention", (), constants(*self.shape, *self.ends), (self.heads * GROUP, self.rows)
        )


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_of_many_rows_gives_the_bytes_of_the_plain_kernel(cuda_library, name, order):
    (heads, kv_heads, head_dim), window, softcap, sequences = SEQUENCES[name]
    device = ShimDevice(cuda_library, order=order)
    batch = Attending(device, (heads, kv_heads, head_dim), window, softcap, sequences)
    together = 32 // (heads // kv_heads)
    ranges = list(zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True))
    tiles = [(at, min(together, end - at)) for start, end in ranges for at in range(start, end, together)]
    found = batch.made(
        "vox_step_attend_rows",
        (device.put(np.array(tiles, np.int32)),),
        constants(*batch.shape, len(tiles), *batch.ends),
        (len(tiles) * kv_heads * GROUP, 1),
    )
    assert found == batch.plain()


FEW = {
    "one row each, the last of three blocks, one and two": (
        4,
        (8, 2, 128),
        0,
        0.0,
        [(300, 1), (5, 1), (128, 1)],
    ),
    "two share, heads of 64, a part that is not whole": (2, (4, 2, 64), 0, 0.0, [(150, 2), (37, 1)]),
    "a window over two blocks, a softcap, a width of stages left over": (
        1,
        (3, 1, 84),
        100,
        30.0,
        [(190, 1), (20, 3)],
    ),
}
"""Heads of a group, then as SEQUENCES."""


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", FEW)
def test_attention_of_few_rows_gives_the_bytes_of_the_plain_kernel(cuda_library, name, order):
    together, shape, window, softcap, sequences = FEW[name]
    device = ShimDevice(cuda_library, order=order)
    batch = Attending(device, shape, window, softcap, sequences)
    rows, columns, sets = batch.rows, batch.heads * batch.width, batch.heads // together
    expected = batch.plain()
    for codes_out in (0, 1, 2) if batch.width % 32 == 0 else (0,):
        parts = device.empty(4 * rows * batch.heads * batch.blocks * (batch.width + 2))
        counters = device.zeros(4 * rows * sets)
        codes, scales = device.zeros(16 * columns), device.zeros(16 * columns // 8)
        found = batch.made(
            f"vox_step_attend_few_{together}",
            (parts, counters),
            constants(*batch.shape, codes_out, 0, *batch.ends),
            (sets * batch.blocks * GROUP, rows),
            (codes, scales),
        )
        assert found == expected
        assert not counters.any()
        if codes_out:
            out = device.put(np.frombuffer(expected[0], np.float32))
            assert coded_alike(device, out, (rows, columns), (codes, scales), codes_out == 2)


def coded_alike(device, values, shape, made, are_in_tiles):
    """Whether codes and scales, in this order, are those of the kernel that makes nothing else."""
    rows, columns = shape
    codes, scales = device.empty(rows * columns), device.empty(rows * columns // 8)
    args = constants(columns)
    device.launch(Launch("vox_quantise_32", (values, codes, scales), args, (columns // 32, rows)))
    codes, scales = codes.view(np.int8).reshape(rows, columns), scales.view(np.float32).reshape(rows, -1)
    found = [buffer.tobytes() for buffer in made]
    if not are_in_tiles:
        return [found[0][: codes.nbytes], found[1][: scales.nbytes]] == [codes.tobytes(), scales.tobytes()]
    mine, theirs = in_tiles(codes), scales_in_tiles(scales)
    is_row = in_tiles(np.zeros_like(codes)) == 0
    got = [np.frombuffer(found[0], np.int8)[: len(mine)], np.frombuffer(found[1], np.float32)[: len(theirs)]]
    is_scale = ~np.isnan(theirs)
    return (
        got[0][is_row].tobytes() == mine[is_row].tobytes()
        and got[1][is_scale].tobytes() == theirs[is_scale].tobytes()
    )


@pytest.mark.parametrize("codes_out", [0, 1, 2])
@pytest.mark.parametrize("columns", [128, 2176])
@pytest.mark.parametrize("kind", ["norm", "silu_gate", "as it is"])
def test_what_stands_between_products_gives_the_bytes_of_two_kernels(cuda_library, kind, columns, codes_out):
    """Norm, gate or nothing, and codes; two tiles of rows, blocks of zeros alone, a row with an infinity."""
    device, rows = ShimDevice(cuda_library), 18
    values = drawn(11, rows, columns)
    values[3, 32:64] = 0
    values[5] = 0
    values[7, 9] = np.inf
    x, other = device.put(values), device.put(drawn(12, rows, columns))
    size = 4 * rows * columns
    apart, out, flags = (
        device.empty(size),
        device.empty(size),
        [device.zeros(4 * rows), device.zeros(4 * rows)],
    )
    made = device.zeros(32 * columns), device.zeros(32 * columns // 8)
    if kind == "norm":
        device.launch(
            Launch("vox_norm", (x, other, apart, flags[0]), constants(1, columns, 1e-6), (GROUP, rows))
        )
        args, kernel, threads = constants(columns, codes_out, 1e-6), "vox_step_between_norm", (GROUP, rows)
    else:
        mode = 2 if kind == "silu_gate" else 0
        apart = device.put(values)
        if mode:
            args = constants(rows, columns, 0.0)
            device.launch(Launch("vox_silu_gate", (x, other, apart, flags[0]), args, (rows * columns, 1)))
        args, kernel = constants(columns, mode, codes_out), "vox_step_between_gate"
        threads = (columns // 4, rows)
    device.launch(Launch(kernel, (x, other, out, *made, flags[1]), args, threads))
    if kind != "as it is":
        assert out.tobytes() == apart.tobytes()
    assert flags[0].tobytes() == flags[1].tobytes()
    if codes_out:
        assert coded_alike(device, apart, (rows, columns), made, codes_out == 2)
    else:
        assert not made[0].any()
