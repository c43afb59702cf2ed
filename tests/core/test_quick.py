"""The self-test of a lane: it passes for the reference's bits and for nothing else."""

from __future__ import annotations

import hashlib
import json
import math
import time

import numpy as np
import pytest

from lanes.every_lane import EXACT, make_lane
from mens_core.conformance.cases import CASES
from mens_core.conformance.inputs import floats, weight
from mens_core.conformance.quick import compare, digests, read_vectors, self_test
from mens_core.conformance.record import main as record
from mens_core.conformance.suite import answer
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import AttentionSpec
from vox_plugin_api.backend import BackendError
from vox_plugin_api.conformance_messages import ConformanceParams


def vectors(cases: dict[str, str], version: int = NUMERICS_VERSION) -> bytes:
    return json.dumps({"numerics_version": version, "cases": cases}).encode()


@pytest.fixture(scope="module")
def reference_class(request):
    return type(make_lane("mens-cpu-ref:reference", request.config))


# --- comparing -----------------------------------------------------------------------------------


def test_equal_digests_pass_and_are_counted():
    written = vectors({"a": "1", "b": "2"})
    result = compare({"a": "1", "b": "2"}, written)
    assert (result.cases, result.failed, result.numerics_version) == (2, [], NUMERICS_VERSION)
    assert result.vectors_digest == hashlib.sha256(written).hexdigest()


@pytest.mark.parametrize(
    ("written", "cases", "failed"),
    [
        (b"", 0, ["a", "b", f"vectors of numerics None, not {NUMERICS_VERSION}"]),
        (vectors({}), 0, ["a", "b"]),
        (vectors({"a": "1"}), 1, ["b"]),
        (vectors({"a": "1", "b": "3"}), 2, ["b"]),
        (vectors({"a": "1", "b": "2", "c": "3"}), 3, ["c"]),
        (vectors({"a": "1", "b": "2"}, version=99), 2, [f"vectors of numerics 99, not {NUMERICS_VERSION}"]),
    ],
    ids=["no file", "no cases", "a case not recorded", "another digest", "a case not run", "other rules"],
)
def test_what_was_not_compared_did_not_pass(written, cases, failed):
    result = compare({"a": "1", "b": "2"}, written)
    assert (result.cases, result.failed) == (cases, failed)


def test_every_operator_of_the_contract_has_a_case():
    families = {name.split("/")[0] for name in CASES}
    operators = {"embed", "linear", "linear_many", "rms_norm", "head_norm", "rope", "attention", "add"}
    operators |= {"silu_gate", "gelu_gate", "softcap", "take_rows", "penalise", "argmax"}
    assert families == operators | {"token_weights", "log_normaliser", "not_finite"}
    assert {name.split("/")[1] for name in CASES if name.startswith("linear/")} == {
        "f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"
    }  # fmt: skip


# --- operands --------------------------------------------------------------------------------------


def test_operands_are_the_same_bytes_everywhere():
    digest = hashlib.sha256(floats(1, 40, 50, span=3, binades=12).astype("<f4").tobytes())
    for format_ in ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"):
        digest.update(weight(format_, 2, 3, 512).data)
    assert digest.hexdigest() == "910af8124d3e4f4f124c38cf3fd79f878eb1d14cf99196f1a8591ad58d02f169"


@pytest.mark.parametrize("format_", ["q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"])
def test_quantised_operands_are_finite_and_not_all_alike(format_):
    import gguf

    stored = weight(format_, 5, 4, 512)
    raw = np.frombuffer(stored.data, np.uint8).reshape(4, -1)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[format_.upper()])
    assert values.shape == (4, 512)
    assert np.isfinite(values).all()
    assert 0 < np.abs(values).max() < 64
    assert len(np.unique(values)) > 200


def test_floats_keep_inside_their_span_and_use_their_binades():
    x = np.abs(floats(3, 5000, span=2, binades=10))
    assert x.max() < 4
    assert np.log2(x[x > 0]).min() < -8


# --- lanes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_lane_passes(name, request):
    lane = make_lane(name, request.config)
    result = self_test(lambda: lane)
    assert result.failed == []
    assert result.cases == len(CASES)


def test_the_shipped_vectors_are_the_reference_s(reference_class, tmp_path):
    made = tmp_path / "quick.json"
    lane = f"{reference_class.__module__}:{reference_class.__name__}"
    assert record([lane, "--to", str(made)]) == 0
    assert made.read_bytes() == read_vectors()
    assert list(tmp_path.iterdir()) == [made]


