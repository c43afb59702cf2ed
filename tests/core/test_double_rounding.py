"""An fma made of float64 rounds twice; the suite names each operator where that shows."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import count

import numpy as np
import pytest

from lanes.every_lane import make_lane
from mens_core.conformance.cases import CASES
from mens_core.conformance.inputs import put, stored_float
from mens_core.conformance.numpy_fma import double_rounded, flushed, fma
from mens_core.conformance.planted import PLANTED
from mens_core.conformance.planted_fma import NumpyFmaOps
from mens_core.conformance.planted_fma_training import with_training_fma
from mens_core.conformance.quick import self_test
from mens_core.conformance.suite import cases_of, outputs_of
from mens_core.float32 import nearest
from vox_host.conformance.expected import load_group

F32 = np.float32
SEEN = {"linear", "rms_norm", "head_norm", "rope", "attention"}
"""Operators with operands on which the double rounding shows. Silu, gelu, tanh, exp and log have none: all
float32 were tried (docs/numerics.md, 15)."""
SEEN_IN_TRAINING = {
    "linear_backward", "example_products", "sum_of_squares", "adamw",
    "rms_norm_backward", "head_norm_backward", "rope_backward", "attention_backward",
}  # fmt: skip
"""The derivatives of silu, gelu and tanh have no such operands either."""


@pytest.fixture
def lane(request):
    return make_lane("mens-cpu-ref:reference", request.config)


@pytest.fixture
def trainer(lane):
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    return ReferenceTrainingOps()


def wrong_cases(ops, groups: Iterable[str] = ("operators",)) -> set[str]:
    wrong = set()
    for group in groups:
        cases = cases_of(group)
        for case in load_group(group).cases:
            found = [output.tobytes() for output in outputs_of(cases[case.name], ops)]
            ops.take_faults()
            if found != [output.data for output in case.outputs]:
                wrong.add(case.name)
    return wrong


def test_the_planted_lane_is_right_but_for_its_fma(lane):
    assert wrong_cases(NumpyFmaOps(lane, fma)) == set()


def test_a_double_rounded_fma_is_seen_in_every_operator(lane):
    wrong = wrong_cases(PLANTED["double-rounded-fma"].plant(lane))
    assert {name.split("/")[0] for name in wrong} == SEEN


def test_it_fails_the_self_test_too(lane):
    failed = self_test(lambda: PLANTED["double-rounded-fma"].plant(lane)).failed
    assert set(failed) == {"linear/f32", "rms_norm", "head_norm", "rope"} <= CASES.keys()


def test_the_norm_that_first_passed_for_right(lane):
    x = np.array([[2.0**-30, 1 + 2.0**-12]], F32)
    for ops, expected in (
        (lane, (817166743, 1068827879)),
        (NumpyFmaOps(lane, double_rounded), (817166744, 1068827880)),
    ):
        w = ops.load_vector(stored_float(np.ones(2, F32)))
        made = ops.to_host(ops.rms_norm(put(ops, x), w, 1e-6, name="norm"))
        assert tuple(made.view(np.uint32)[0].tolist()) == expected


@pytest.mark.parametrize("format_", ["q8_0", "q5_0", "q4_0", "q4_k", "q5_k"])
def test_quantised_chains_meet_a_middle(format_, lane):
    """The same chain by hand: the case's one output is what one rounding gives, and two don't."""
    t = Fraction(4097, 4096)
    if format_.endswith("k"):
        scale, count, before = F32(-(2.0**15) * float(t)), F32(4097 * 2**8), F32(-(2.0**-24) * float(t))
    else:
        scale, count, before = F32(t), F32(4097), F32(127 * 2.0**-70)
    exact = Fraction(float(scale)) * Fraction(float(count)) + Fraction(float(before))
    (found,) = (
        output.ravel() for output in outputs_of(cases_of("operators")[f"linear/{format_}/rounding"], lane)
    )
    assert found.tolist() == [nearest(exact)] == fma(scale, count, before).ravel().tolist()
    assert found.tolist() != double_rounded(scale, count, before).ravel().tolist()


def test_the_fma_in_numpy_is_the_exact_one():
    random = np.random.default_rng(5)
    size = 4000
    a, b, c = (
        np.ldexp(random.integers(-(1 << 24), 1 << 24, size).astype(F32), random.integers(-50, 10, size))
        for _ in range(3)
    )
    # Middles, approached from both sides, and sums that cancel.
    t, u = F32(1 + 2.0**-12), F32(1 + 3 * 2.0**-12)
    a[:4], b[:4] = t, (t, t, u, u)
    c[:4] = (2.0**-60, -(2.0**-60), 2.0**-60, -(2.0**-60))
    c[4:1000] = -(a[4:1000] * b[4:1000])
    right = [
        nearest(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert fma(a, b, c).tolist() == right
    assert double_rounded(a, b, c).tolist() != right
    tiny = np.array([2.0**-127, -(2.0**-127), 2.0**-126], F32)
    assert flushed(tiny).view(np.uint32).tolist() == [0, 0x80000000, 0x00800000]


# --- training ------------------------------------------------------------------------------------------


def test_the_planted_trainer_is_right_but_for_its_fma(trainer):
    assert wrong_cases(with_training_fma(trainer, fma), ("backward", "updates")) == set()


def test_a_double_rounded_fma_is_seen_in_every_operator_of_training(trainer):
    wrong = wrong_cases(PLANTED["double-rounded-training-fma"].plant(trainer), ("backward", "updates"))
    assert {name.split("/")[0] for name in wrong} == SEEN_IN_TRAINING
    formats = {name.split("/")[1] for name in wrong if name.startswith("linear_backward/")}
    assert formats == {"f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"}


@pytest.mark.parametrize(
    ("operator", "what", "of", "number"),
    [
        *(("attention_backward", "c128", 3, n) for n in range(3)),  # delta, q k, dy v
        *(("attention_backward", "add_parts", 3, n) for n in range(3)),  # dq, dv, dk
        *((norm, "c128", 2, n) for norm in ("rms_norm_backward", "head_norm_backward") for n in range(2)),
        ("rms_norm_backward", "fma", 1, 0),
        ("head_norm_backward", "fma", 1, 0),
        *((both, "fma", 2, n) for both in ("rope_backward", "adamw") for n in range(2)),
    ],
)
def test_each_chain_alone_is_seen(operator, what, of, number, trainer):
    """One of the sums that an operator is made of is rounded twice, and all others once."""
    planted = with_training_fma(trainer, fma)
    kit = vars(planted)["_kit"]
    right, wrong, calls = getattr(kit, what), getattr(type(kit)(trainer, double_rounded), what), count()

    def one_of_them(*operands):
        return (wrong if next(calls) % of == number else right)(*operands)

    setattr(kit, what, one_of_them)
    case = next(
        case
        for group in ("backward", "updates")
        for case in load_group(group).cases
        if case.name == f"{operator}/rounding"
    )
    cases = cases_of("updates" if operator == "adamw" else "backward")
    found = [output.tobytes() for output in outputs_of(cases[case.name], planted)]
    assert found != [output.data for output in case.outputs]
