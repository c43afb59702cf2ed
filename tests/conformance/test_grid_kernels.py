"""The grid kernels' Metal and CUDA forms, run on the CPU and compared with the scalar reference.

This says nothing of Apple's or NVIDIA's compilers and hardware. It says that the one source, run as it is
written, gives the reference's bytes, stays inside its buffers, needs each of its barriers, and that what
commonly goes wrong on a GPU would show.
"""

from __future__ import annotations

import re
from itertools import count, product
from pathlib import Path

import numpy as np
import pytest

from grid_shim import build as shim
from grid_shim.check import ALL, caught, changed, results
from grid_shim.device import LaunchError, ShimDevice, native_angles
from grid_shim.shapes import LONG
from mens_core.grid_device import Launch, constants
from mens_core.grid_training_ops import GridTrainingOps
from mens_core.kernel_source import GROUP, grid_source

TARGETS = ("metal", "cuda")


@pytest.mark.parametrize(
    "target, name",
    # The CUDA form runs over all of them where its vectors are recorded (test_grid_on_cuda).
    [
        *(("metal", name) for name in ALL),
        *(("cuda", name) for name in ALL if name.startswith(("quick/", "training/"))),
    ],
)
def test_the_kernels_give_the_reference_s_bytes(lane, expected, target, name):
    assert results(ALL[name], lane(target)) == expected(name)


