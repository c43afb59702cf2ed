"""What goes wrong on GPUs, planted once each into the lane on the CPU: all of it shows."""

from __future__ import annotations

from fractions import Fraction
from importlib import resources
from pathlib import PurePosixPath
from types import SimpleNamespace

import numpy as np
import pytest

from grid_shim.device import LaunchError
from grid_shim.shapes import SHAPES
from mens_core.conformance.cases import CASES
from mens_core.conformance.inputs import floats, put, stored_float, weight
from mens_core.grid_device import Launch, constants
from mens_core.kernel_source import GROUP, _Joined
from mens_core.ops import BLOCK, Batch
from mens_core.wishes import Penalty, Wish
from mens_torch_mps.kernel_text import metal_source
from mens_torch_mps.tripwires import TRIPWIRES
from vox_plugin_api.backend import BackendError

EVERY = {**CASES, **SHAPES}


def planted(*replacements, only=None):
    """The lane's source with each text, which must be there, replaced by another.

    With `only`, a header of the grid's, it is the kernels of that one and the lane's own that every start
    needs: a compiler takes seconds for all of them.
    """
    source = metal_source()
    if only is not None:
        joined = _Joined(resources.files("mens_core").joinpath("kernels"))
        joined.take(PurePosixPath("grid", only))
        own = source[source.index("// Writes what came with the command") :]
        source = "\n".join(["#define VOX_METAL 1", *joined.lines, own])
    for old, new in replacements:
        assert old in source, old
        source = source.replace(old, new)
    return source


def is_caught(case, lane, reference):
    try:
        found = [np.asarray(array).tobytes() for array in case(lane)]
    except LaunchError:
        return True
    return found != [np.asarray(array).tobytes() for array in case(reference())]


CHANGED = (
    ("two_sums, f_add(f_add(a, b), c)", "two_sums, f_add(a, f_add(b, c))"),
    ("fma, f_fma(a, b, c)", "fma, f_add(f_mul(a, b), c)"),
    ("quotient, f_div(a, b)", "quotient, f_mul(a, f_div(1.0f, b))"),
    ("root, f_sqrt(a)", "root, f_mul(a, f_div(1.0f, f_sqrt(a)))"),
    ("sum_less_term, f_sub(f_add(a, b), c)", "sum_less_term, f_add(b, f_sub(a, c))"),
)
"""What a compiler may do, and may not."""


@pytest.mark.parametrize(
    ("changes", "stand_in", "named"),
    [
        (
            [("#pragma METAL fp contract(off)", "// #pragma METAL fp contract(off)")],
            {},
            ["products and sums are fused"],
        ),
        ([], {"flush": False}, ["subnormal results are kept", "subnormal operands are kept"]),
        (
            CHANGED,
            {},
            [
                "sums are reordered",
                "fma rounds twice",
                "division is not correctly rounded",
                "the square root is not correctly rounded",
                "sums are simplified",
            ],
        ),
    ],
)
def test_arithmetic_of_other_rules_does_not_start(started, changes, stand_in, named):
    """Contraction left on, subnormals kept, and what else there is."""
    with pytest.raises(BackendError, match="the Metal lane was not started") as caught:
        started(planted(*changes, only="elementwise.h") if changes else None, **stand_in)
    assert caught.value.error.code == "arithmetic-not-exact"
    assert caught.value.error.facts["operations"] == named


def test_what_the_tripwires_expect_is_exact():
    """By rational numbers: none of the results is what the wrong way gives."""

    def number(bits):
        return Fraction(float(np.uint32(bits).view(np.float32)))

    def nearest(exact, bits):
        below, above = (Fraction(float(np.uint32(bits + step).view(np.float32))) for step in (-1, 1))
        return abs(exact - number(bits)) < min(abs(exact - below), abs(exact - above))

    fused, sums, fma, _, _, division, root, _ = TRIPWIRES
    product = np.float32(number(fused.a) * number(fused.b))
    assert (product + np.float32(1)).view(np.uint32) == fused.expected
    assert not nearest(number(fused.a) * number(fused.b) + number(fused.c), fused.expected)
    assert number(fma.a) * number(fma.b) + number(fma.c) == number(fma.expected)
    assert nearest(number(division.a) / number(division.b), division.expected)
    # Between the squares of the two middles beside it.
    low, high = ((number(root.expected) + number(root.expected + step)) / 2 for step in (-1, 1))
    assert low**2 < number(root.a) < high**2
    assert number(sums.a) + number(sums.b) + number(sums.c) != number(sums.expected)


def choose(device):
    x, out = device.put(floats(3, 2, 300)), device.empty(8)
    device.launch(Launch("vox_argmax", (x, out), constants(300), (2 * GROUP, 1)))


def attend(device):
    q, k, v = (device.put(floats(n, BLOCK, 16)) for n in range(3))
    at = np.array([BLOCK - 1], np.int32)
    places = (device.put(at), device.put(at * 0), device.put(at * 0))
    buffers = (q, k, v, *places, device.empty(64), device.zeros(4))
    device.launch(Launch("vox_attention", buffers, constants(1, 1, 16, 16, 1, 0, 0.25, 0.0), (GROUP, 1)))


BARRIERS = {
    "attention": ("VOX_BARRIER();  // the scores are read; each becomes its weight", "attention.h", attend),
    "argmax": ("ids[VOX_LOCAL] = id;\n  VOX_BARRIER();", "choose.h", choose),
}