def test_the_self_test_takes_milliseconds(request):
    lane = make_lane("mens-cpu-ref", request.config)
    best = math.inf
    for _ in range(5):
        # Of this thread: what else the machine does, and what the pool waits for, is not counted.
        start = time.thread_time()
        self_test(lambda: lane)
        best = min(best, time.thread_time() - start)
    assert best < 0.05, f"{best * 1e3:.1f} ms"


def test_an_operator_that_raises_is_named(reference_class):
    class Broken(reference_class):
        def softcap(self, x, cap, *, name):
            raise OSError("no such instruction")

    with pytest.raises(BackendError) as caught:
        self_test(Broken)
    assert caught.value.error.code == "self-test-failed"
    assert caught.value.error.facts == {"case": "softcap", "exception": "OSError: no such instruction"}


# --- planted bugs: what a lane might really get wrong --------------------------------------------

F32 = np.float32


def rows(like, values):
    """A tensor of the reference lane with these values."""
    return type(like)(np.ascontiguousarray(values, F32))


class OtherSumOrder:
    """A library's product: the sums are reassociated."""

    def linear(self, x, weight, *, name):
        y = super().linear(x, weight, name=name)
        if weight.columns != 320:
            return y  # quantised
        eye = np.eye(weight.columns, dtype=F32)
        columns = super().linear(rows(x, eye), weight, name=name).values
        return rows(x, x.values @ columns)


class UnfusedNorm:
    """x * x rounded before it is added, and a division where a reciprocal is written."""

    def rms_norm(self, x, weight, eps, *, name):
        v = x.values
        mean = np.cumsum(v * v, axis=1, dtype=F32)[:, -1:] / F32(v.shape[1])
        return rows(x, v / np.sqrt(mean + F32(eps)) * weight.values)


class NormPlusOneTwice:
    def load_vector(self, stored, *, plus_one=False):
        vector = super().load_vector(stored, plus_one=plus_one)
        vector.values[:] += F32(plus_one)
        return vector


class HeadNormOverTheRow:
    """One norm over all heads instead of one for each."""

    def head_norm(self, x, weight, heads, eps, *, name):
        tiled = rows(x, np.tile(weight.values, heads)) if heads > 1 else weight
        return super().head_norm(x, tiled, 1, eps, name=name)


class RopeInPairs:
    """Neighbours are rotated instead of halves."""

    def rope(self, x, heads, table, positions, *, name):
        v = x.values.reshape(len(x.values), heads, -1)
        halves = np.concatenate([v[:, :, 0::2], v[:, :, 1::2]], axis=2).reshape(x.values.shape)
        y = super().rope(rows(x, halves), heads, table, positions, name=name).values.reshape(v.shape)
        return rows(x, np.stack(np.split(y, 2, axis=2), axis=3).reshape(x.values.shape))


class NoAttentionFactor:
    def rotary_table(self, frequencies, attention_factor):
        return super().rotary_table(frequencies, None)


class WindowOneShort:
    def attention(self, q, cache, layer, batch, spec, *, name):
        window = spec.window and spec.window - 1
        spec = AttentionSpec(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, window, spec.softcap)
        return super().attention(q, cache, layer, batch, spec, name=name)


class NoSoftcap:
    def attention(self, q, cache, layer, batch, spec, *, name):
        spec = AttentionSpec(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, spec.window)
        return super().attention(q, cache, layer, batch, spec, name=name)


class LibraryExp:
    def silu_gate(self, gate, up, *, name):
        with np.errstate(over="ignore"):
            return rows(gate, gate.values / (F32(1) + np.exp(-gate.values)) * up.values)


class ErfGelu:
    """The other GELU."""

    def gelu_gate(self, gate, up, *, name):
        erf = np.vectorize(math.erf)(gate.values / math.sqrt(2))
        return rows(gate, gate.values * F32(0.5) * (F32(1) + erf.astype(F32)) * up.values)


class LastOfEqualLogits:
    def argmax(self, logits):
        v = logits.values + F32(0)
        return (v.shape[1] - 1 - v[:, ::-1].argmax(axis=1)).astype(np.int32)


class MinusZeroIsLess:
    def argmax(self, logits):
        best = super().argmax(logits)
        v = logits.values
        return np.where((v == 0).all(axis=1), np.signbit(v).argmax(axis=1), best).astype(np.int32)


class WeightsRounded:
    """Rounded to nearest instead of down."""

    def token_weights(self, logits, row, temperature):
        weights = super().token_weights(logits, row, temperature)
        return weights + (weights > 0).astype(np.uint64) * (weights < 2**31).astype(np.uint64)


class TemperatureBeforeMaximum:
    def token_weights(self, logits, row, temperature):
        scaled = rows(logits, logits.values[row : row + 1] / F32(temperature))
        return super().token_weights(scaled, 0, 1.0)