@pytest.mark.parametrize(
    "name", [name for name in ALL if "attention" in name or "norm" in name or "choose" in name]
)
def test_the_order_of_threads_and_the_place_of_buffers_do_not_matter(lane, expected, name):
    """Threads of a group run last to first, and it is a buffer's start that is guarded to the byte."""
    assert results(ALL[name], lane("metal", order=1, at_end=False)) == expected(name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("which", ["exp", "log", "silu", "gelu", "tanh"])
def test_elementary_functions(library, lane, target, which):
    from lanes.cpu_calls import FUNCTIONS, domain

    bits = np.arange(0, 1 << 32, 131_101, dtype=np.uint64).astype(np.uint32)
    x = domain(which, bits)
    out = np.empty_like(x)
    library.reference["function"](FUNCTIONS[which], x.ctypes.data, len(x), out.ctypes.data)
    device = lane(target)._device
    found = device.zeros(x.nbytes)
    args = constants(len(x), FUNCTIONS[which])
    device.launch(Launch("vox_function", (device.put(x), found), args, (len(x), 1)))
    assert found.tobytes() == out.tobytes()


# --- planted errors ----------------------------------------------------------------------------


FUSED = ("linear/q8_0/near ties", "linear/q6_k/near ties")
"""Where a product meets a sum in the source; elsewhere the rules leave a compiler little to fuse."""


def test_contraction_left_on_shows(lane, expected):
    """On Metal it is the pragma that keeps it off, on CUDA an option."""
    off = "#pragma METAL fp contract(off)"
    metal = changed("metal", (off, f"{off}\n#pragma METAL fp contract(on)"))
    for name in FUSED:
        assert caught(name, lane("metal", metal, optimise="-O2"), expected), name
        assert caught(name, lane("cuda", None, ["--fmad=true"], optimise="-O2"), expected), name


@pytest.mark.parametrize("name", ["add/flushed", "silu_gate/flushed", "every half/bf16"])
def test_subnormals_that_are_not_flushed_show(lane, expected, name):
    assert caught(name, lane("metal", flush=False), expected)


SWAPPED = {
    "silu_gate/2x128": ("silu_gated(a, b)", "silu_gated(b, a)"),
    "gelu_gate/2x128": ("gelu_gated(a, b)", "gelu_gated(b, a)"),
    "rope/3x40": ("x[first + args.pairs], cosine, sine)", "x[first + args.pairs], sine, cosine)"),
    "attention/2/2x136/64/None": (
        "VOX_IN(float, keys, 1), VOX_IN(float, values, 2)",
        "VOX_IN(float, values, 1), VOX_IN(float, keys, 2)",
    ),
    "norm/640": (
        "VOX_IN(float, x, 0), VOX_IN(float, weight, 1)",
        "VOX_IN(float, weight, 0), VOX_IN(float, x, 1)",
    ),
    "linear/f32/2x7x129": (
        "VOX_IN(float, x, 0), VOX_IN(F::Stored, weight, 1)",
        "VOX_IN(F::Stored, weight, 0), VOX_IN(float, x, 1)",
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SWAPPED)
def test_swapped_arguments_show(lane, expected, target, name):
    # The 16-bit formats of `linear` would no longer compile.
    source = changed(target, SWAPPED[name])
    if name.startswith("linear"):
        source = source.replace("VOX_FLOAT_WEIGHTS(f16, F16)", "").replace(
            "VOX_FLOAT_WEIGHTS(bf16, Bf16)", ""
        )
    assert caught(name, lane(target, source), expected)


@pytest.mark.parametrize(
    "case, kernel, number",
    [
        ("add/2x1029", "vox_add", 1),
        ("softcap/20", "vox_softcap", 1),
        ("norm/257", "vox_norm", 1),
        ("rope/3x40", "vox_rope", 1),
        ("linear/f16/2x7x129", "vox_linear_f16", 1),
        ("linear/q6_k/1x1x256", "vox_linear_q6_k", 2),
        ("linear/q8_0/1x5x128", "vox_quantise_32", 1),
        ("embed/q5_k", "vox_embed_q5_k", 2),
        ("attention/1/1x8/None/None", "vox_attention", 0),
        ("attention/1/1x8/None/None", "vox_kv_append", 1),
        ("choose/3x128", "vox_argmax", 0),
        ("choose/3x128", "vox_token_weights", 2),
        ("choose/3x128", "vox_log_normaliser", 1),
        ("take_rows", "vox_take_rows", 2),
    ],
)
def test_a_buffer_one_element_short_is_named(lane, case, kernel, number):
    ops = lane("metal")
    launch = ops._device.launch

    def shortened(call):
        if call.kernel == kernel:
            buffers = list(call.buffers)
            element = 1 if buffers[number].nbytes % 4 else 4
            buffers[number] = buffers[number][:-element].copy()
            call = Launch(call.kernel, tuple(buffers), call.constants, call.threads)
        launch(call)

    ops._device.launch = shortened
    with pytest.raises(LaunchError, match=rf"{kernel}, group .* of buffer {number}, which has"):
        results(ALL[case], ops)


def test_a_read_before_a_buffer_is_named(lane):
    source = changed("metal", ("const float a = a_side[at]", "const float a = a_side[at - 1]"))
    with pytest.raises(LaunchError, match="byte -4 of buffer 0"):
        results(ALL["add/3x127"], lane("metal", source, at_end=False))


BARRIERS = (
    "attention/4/2x64/None/None",
    f"norm/{LONG}",
    f"choose/2x{LONG}",
    "training/attention_backward",
    "linear/f32/17x129x300",
    "linear/q5_0/17x129x160",
    "linear/q6_k/17x129x512",
    "linear_backward/f32/3x128x1",
    "linear_backward/f32/17x129x3",
    "example_products/128+129+1/17x129",
    "cross_entropy/2x130",
)
"""Cases in which the barriers are needed, each in some of them."""


def test_each_barrier_is_needed(lane, expected):
    """Take away one after the other: in one order of the threads or the other, bits change."""
    numbers = count()
    source = re.sub(
        r"VOX_BARRIER\(\);",
        lambda found: f"if (vox_shim::is_kept({next(numbers)})) {found[0]}",
        grid_source("metal"),
    )
    places = next(numbers)
    assert places >= 15
    missed = set(range(places))
    for name, order in product(BARRIERS, (0, 1)):
        ops = lane("metal", source, order=order)
        ops._device.barriers_met()
        assert results(ALL[name], ops) == expected(name)
        for place in sorted(missed & ops._device.barriers_met()):
            with ops._device.without_barrier(place):
                if caught(name, ops, expected):
                    missed.remove(place)
    assert not missed


def test_a_thread_that_leaves_before_a_barrier_is_named(lane):
    source = changed(
        "metal",
        (
            "VOX_SHARED float weights[kBlock];",
            "VOX_SHARED float weights[kBlock]; if (VOX_LOCAL > 100) return;",
        ),
    )
    with pytest.raises(LaunchError, match="a thread ended before a barrier"):
        results(ALL["attention/1/1x8/None/None"], lane("metal", source))


def test_shared_memory_is_bounded(lane):
    source = changed("metal", ("most[VOX_LOCAL] = best;", "most[VOX_LOCAL + 1] = best;"))
    with pytest.raises(LaunchError, match="shared memory was used outside its bounds"):
        results(ALL["choose/3x128"], lane("metal", source))


def test_every_kernel_is_run(lane, library, shim_folder):
    """What no case reaches is proven by nothing."""
    seen = set()
    built = shim.build(shim_folder, grid_source("metal"), "metal")
    for case in ALL.values():
        device = ShimDevice(built, watch=lambda launch, before: seen.add(launch.kernel))
        results(case, GridTrainingOps(device, native_angles(library.reference)))
    kernels = set(re.findall(r"kernel void (vox_\w+)\(", shim.preprocessed(grid_source("metal"), "metal")))
    assert kernels - seen == {"vox_function"}
    assert len(kernels) > 30


def test_the_group_is_the_kernels_group():
    folder = Path(__file__).parents[2] / "plugins/mens-core/src/mens_core/kernels/grid"
    assert f"enum {{ kGroup = {GROUP} }};" in (folder / "args.h").read_text()