@pytest.mark.parametrize("name", BARRIERS)
def test_a_missing_barrier_is_told_as_a_race(started, name):
    """In one order of the threads the bits may be right by chance; the race is told in any."""
    text, header, launch = BARRIERS[name]
    source = planted((text, text.replace("VOX_BARRIER();", "")), only=header)
    for order in (0, 1):
        with pytest.raises(
            LaunchError, match=rf"vox_{name}.*(no barrier between|read before it was written)"
        ):
            launch(started(source, order=order).device)


def test_memory_of_a_group_that_nobody_wrote(started):
    change = ("most[VOX_LOCAL] = best;", "if (VOX_LOCAL != 5) most[VOX_LOCAL] = best;")
    with pytest.raises(LaunchError, match="read before it was written"):
        choose(started(planted(change, only="choose.h")).device)


def test_a_simd_width_that_is_assumed(started, reference):
    """The host computes its grid from the width it read; a kernel that knows better, or a host, is seen."""

    def case(ops):
        matrix = ops.load_matrix(weight("f32", 5, 9, 2560))
        yield ops.to_host(ops.linear(put(ops, floats(6, 1, 2560)), matrix, name="linear"))

    assumed = planted(("const int32_t width = (int32_t)vox_simd_width;", "const int32_t width = 32;"))
    assert not is_caught(case, started(assumed).lane(), reference)
    for simd in (16, 64):
        assert is_caught(case, started(assumed, simd=simd).lane(), reference), simd
    # A host that takes it for less than it is starts too few groups.
    assert is_caught(case, started(simd=64, told_simd=32).lane(), reference)


def test_a_simd_width_that_does_not_divide_a_group(started):
    with pytest.raises(BackendError, match="SIMD groups of 48 threads") as caught:
        started(told_simd=48)
    assert caught.value.error.code == "simd-width"


def test_a_shuffle_that_not_all_reach(started):
    source = planted(
        ("if (output >= args.outputs) return;", "if (output >= args.outputs || vox_simd_lane == 3) return;")
    )
    with pytest.raises(LaunchError, match="do not meet at a shuffle"):
        list(EVERY["linear/f32/1x130x128"](started(source, optimise="-O0").lane()))


def swapped(kernel, first, second):
    def change(name, arguments):
        arguments = list(arguments)
        if name == kernel:
            arguments[first], arguments[second] = arguments[second], arguments[first]
        return tuple(arguments)

    return change


@pytest.mark.parametrize(
    ("kernel", "case", "pair"),
    [
        ("vox_silu_gate", "silu_gate/2x128", (0, 1)),
        ("vox_rope", "rope/3x40", (0, 1)),
        ("vox_attention", "attention/4/2x64/None/None", (1, 2)),
        ("vox_chunked_f32", "linear/f32/2x7x129", (0, 1)),
        ("vox_linear_q8_0", "linear/q8_0/5x5x128", (0, 2)),
        ("vox_chunked_q8_0", "linear/q8_0/1x5x128", (0, 2)),
    ],
)
def test_arguments_in_another_order(started, reference, kernel, case, pair):
    if case not in EVERY:

        def run(ops):
            matrix = ops.load_matrix(weight("q8_0", 5, 5, 128))
            yield ops.to_host(ops.linear(put(ops, floats(6, 5, 128)), matrix, name="linear"))

    else:
        run = EVERY[case]
    assert is_caught(run, started(change=swapped(kernel, *pair)).lane(), reference)


def send(ops):
    ops._device.put(np.arange(1300, dtype=np.int32))


def multiply(ops):
    for format_ in ("f32", "q4_k"):
        matrix = ops.load_matrix(weight(format_, 5, 9, 512))
        ops.linear(put(ops, floats(6, 1, 512)), matrix, name="linear")


def read(ops):
    """A step's reading: scores, a penalty, a draw and the highest token."""
    x = floats(3, 1, 64)
    table = ops.load_matrix(stored_float(x, "table"))
    head = ops.load_matrix(weight("f32", 5, 40, 64))
    step = SimpleNamespace(
        hidden=lambda ops, batch, cache: ops.embed(table, batch.token_ids, 1.0, name="hidden"),
        logits=lambda ops, hidden, batch, cache: ops.linear(hidden, head, name="head"),
    )
    one = np.zeros(1, np.int32)
    batch = Batch(one, one, np.array([0, 1], np.int32), one.reshape(1, 1), one)
    ones = np.ones(1, np.float32)
    wish = Wish(0, True, Penalty(one, ones, ones), True, lambda weights: 0, 0.5)
    ops.run_and_read(step, batch, None, [wish])
    ops.run_and_read(step, batch, None, [Wish(0, is_chosen=True)])


@pytest.mark.parametrize(
    ("kernel", "run", "buffers"),
    [
        ("vox_copy_words", read, 2),
        ("vox_token_weights", read, 3),
        ("vox_argmax", read, 2),
        ("vox_write_words", send, 1),
        ("vox_chunked_f32", multiply, 3),
        ("vox_chunked_q4_k", multiply, 4),
    ],
)
def test_a_buffer_one_element_short(started, kernel, run, buffers):
    """Each in turn; but for the flags, which nobody writes where all is finite."""
    for number in range(buffers):

        def change(name, arguments, number=number):
            if name != kernel:
                return arguments
            element = 4 if arguments[number].nbytes % 4 == 0 and number != 0 else 1
            return (*arguments[:number], arguments[number][:-element], *arguments[number + 1 :])

        with pytest.raises(LaunchError, match=rf"{kernel}, group .* of buffer {number}, which has"):
            run(started(change=change).lane())


def test_groups_that_are_not_whole(started):
    kernel = started().device._kernels["vox_norm"]
    with pytest.raises(LaunchError, match="no whole groups"):
        kernel(threads=(GROUP - 1, 1), group_size=(GROUP, 1), arg_casts="int32")