class RepetitionIgnoresTheSign:
    def penalise(self, logits, row, token_ids, *, repetition, subtract):
        logits.values[row, token_ids] = logits.values[row, token_ids] / repetition - subtract


class BiasBeforeRepetition:
    def penalise(self, logits, row, token_ids, *, repetition, subtract):
        ones, zeros = np.ones_like(repetition), np.zeros_like(subtract)
        super().penalise(logits, row, token_ids, repetition=ones, subtract=subtract)
        super().penalise(logits, row, token_ids, repetition=repetition, subtract=zeros)


class DoubleLog:
    """A normaliser in double precision: better, and not the bits."""

    def log_normaliser(self, logits):
        v = logits.values.astype(np.float64)
        top = v.max(axis=1)
        return (top + np.log(np.exp(v - top[:, None]).sum(axis=1))).astype(F32)


class NoScale:
    def embed(self, table, token_ids, scale, *, name):
        return super().embed(table, token_ids, None, name=name)


class SilentAboutInfinity:
    def take_faults(self):
        super().take_faults()
        return []


class WrongRowNamed:
    def take_faults(self):
        return [type(f)(f.name, tuple(row + 1 for row in f.rows)) for f in super().take_faults()]


class OneBlockForAll:
    """A cache that forgets the block table."""

    def kv_append(self, cache, layer, k, v, batch):
        tables = np.sort(batch.block_tables, axis=1)
        moved = type(batch)(batch.token_ids, batch.positions, batch.starts, tables, batch.logit_rows)
        super().kv_append(cache, layer, k, v, moved if (tables >= 0).all() else batch)


LINEAR_FLOATS = {"linear/f32", "linear/f16", "linear/bf16"}
ATTENTION = {"attention", "attention/softcap", "attention/window"}
PLANTED = [
    (OtherSumOrder, LINEAR_FLOATS),
    (UnfusedNorm, {"rms_norm"}),
    (NormPlusOneTwice, {"rms_norm"}),
    (HeadNormOverTheRow, {"head_norm"}),
    (RopeInPairs, {"rope"}),
    (NoAttentionFactor, {"rope"}),
    (WindowOneShort, {"attention/window"}),
    (NoSoftcap, {"attention/softcap"}),
    (LibraryExp, {"silu_gate"}),
    (ErfGelu, {"gelu_gate"}),
    (LastOfEqualLogits, {"argmax"}),
    (MinusZeroIsLess, {"argmax"}),
    (WeightsRounded, {"token_weights"}),
    (TemperatureBeforeMaximum, {"token_weights"}),
    (RepetitionIgnoresTheSign, {"penalise"}),
    (BiasBeforeRepetition, {"penalise"}),
    (DoubleLog, {"log_normaliser"}),
    (NoScale, {name for name in CASES if name.startswith("embed/")}),
    (SilentAboutInfinity, {"not_finite"}),
    (WrongRowNamed, {"not_finite"}),
]


@pytest.mark.parametrize(("bug", "cases"), PLANTED, ids=[bug.__name__ for bug, _ in PLANTED])
def test_a_planted_bug_is_found_and_named(bug, cases, reference_class):
    lane = type(bug.__name__, (bug, reference_class), {})
    assert set(self_test(lane).failed) == cases


@pytest.mark.parametrize("operator", ["add", "softcap", "take_rows", "attention", "linear"])
def test_one_bit_of_one_element_is_enough(operator, reference_class):
    def flipped(self, *arguments, **names):
        y = getattr(reference_class, operator)(self, *arguments, **names)
        y.values.view(np.uint32)[-1, -1] ^= 1
        return y

    lane = type("OneBit", (reference_class,), {operator: flipped})
    failed = set(compare(digests(lane(), CASES), read_vectors()).failed)
    assert failed >= {name for name in CASES if name.split("/")[0] == operator}


def test_what_raised_is_named_by_file_and_line_and_its_traceback_is_in_the_log(reference_class, capfd):
    class Broken(reference_class):
        def softcap(self, x, cap, *, name):
            return np.zeros(3) @ np.zeros(4)

    line = Broken.softcap.__code__.co_firstlineno + 1
    for ask in (
        lambda: self_test(Broken),
        lambda: answer(Broken, ConformanceParams(group="operators", case="softcap")),
    ):
        with pytest.raises(BackendError) as caught:
            ask()
        assert f"({__file__}, line {line}, in softcap)" in caught.value.error.message
        assert f'File "{__file__}", line {line}, in softcap' in capfd.readouterr().err
