"""Which layers an adapter lies on, what it is scaled by, its names, its first values, its digest."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from lanes.training import a_config
from mens_core.adapters.initial import initial_tensors
from mens_core.adapters.keys import adapter_digest, parameter_key
from mens_core.adapters.plan import plan_adapter
from mens_core.philox import philox
from vox_plugin_api.backend import BackendError

LINEARS = {
    **{
        f"layers.{i}.{name}": shape
        for i in range(12)
        for name, shape in {
            "self_attn.q_proj": (64, 40),
            "self_attn.k_proj": (32, 40),
            "mlp.down_proj": (40, 56),
        }.items()
    },
    "lm_head": (97, 40),
}


def plan(targets, **options):
    return plan_adapter(a_config(targets, **options).adapter, LINEARS)


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (["q_proj"], 12),
        (["q_proj", "k_proj", "q_proj"], 24),
        (["lm_head"], 1),
        (["layers.3.mlp.down_proj"], 1),
        (["mlp.down_proj", "lm_head"], 13),
    ],
)
def test_a_target_is_a_whole_name_or_its_last_parts(targets, count):
    assert len(plan(targets).matrices) == count


@pytest.mark.parametrize("target", ["q_prj", "proj", "down", "layers.3", "layers.99.mlp.down_proj", ""])
def test_a_target_that_names_nothing_is_an_error_that_helps(target):
    with pytest.raises(BackendError) as caught:
        plan(["q_proj", target])
    assert caught.value.error.code == "adapter-target"
    assert repr(target) in caught.value.error.message
    assert caught.value.error.facts["known"] == ["down_proj", "k_proj", "lm_head", "q_proj"]


def test_matrices_are_numbered_in_the_bytewise_order_of_their_keys():
    made = plan(["q_proj", "lm_head"])
    names = [matrix.name for matrix in made.matrices]
    assert names[:4] == ["lm_head"] + [f"layers.{i}.self_attn.q_proj" for i in (0, 1, 10)]
    assert [matrix.number for matrix in made.matrices] == list(range(13))
    assert list(made.shapes) == sorted(made.shapes, key=str.encode)
    assert made.parameters == 12 * 4 * (40 + 64) + 4 * (40 + 97)


def test_the_embedding_takes_no_update_and_the_error_says_what_does():
    with pytest.raises(BackendError) as caught:
        plan(["embed_tokens"])
    assert caught.value.error.code == "adapter-target"
    assert "lm_head is the head alone" in caught.value.error.remedy


def test_names_are_those_that_peft_writes_for_a_causal_model():
    made = plan(["layers.1.self_attn.q_proj", "layers.10.mlp.down_proj", "lm_head"])
    assert made.shapes == {
        "base_model.model.lm_head.lora_A.weight": (4, 40),
        "base_model.model.lm_head.lora_B.weight": (97, 4),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": (4, 40),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight": (64, 4),
        "base_model.model.model.layers.10.mlp.down_proj.lora_A.weight": (4, 56),
        "base_model.model.model.layers.10.mlp.down_proj.lora_B.weight": (40, 4),
    }


@pytest.mark.parametrize(
    ("rank", "alpha", "stabilised", "scale"),
    [
        (8, 16.0, False, 2.0),
        (3, 1.0, False, float(np.float32(1) / np.float32(3))),
        (16, 16.0, True, 4.0),
        (3, 1.0, True, 0.57735025882720947265625),
    ],
)
def test_the_update_is_scaled_by_alpha_over_the_rank_or_its_root(rank, alpha, stabilised, scale):
    assert plan(["q_proj"], rank=rank, alpha=alpha, rank_stabilised=stabilised).scale == scale


@pytest.mark.parametrize("alpha", [1e-45, 1.2e-38])
def test_a_factor_that_is_flushed_is_refused(alpha):
    with pytest.raises(BackendError) as caught:
        plan(["q_proj"], rank=8, alpha=alpha)
    assert caught.value.error.code == "adapter-scale"


def test_first_values_are_those_of_the_definition():
    made = plan(["q_proj", "lm_head"], rank=3)
    seed = 2**40 + 5
    tensors = initial_tensors(made, seed)
    assert sorted(tensors) == sorted(made.shapes)
    bound = np.float32(1) / np.sqrt(np.float32(40))
    for matrix in made.matrices[:3]:
        a = tensors[parameter_key(f"{matrix.name}.lora_A")]
        for i in (0, 1, 6, 119):
            word = philox(seed, (i // 4, matrix.number, 2, 0))[i % 4]
            exact = (2 * (word >> 8) + 1 - 2**24) / 2**24
            assert a.flat[i] == pytest.approx(exact * bound, rel=2**-22)
            assert a.flat[i] == np.float32(np.float32(exact) * np.float32(0.15811388194561005))
        assert 0 < np.abs(a).min() <= np.abs(a).max() <= bound
        b = tensors[parameter_key(f"{matrix.name}.lora_B")]
        assert b.tobytes() == bytes(b.nbytes)
    first, second = (tensors[parameter_key(f"{m.name}.lora_A")] for m in made.matrices[1:3])
    assert first.tobytes() != second.tobytes()


def test_the_digest_is_over_keys_shapes_and_little_endian_values_in_bytewise_order():
    tensors = {"b.10": np.array([[1.5]], np.float32), "b": np.array([[-0.0, 2.0]], np.float32)}
    expected = b"b\n1 2\n" + struct.pack("<2f", -0.0, 2.0) + b"b.10\n1 1\n" + struct.pack("<f", 1.5)
    assert adapter_digest(tensors) == hashlib.sha256(expected).hexdigest()
    assert adapter_digest({**tensors, "b": np.array([[0.0, 2.0]], np.float32)}) != adapter_digest(tensors)
    assert adapter_digest({**tensors, "b": np.array([[-0.0], [2.0]], np.float32)}) != adapter_digest(tensors)
