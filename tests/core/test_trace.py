"""A trace names and digests every operator call, and disturbs nothing."""

import dataclasses
import hashlib

import numpy as np
import pytest

from lanes.batches import Sequences
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import BY_FAMILY, open_model, write_model
from mens_core.ops import Ops
from mens_core.trace import TracingOps


def traced(path, lane, ids=(3, 1, 4, 1, 5), keep=()):
    model = open_model(path, lane).model
    ops = TracingOps(model.ops, keep=keep)
    model = dataclasses.replace(model, ops=ops)
    return ops, model.forward(Sequences().step([(0, list(ids))]), model.new_cache(1)).logits


@pytest.mark.parametrize("family", BY_FAMILY)
def test_every_operator_of_every_layer_is_listed_in_order(family, tmp_path):
    ops, _ = traced(write_model(tmp_path, BY_FAMILY[family]), NumpyLane())
    names = [entry.name for entry in ops.operators]
    assert len(names) == len(set(names)), "a name says which call it was"
    assert names[0] == "embed_tokens"
    norm = "layers.1.post_attention_layernorm" if family == "gemma3" else None
    expected = [
        "layers.1.input_layernorm",
        *(f"layers.1.self_attn.{p}" for p in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
        *(f"layers.1.self_attn.{p}" for p in ("q_rope", "k_rope", "attention", "o_proj")),
        *([norm] if norm else []),
        "layers.1.attention_residual",
    ]
    begin = names.index(expected[0])
    assert names[begin : begin + len(expected)] == expected
    assert names[-1] == ("logit_softcap" if family == "gemma3" else "lm_head")
    by_name = {entry.name: entry for entry in ops.operators}
    assert by_name["layers.0.self_attn.q_proj"].operator == "linear"
    assert by_name["layers.0.self_attn.q_proj"].shape == (5, 64)
    assert by_name["norm"].shape == (1, 40)


def test_tracing_does_not_change_the_answer(tmp_path):
    path = write_model(tmp_path, BY_FAMILY["gemma3"])
    _, found = traced(path, NumpyLane())
    model = open_model(path, NumpyLane()).model
    plain = model.forward(Sequences().step([(0, [3, 1, 4, 1, 5])]), model.new_cache(1)).logits
    assert found.tobytes() == plain.tobytes()


def test_a_digest_is_of_the_bytes_and_what_is_asked_for_is_kept(tmp_path):
    path = write_model(tmp_path, BY_FAMILY["qwen3"])
    ops, logits = traced(path, NumpyLane(), keep=["lm_head"])
    last = ops.operators[-1]
    assert last.digest == hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()
    assert list(ops.kept) == ["lm_head"]
    np.testing.assert_array_equal(ops.kept["lm_head"], logits)


class Nudged(NumpyLane):
    """One bit of one operator is another."""

    def rms_norm(self, x, weight, eps, *, name):
        y = super().rms_norm(x, weight, eps, name=name)
        if name == "layers.2.input_layernorm":
            y[0, 0] = np.nextafter(y[0, 0], np.float32(np.inf))
        return y


def test_two_traces_differ_first_where_the_lanes_do(tmp_path):
    path = write_model(tmp_path, BY_FAMILY["qwen3"])
    one, other = (traced(path, lane)[0].operators for lane in (NumpyLane(), Nudged()))
    first = next(a.name for a, b in zip(one, other, strict=True) if a.digest != b.digest)
    assert first == "layers.2.input_layernorm"


def test_every_operator_of_the_contract_is_passed_on():
    assert set(vars(TracingOps)) >= Ops.__abstractmethods__ | {"linear_many"}
