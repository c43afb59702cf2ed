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
        activations = (device.put(wide(5, rows, columns)),)
    residual = drawn(6, rows, outputs)
    expected = plain(device, weight, activations, rows)
    for tile in tiles:
        assert tiled(device, tile, weight, activations, rows, None).tobytes() == expected.tobytes(), tile
        found = tiled(device, tile, weight, activations, rows, device.put(residual))
        assert found.tobytes() == (residual.reshape(-1) + expected).tobytes(), tile


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


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", SEQUENCES)
def test_attention_of_many_rows_gives_the_bytes_of_the_plain_kernel(cuda_library, name, order):
    (heads, kv_heads, head_dim), window, softcap, sequences = SEQUENCES[name]
    rng, device = np.random.default_rng(7), ShimDevice(cuda_library, order=order)
    counts = [count for _, count in sequences]
    rows, starts, stride = sum(counts), np.cumsum([0, *counts]), -(-head_dim // 16) * 16
    blocks = [-(-(first + count) // 128) for first, count in sequences]
    tables = np.full((len(sequences), max(blocks)), -1, np.int32)
    for i, count in enumerate(blocks):
        tables[i, :count] = sum(blocks[:i]) + rng.permutation(count)
    values = wide(10, sum(blocks), kv_heads, 128, stride)
    # Products that are flushed, between zeros: what is not seen must not turn a -0 into +0.
    values[..., :8] = rng.choice(np.array([-1.3e-38, 0.0], np.float32), values[..., :8].shape)
    inputs = [
        device.put(array)
        for array in (
            drawn(8, rows, heads * head_dim),
            drawn(9, sum(blocks), kv_heads, head_dim, 128),
            values,
            np.concatenate([np.arange(first, first + count) for first, count in sequences]).astype(np.int32),
            np.repeat(np.arange(len(sequences)), counts).astype(np.int32),
            tables,
        )
    ]
    shape = (heads, kv_heads, head_dim, stride, max(blocks), window)
    ends = (head_dim**-0.5, softcap)

    def attended(kernel, between, args, threads):
        out, flags = device.empty(4 * rows * heads * head_dim), device.zeros(4 * rows)
        device.launch(Launch(kernel, (*inputs, *between, out, flags), args, threads))
        return out.tobytes(), flags.tobytes()

    expected = attended("vox_attention", (), constants(*shape, *ends), (heads * GROUP, rows))
    together = 32 // (heads // kv_heads)
    ranges = list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
    tiles = [(at, min(together, end - at)) for start, end in ranges for at in range(start, end, together)]
    args = constants(*shape, len(tiles), *ends)
    found = attended(
        "vox_step_attend_rows",
        (device.put(np.array(tiles, np.int32)),),
        args,
        (len(tiles) * kv_heads * GROUP, 1),
    )
    assert found == expected


@pytest.mark.parametrize("columns", [96, 2080])
def test_norm_and_codes_of_rows_give_the_bytes_of_two_kernels(cuda_library, columns):
    """More of a row than a thread asks for at once."""
    device, rows = ShimDevice(cuda_library), 3
    x, weight = device.put(drawn(11, rows, columns)), device.put(drawn(12, columns))

    def made(*launches):
        out, codes, scales = (
            device.empty(4 * rows * columns),
            device.empty(rows * columns),
            device.empty(rows * columns // 8),
        )
        flags = device.zeros(4 * rows)
        for kernel, buffers, args, threads in launches:
            held = {"out": out, "codes": codes, "scales": scales, "flags": flags}
            device.launch(
                Launch(
                    kernel, tuple(held.get(b, b) if isinstance(b, str) else b for b in buffers), args, threads
                )
            )
        return out.tobytes(), codes.tobytes(), scales.tobytes()

    apart = made(
        ("vox_norm", (x, weight, "out", "flags"), constants(1, columns, 1e-6), (GROUP, rows)),
        ("vox_quantise_32", ("out", "codes", "scales"), constants(columns), (columns // 32, rows)),
    )
    buffers = (x, weight, "out", "codes", "scales", "flags")
    assert made(("vox_step_rows", buffers, constants(columns, 1e-6), (GROUP, rows))) == apart
