"""Kernels of the CUDA lane that make several rows at once, run on the CPU beside the plain ones.

Their launches are made here, since a model takes one tile for a product and a step.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from grid_shim.device import ShimDevice
from lanes.batches import Sequences
from mens_core.grid_device import Launch, constants
from mens_core.grid_ops import GridTensor
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK
from mens_torch_cuda.code_orders import Order, order_of, room_of
from mens_torch_cuda.few_rows import CORE_TILES, FEW_TILES, MANY_TILES, coded_tile, core_tile
from mens_torch_cuda.joined import QUERIES, ROWS_SHARED, SOME_RINGS, SOME_SHARED
from mens_torch_cuda.lane import CudaOps
from mens_torch_cuda.launches import NORM_THREADS, Launcher, norm_part
from mens_torch_cuda.nodes import Nodes
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


def tiled(device, tile, weight, activations, rows, residual, flags=None):
    """The product by a tile, added to `residual` if there is one; rows that are not finite set `flags`."""
    out, none = device.empty(4 * rows * weight.rows), activations[0]
    flags = flags or [device.zeros(4 * rows), device.zeros(4 * rows)]
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


def in_cores(codes):
    """Codes [rows, columns] as core matrices; rows that are not there are 99."""
    rows, columns = codes.shape
    padded = np.full((-(-rows // 8) * 8, columns), 99, np.int8)
    padded[:rows] = codes
    return np.ascontiguousarray(padded.reshape(-1, 8, columns // 16, 16).transpose(0, 2, 1, 3)).reshape(-1)


def borders(seed, rows, columns):
    """Codes and scales; sums of every other row are at the border of what is flushed, and some end as -0."""
    codes = np.random.default_rng(seed).integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = np.abs(drawn(seed + 1, rows, columns // 32))
    codes[::2] = 0
    codes[::2, ::32] = 1
    scales[::2] *= 2e-36
    return codes, scales


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("shape", [(130, 128, 65), (72, 768, 131), (41, 640, 70)])
def test_tiles_of_warpgroups_give_the_bytes_of_the_plain_kernel(cuda_library, shape, order):
    outputs, columns, rows = shape
    device = ShimDevice(cuda_library, order=order)
    weight = code_weights(device, outputs, columns)
    codes, scales = borders(3, rows, columns)
    expected = plain(device, weight, (device.put(codes), device.put(scales)), rows)
    residual = drawn(6, rows, outputs)
    beyond = room_of(rows, Order.CORES) - rows
    padded = np.pad(codes, ((0, beyond), (0, 0)), constant_values=99)
    padded_scales = np.pad(scales, ((0, beyond), (0, 0)), constant_values=np.nan)
    activations = (device.put(in_cores(padded)), device.put(scales_in_tiles(padded_scales)))
    for tile, added in product(CORE_TILES.values(), (None, residual)):
        flags = [device.zeros(4 * rows), device.zeros(4 * rows)]
        buffer = None if added is None else device.put(added)
        found = tiled(device, tile, weight, activations, rows, buffer, flags)
        wanted = expected if added is None else residual.reshape(-1) + expected
        assert found.tobytes() == wanted.tobytes(), tile
        assert not flags[0].any() and not flags[1].any()


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 128, 2),
        (130, 128, 65),
        (70, 256, 33),
        (40, 640, 17),
        (130, 1152, 9),
        (136, 1024, 64),
        (72, 768, 131),
    ],
)
def test_tiles_of_codes_in_their_order_give_the_bytes_of_the_plain_kernel(cuda_library, shape, order):
    outputs, columns, rows = shape
    device = ShimDevice(cuda_library, order=order)
    weight = code_weights(device, outputs, columns)
    codes, scales = borders(3, rows, columns)
    expected = plain(device, weight, (device.put(codes), device.put(scales)), rows)
    residual = drawn(6, rows, outputs)
    activations = (device.put(in_tiles(codes)), device.put(scales_in_tiles(scales)))
    if columns == 128 and outputs > 1:
        zeros = expected[expected == 0.0]
        assert np.signbit(zeros).any() and not np.signbit(zeros).all()
    for tile in (*FEW_TILES.values(), *MANY_TILES.values()):
        assert tiled(device, tile, weight, activations, rows, None).tobytes() == expected.tobytes(), tile
        found = tiled(device, tile, weight, activations, rows, device.put(residual))
        assert found.tobytes() == (residual.reshape(-1) + expected).tobytes(), tile


@pytest.mark.parametrize("outputs", [40, 41])
def test_tiles_of_codes_in_their_order_tell_rows_that_are_not_finite(cuda_library, outputs):
    """Of a product, and of its sum with a residual; nothing of rows and outputs that are not there."""
    device, rows = ShimDevice(cuda_library), 20
    weight = code_weights(device, outputs, 128)
    scales = np.full((rows, 4), 1.0, np.float32)
    scales[3, 1], scales[17] = np.nan, 1e34
    codes = np.random.default_rng(3).integers(1, 128, (rows, 128)).astype(np.int8)
    activations = (device.put(in_tiles(codes)), device.put(scales_in_tiles(scales)))
    residual = np.zeros((rows, outputs), np.float32)
    residual[11, outputs - 1] = np.inf
    residual[17] = 3.4e38 * np.sign(
        plain(device, weight, (device.put(codes), device.put(scales)), rows).reshape(rows, -1)[17]
    )
    room = room_of(rows, Order.CORES) - rows
    padded = [np.pad(x, ((0, room), (0, 0))) for x in (codes, scales)]
    in_matrices = (device.put(in_cores(padded[0])), device.put(scales_in_tiles(padded[1])))
    for tile in (*FEW_TILES.values(), *MANY_TILES.values(), *CORE_TILES.values()):
        flags = [device.zeros(4 * rows), device.zeros(4 * rows)]
        read = in_matrices if tile in CORE_TILES.values() else activations
        tiled(device, tile, weight, read, rows, device.put(residual), flags)
        assert [list(np.flatnonzero(flag.view(np.int32))) for flag in flags] == [[3], [3, 11, 17]], tile


def test_tiles_of_codes_in_their_order_are_chosen_by_rows_and_outputs():
    chosen = [coded_tile(rows, [4096]).name for rows in (2, 16, 17, 64, 65, 512, 8192)]
    assert chosen[:4] == ["16x32", "16x32", "32x16", "32x32"]
    assert chosen[4:] == ["32x32by2", "64x64by2", "64x64by2"]
    several = ([4096, 1024, 1024], [12288, 12288], [151936])
    assert [coded_tile(64, outputs).name for outputs in several] == ["32x16", "64x64", "64x64"]
    assert [coded_tile(rows, [12288, 12288]).name for rows in (8, 32)] == ["16x64", "32x64"]
    chosen = [core_tile(rows, [4096]).name for rows in (65, 128, 256, 512, 8192)]
    assert chosen == [*["WarpgroupHalf"] * 3, "WarpgroupWide", "WarpgroupHalf"]
    assert all(tile.shared <= 99 << 10 for tile in (*FEW_TILES.values(), *MANY_TILES.values())), (
        "more than every GPU that we take has"
    )


def test_codes_lie_as_who_multiplies_them_reads_them():
    rows = (1, 2, 64, 65, 8192)
    orders = [order_of(count, 4096, has_warpgroups=False) for count in rows]
    assert orders == [Order.ROWS, *[Order.TILES] * 4]
    orders = [order_of(count, 4096, has_warpgroups=True) for count in rows]
    assert orders == [Order.ROWS, Order.TILES, Order.TILES, Order.CORES, Order.CORES]
    assert {order_of(count, 160, has_warpgroups=True) for count in rows} == {Order.ROWS}
    assert [room_of(65, order) for order in Order] == [65, 80, 128]


def test_tiles_are_chosen_by_rows_and_by_how_many_groups_there_are():
    rows = (2, 9, 16, 32, 64, 512)
    assert [float_tile(count, [4096], 4096).name for count in rows] == ["8", "8", "8", "Deep", "Wide", "High"]
    chosen = ["8", "Deep", "Deep", "Wide", "Low", "Most"]
    assert [float_tile(count, [12288, 12288], 4096).name for count in rows] == chosen
    assert [float_tile(count, [4096, 1024, 1024], 4096).name for count in rows[3:]] == ["Even", "Even", "Low"]
    of_columns = [float_tile(32, [6144], columns).name for columns in (1024, 2560, 4096)]
    assert of_columns == ["Short", "Short", "Even"]
    assert float_tile(32, [1024], 4096).name == "8", "few groups"
    assert float_tile(512, [24574], 4096).name == "Wide", "sums go out by fours"
    assert all(tile.shared <= 99 << 10 for tile in FLOAT_TILES), "more than every GPU that we take has"
    assert [code_tile(rows, [4096]).name for rows in (2, 17, 33, 512)] == ["16", "32", "Wide", "Many"]
    assert code_tile(32, [1024]).name == "Thin" and code_tile(32, [12288, 12288]).name == "Wide"


SEQUENCES = {
    "several sequences, borders of blocks": ((4, 2, 64), 0, 0.0, [(0, 70), (130, 9), (127, 1)]),
    "all heads share one": ((4, 1, 128), 0, 0.0, [(100, 60), (0, 5)]),
    "a window, a softcap, queries left over": ((3, 1, 80), 100, 30.0, [(0, 40), (250, 12), (90, 30)]),
    "a window shorter than a tile": ((8, 8, 32), 7, 0.0, [(0, 33), (380, 14)]),
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
        if window:  # some rows see them, others no longer
            values[tables[0, 0], 0, [9, 110], 8] = np.inf
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

    def made(self, kernel, between, args, threads, behind=(), shared=0):
        out, flags = (
            self.device.empty(4 * self.rows * self.heads * self.width),
            self.device.zeros(4 * self.rows),
        )
        buffers = (*self.inputs, *between, out, *behind, flags)
        self.device.launch(Launch(kernel, buffers, args, threads, shared=shared))
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
    together = QUERIES // (heads // kv_heads)
    ranges = list(zip(batch.starts[:-1].tolist(), batch.starts[1:].tolist(), strict=True))
    tiles = [(at, min(together, end - at)) for start, end in ranges for at in range(start, end, together)]
    rows, columns, expected = batch.rows, batch.heads * batch.width, batch.plain()
    nothing = device.empty(4 * rows * columns).tobytes()
    cases = [(0, 1), *((int(code_order), 1) for code_order in Order), (2, 0), (3, 0)]
    for codes_out, floats_out in cases if batch.width % 32 == 0 and columns % 128 == 0 else cases[:1]:
        room = room_of(rows, Order.CORES) * columns
        codes, scales = device.zeros(room), device.zeros(room // 8)
        found = batch.made(
            "vox_step_attend_rows",
            (device.put(np.array(tiles, np.int32)),),
            constants(*batch.shape, len(tiles), floats_out, codes_out, *batch.ends),
            (len(tiles) * kv_heads * GROUP, 1),
            (codes, scales),
            shared=ROWS_SHARED,
        )
        assert found == (expected[0] if floats_out else nothing, expected[1])
        if codes_out:
            out = device.put(np.frombuffer(expected[0], np.float32))
            assert coded_alike(device, out, (rows, columns), (codes, scales), codes_out)


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
            assert coded_alike(device, out, (rows, columns), (codes, scales), codes_out)


SOME = {
    "four share, over three blocks, one and two": (4, (8, 2, 128), 0, 0.0, [300, 5, 128]),
    "eight share, the last of a block": (4, (8, 1, 64), 0, 0.0, [127, 255]),
    "two share, a window over two blocks, parts of stages": (
        2,
        (4, 2, 72),
        100,
        0.0,
        [190, 20],
    ),
    "three share, a window within a block, a softcap": (1, (6, 2, 64), 30, 30.0, [250, 256, 0]),
}
"""Heads of a group, then as SEQUENCES, of one row each."""


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", SOME)
def test_some_rows_with_what_stands_before_give_the_bytes_of_kernels_apart(cuda_library, name, order):
    together, shape, window, softcap, lasts = SOME[name]
    device = ShimDevice(cuda_library, order=order)
    batch = Attending(device, shape, window, softcap, [(last, 1) for last in lasts])
    (heads, kv_heads, width), rows, columns = shape, batch.rows, batch.heads * batch.width
    q, keys, values, *places = batch.inputs
    k, v = (device.put(wide(seed, rows, kv_heads * width)) for seed in (13, 14))
    v.view(np.uint32)[0] = 0x80000000  # the row's own value goes through no arithmetic
    norms = [device.put(drawn(seed, width)) for seed in (15, 16)]
    angles = device.put(np.cos(drawn(17, batch.blocks, 128, 2, width // 2)))
    slots = device.put(np.arange(batch.blocks, dtype=np.int32)[::-1].copy())
    raw = (q, k, v, *norms, angles, slots, *places)
    caches = [(keys, values), (keys.copy(), values.copy())]
    rotated, flags = device.empty(q.nbytes), [device.zeros(4 * rows) for _ in range(8)]
    args = constants(heads, kv_heads, width, batch.shape[3], batch.blocks, 1e-6)
    buffers = (*raw, rotated, *caches[0], *flags[:4])
    device.launch(Launch("vox_step_place", buffers, args, (-(-(heads + kv_heads) // 16) * GROUP, rows)))
    batch.inputs[0] = rotated
    expected = batch.plain()
    for codes_out in (0, 1, 2):
        ring = SOME_RINGS[codes_out % 2]
        codes_out = codes_out if width % 32 == 0 else 0
        codes, scales = device.zeros(16 * columns), device.zeros(16 * columns // 8)
        out, fault = device.empty(q.nbytes), device.zeros(4 * rows)
        buffers = (*raw, *caches[1], out, codes, scales, fault, *flags[4:])
        args = constants(*batch.shape, codes_out, 1e-6, *batch.ends)
        threads = (heads // together * GROUP, rows)
        kernel = f"vox_step_some_rows_{together}_{ring}"
        device.launch(Launch(kernel, buffers, args, threads, shared=ring * SOME_SHARED))
        assert (out.tobytes(), fault.tobytes()) == expected
        assert [made.tobytes() for made in caches[1]] == [made.tobytes() for made in caches[0]]
        assert [flag.tobytes() for flag in flags[4:]] == [flag.tobytes() for flag in flags[:4]]
        if codes_out:
            assert coded_alike(device, out, (rows, columns), (codes, scales), codes_out)


ORDERED = {Order.TILES: in_tiles, Order.CORES: in_cores}


def coded_alike(device, values, shape, made, order):
    """Whether codes and scales, in this order, are those of the kernel that makes nothing else."""
    rows, columns = shape
    codes, scales = device.empty(rows * columns), device.empty(rows * columns // 8)
    args = constants(columns)
    device.launch(Launch("vox_quantise_32", (values, codes, scales), args, (columns // 32, rows)))
    codes, scales = codes.view(np.int8).reshape(rows, columns), scales.view(np.float32).reshape(rows, -1)
    found = [buffer.tobytes() for buffer in made]
    if order == Order.ROWS:
        return [found[0][: codes.nbytes], found[1][: scales.nbytes]] == [codes.tobytes(), scales.tobytes()]
    mine, theirs = ORDERED[order](codes), scales_in_tiles(scales)
    is_row = ORDERED[order](np.zeros_like(codes)) == 0
    got = [np.frombuffer(found[0], np.int8)[: len(mine)], np.frombuffer(found[1], np.float32)[: len(theirs)]]
    is_scale = ~np.isnan(theirs)
    return (
        got[0][is_row].tobytes() == mine[is_row].tobytes()
        and got[1][is_scale].tobytes() == theirs[is_scale].tobytes()
    )


@pytest.mark.parametrize(
    ("codes_out", "floats_out"), [(0, 1), *((order, 1) for order in Order), (2, 0), (3, 0)]
)
@pytest.mark.parametrize("columns", [128, 2176])
@pytest.mark.parametrize("kind", ["norm", "norm in one group", "silu_gate", "as it is"])
def test_what_stands_between_products_gives_the_bytes_of_two_kernels(
    cuda_library, kind, columns, codes_out, floats_out
):
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
    if kind.startswith("norm"):
        part = norm_part(rows if kind == "norm" else 65, columns)
        assert -(-columns // part) == (1 if columns == 128 or kind != "norm" else 3)
        device.launch(
            Launch("vox_norm", (x, other, apart, flags[0]), constants(1, columns, 1e-6), (GROUP, rows))
        )
        args, kernel = constants(columns, part, floats_out, codes_out, 1e-6), "vox_step_between_norm"
        threads, group = (-(-columns // part) * NORM_THREADS, rows), NORM_THREADS
    else:
        mode = 2 if kind == "silu_gate" else 0
        apart = device.put(values)
        if mode:
            args = constants(rows, columns, 0.0)
            device.launch(Launch("vox_silu_gate", (x, other, apart, flags[0]), args, (rows * columns, 1)))
        args, kernel = constants(columns, mode, floats_out, codes_out), "vox_step_between_gate"
        threads, group = (columns // 4, rows), GROUP
    device.launch(Launch(kernel, (x, other, out, *made, flags[1]), args, threads, group=group))
    if kind != "as it is":
        assert out.tobytes() == (apart if floats_out else device.empty(size)).tobytes()
    assert flags[0].tobytes() == flags[1].tobytes()
    if codes_out:
        assert coded_alike(device, apart, (rows, columns), made, codes_out)
    else:
        assert not made[0].any()


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 2, 64), (17, 3, 128), (3, 1, 84), (5, 5, 256), (2, 1, 136)]
)
def test_heads_are_placed_with_the_bytes_of_the_operators(cuda_library, order, heads, kv_heads, width):
    """Warps and groups with fewer heads than they have room for, wide heads; heads with infinities, zeros."""
    rows = [(0, [1] * 3), (1, [2]), (2, [3] * 2)]

    def placed(is_noted):
        launched: list[str] = []
        device = ShimDevice(cuda_library, order=order, watch=lambda launch, _: launched.append(launch.kernel))
        ops, sequences = CudaOps(device, facts={}), Sequences()
        sequences.step([(0, [1] * (BLOCK - 1)), (2, [1] * 5)])
        batch = sequences.step(rows)
        count = len(batch.positions)
        cache = ops.new_kv_cache(layers=1, kv_heads=kv_heads, head_dim=width, blocks=4)
        table = ops.rotary_table([1 << (40 - i % 30) for i in range(width // 2)], None)
        raw = [drawn(20 + i, count, n * width) for i, n in enumerate((heads, kv_heads, kv_heads))]
        raw[0][1, 3] = np.inf
        raw[0][2, :width] = 0
        raw[1][3, -1] = -np.inf
        raw[1][4, :width] = 1e30
        weights = [GridTensor(device.put(drawn(30 + i, width)), (width,)) for i in range(2)]
        q, k, v = (GridTensor(device.put(values), values.shape) for values in raw)
        if is_noted:
            ops._nodes = Nodes(Launcher(device, ops))
        q = ops.head_norm(q, weights[0], heads, 1e-6, name="q_norm")
        k = ops.head_norm(k, weights[1], kv_heads, 1e-6, name="k_norm")
        q = ops.rope(q, heads, table, batch.positions, name="q")
        k = ops.rope(k, kv_heads, table, batch.positions, name="k")
        ops.kv_append(cache, 0, k, v, batch)
        faults = [(fault.name, fault.rows) for fault in ops.take_faults()]
        assert ("vox_step_place" in launched) == is_noted
        return q.buffer.tobytes(), cache.keys[0].tobytes(), cache.values[0].tobytes(), faults

    expected = placed(is_noted=False)
    assert [name for name, _ in expected[3]] == ["q_norm", "k_norm", "q", "k"]
    assert placed(is_noted=True) == expected


@pytest.mark.parametrize("readers", ["one product", "two products", "a product and a sum"])
def test_floats_that_products_read_as_codes_alone_are_not_written(cuda_library, readers):
    rows, columns = 3, 256

    def made(is_noted):
        device = ShimDevice(cuda_library)
        ops = CudaOps(device, facts={})
        values = [device.put(drawn(40, rows, columns)), device.put(drawn(41, columns))]
        x, weight = GridTensor(values[0], (rows, columns)), GridTensor(values[1], (columns,))
        first, second = code_weights(device, 40, columns), code_weights(device, 24, columns)
        if is_noted:
            ops._nodes = Nodes(Launcher(device, ops))
        y = ops.rms_norm(x, weight, 1e-6, name="norm")
        out = [ops.linear(y, first, name="first")]
        if readers == "two products":
            out.append(ops.linear(y, second, name="second"))
        elif readers == "a product and a sum":
            out.append(ops.add(x, y, name="sum"))
        bytes_ = [tensor.buffer.tobytes() for tensor in out]
        if is_noted:
            assert y.codes is not None
            assert y.is_made == (readers != "one product")
        return bytes_

    assert made(is_noted=True) == made(is_noted=False)
