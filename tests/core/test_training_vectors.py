"""The self-test of a lane that trains: it passes for the reference's bits and for nothing else."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from mens_core.conformance.cases_training import (
    TRAINING_CASES,
    TRAINING_VECTORS,
    training_test,
)
from mens_core.conformance.quick import compare, digests, read_vectors
from mens_core.conformance.record import main as record
from mens_core.ops import Ops
from mens_core.training_ops import AttentionSaved, TrainingOps
from vox_plugin_api.backend import BackendError

F32 = np.float32


@pytest.fixture(scope="module")
def training_lane(request):
    """The module, or a visible skip."""
    try:
        from mens_cpu_ref import training_lane
        from mens_cpu_ref.library import load_library

        load_library()
    except (ImportError, BackendError) as problem:
        reason = f"mens-cpu-ref can't be used here: {problem}"
        if "mens-cpu-ref" in request.config.getoption("--require-backend"):
            pytest.fail(reason)
        pytest.skip(reason)
    return training_lane


@pytest.fixture(scope="module")
def reference_class(training_lane):
    return training_lane.ReferenceTrainingOps


@pytest.mark.parametrize("side", ["kernels", "reference"])
def test_the_lane_passes(side, training_lane):
    from mens_cpu_ref.library import load_library

    made = (
        training_lane.ReferenceTrainingOps()
        if side == "reference"
        else training_lane.CpuTrainingOps(load_library())
    )
    result = training_test(lambda: made)
    assert result.failed == []
    assert result.cases == len(TRAINING_CASES)


def test_every_operator_of_the_contract_has_a_case():
    tested = {name.split("/")[0] for name in TRAINING_CASES}
    operators = TrainingOps.__abstractmethods__ - Ops.__abstractmethods__
    # In every other case: operands come in through the one, and the other precedes its backward.
    assert tested >= operators - {"from_host", "attention_saving"}


def test_the_shipped_vectors_are_the_reference_s(reference_class, tmp_path):
    made = tmp_path / TRAINING_VECTORS
    lane = f"{reference_class.__module__}:{reference_class.__name__}"
    assert record([lane, "--training", "--to", str(made)]) == 0
    assert made.read_bytes() == read_vectors(TRAINING_VECTORS)


def test_the_test_takes_milliseconds(training_lane):
    from mens_cpu_ref.library import load_library

    lane = training_lane.CpuTrainingOps(load_library())
    taken = []
    for _ in range(5):
        start = time.thread_time()  # neither what else this machine does nor how the pool waits
        training_test(lambda: lane)
        taken.append(time.thread_time() - start)
    assert min(taken) < 0.2, f"{min(taken) * 1e3:.1f} ms"


def test_a_worker_that_only_serves_imports_none_of_it():
    code = (
        "import sys, mens_core.conformance.quick, mens_cpu_ref.lane, mens_cpu_ref.library; "
        "assert not [m for m in sys.modules if 'training' in m or 'backward' in m]"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


# --- planted bugs: what a lane might really get wrong --------------------------------------------


def rows(like, values):
    return type(like)(np.ascontiguousarray(values, F32))


class NormWithoutItsOwnGradient:
    """The root mean square taken as a constant."""

    def head_norm_backward(self, dy, x, weight, heads, eps, *, name):
        ones = rows(weight, np.ones_like(weight.values))
        normed = self.head_norm(x, ones, heads, eps, name=name).values
        inverse = np.divide(normed, x.values, out=np.zeros_like(normed), where=x.values != 0)
        return rows(x, dy.values * np.tile(weight.values, heads) * inverse)


class NormSumOverNormed:
    """The second sum over x inv instead of over x: the same number, other roundings."""

    def head_norm_backward(self, dy, x, weight, heads, eps, *, name):
        width = len(weight.values)
        ones = rows(weight, np.ones_like(weight.values))
        n = self.head_norm(x, ones, heads, eps, name=name).values.reshape(-1, width)
        a = x.values.reshape(-1, width)
        inverse = (F32(1) / np.sqrt((a * a).mean(axis=1, keepdims=True, dtype=F32) + F32(eps))).astype(F32)
        g = dy.values.reshape(-1, width) * weight.values
        c = (g * n).mean(axis=1, keepdims=True, dtype=F32)
        return rows(x, ((g - n * c) * inverse).reshape(x.values.shape))


class RopeForwards:
    def rope_backward(self, dy, heads, table, positions, *, name):
        return self.rope(dy, heads, table, positions, name=name)


class SigmoidByCancellation:
    """1 - r where e r is written."""

    def silu_gate_backward(self, dy, gate, up, *, name):
        _, dup = super().silu_gate_backward(dy, gate, up, name=name)
        x = np.maximum(gate.values, F32(-88))
        with np.errstate(over="ignore"):
            r = F32(1) / (F32(1) + np.exp(-x))
            return rows(gate, (dy.values * up.values) * (r + x * r * (F32(1) - r))), dup


class GatesExchanged:
    def gelu_gate_backward(self, dy, gate, up, *, name):
        return super().gelu_gate_backward(dy, gate, up, name=name)[::-1]


class SlopeByCancellation:
    """1 - t * t."""

    def softcap_backward(self, dy, x, cap, *, name):
        t = self.softcap(x, cap, name=name).values / F32(cap)
        return rows(x, dy.values * (F32(1) - t * t))


class WindowOneShort:
    def attention_backward(self, dy, q, saved, cache, layer, batch, spec, *, name):
        if spec.window is not None:
            spec = dataclasses.replace(spec, window=spec.window - 1)
        return super().attention_backward(dy, q, saved, cache, layer, batch, spec, name=name)


class NoSlopeOfTheSoftcap:
    """The softcap's derivative left out: gradients of the capped score."""

    def attention_backward(self, dy, q, saved, cache, layer, batch, spec, *, name):
        if spec.softcap is None:
            return super().attention_backward(dy, q, saved, cache, layer, batch, spec, name=name)
        flat = dataclasses.replace(spec, softcap=1e6)
        return super().attention_backward(dy, q, saved, cache, layer, batch, flat, name=name)


class ScaleOnTheQueries:
    """The scale multiplied into the queries before the dot products."""

    def attention_backward(self, dy, q, saved, cache, layer, batch, spec, *, name):
        scaled, one = rows(q, q.values * F32(spec.scale)), dataclasses.replace(spec, scale=1.0)
        dq, dk, dv = super().attention_backward(dy, scaled, saved, cache, layer, batch, one, name=name)
        return rows(q, dq.values * F32(spec.scale)), dk, dv


class LogarithmOfTheSum:
    """l as it is after the last block, but m + log l kept in their place."""

    def attention_saving(self, q, cache, layer, batch, spec, *, name):
        saved = super().attention_saving(q, cache, layer, batch, spec, name=name)
        both = saved.m.values + np.log(saved.l.values)
        return AttentionSaved(saved.out, rows(saved.m, both), rows(saved.l, np.ones_like(saved.l.values)))


class SilentAboutTheSecond:
    """Only the first gradient is looked at."""

    def take_faults(self):
        faults = super().take_faults()
        return [dataclasses.replace(f, rows=tuple(r for r in f.rows if r != 2)) for f in faults]


ATTENTION = {"attention_backward", "attention_backward/window", "attention_backward/softcap"}
PLANTED = [
    (NormWithoutItsOwnGradient, {"rms_norm_backward", "head_norm_backward"}),
    (NormSumOverNormed, {"rms_norm_backward", "head_norm_backward"}),
    (RopeForwards, {"rope_backward"}),
    (SigmoidByCancellation, {"silu_gate_backward"}),
    (GatesExchanged, {"gelu_gate_backward"}),
    (SlopeByCancellation, {"softcap_backward"}),
    (WindowOneShort, {"attention_backward/window"}),
    (NoSlopeOfTheSoftcap, {"attention_backward/softcap"}),
    (ScaleOnTheQueries, ATTENTION),
    (LogarithmOfTheSum, ATTENTION),
    (SilentAboutTheSecond, {"backward_not_finite"}),
]


@pytest.mark.parametrize(("bug", "cases"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
def test_a_planted_bug_is_found_and_named(bug, cases, reference_class):
    lane = type(bug.__name__, (bug, reference_class), {})
    assert set(training_test(lane).failed) == cases


@pytest.mark.parametrize("gradient", [0, 1, 2])
def test_one_bit_of_one_element_is_enough(gradient, reference_class):
    class OneBit(reference_class):
        def attention_backward(self, *arguments, **names):
            made = super().attention_backward(*arguments, **names)
            made[gradient].values.view(np.uint32)[-1, -1] ^= 1
            return made

    found = digests(OneBit(), TRAINING_CASES)
    assert set(compare(found, read_vectors(TRAINING_VECTORS)).failed) == ATTENTION
