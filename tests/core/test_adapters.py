"""Which layers an adapter lies on, what it is scaled by, its names, its first values, its digest."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest

from lanes.training import a_config
from mens_core.adapters.initial import initial_tensors
from mens_core.adapters.keys import adapter_digest, parameter_key
from mens_core.adapters.plan import plan_adapter
from mens_core.normal import log, normals
from mens_core.philox import philox
from oracle import float_integers as integers
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import AdapterConfig, RankAndAlpha

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
    "embed_tokens": (40, 97),
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
    assert caught.value.error.facts["known"] == ["down_proj", "embed_tokens", "k_proj", "lm_head", "q_proj"]


def test_matrices_are_numbered_in_the_bytewise_order_of_their_keys():
    made = plan(["q_proj", "lm_head"])
    names = [matrix.name for matrix in made.matrices]
    assert names[:4] == ["lm_head"] + [f"layers.{i}.self_attn.q_proj" for i in (0, 1, 10)]
    assert [matrix.number for matrix in made.matrices] == list(range(13))
    assert list(made.shapes) == sorted(made.shapes, key=str.encode)
    assert made.parameters == 12 * 4 * (40 + 64) + 4 * (40 + 97)


def test_of_the_embedding_a_has_a_column_for_each_token_and_names_are_those_of_peft():
    made = plan(["embed_tokens", "lm_head"])
    assert made.shapes == {
        "base_model.model.lm_head.lora_A.weight": (4, 40),
        "base_model.model.lm_head.lora_B.weight": (97, 4),
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 97),
        "base_model.model.model.embed_tokens.lora_embedding_B": (40, 4),
    }
    assert [(matrix.name, matrix.is_embedding) for matrix in made.matrices] == [
        ("lm_head", False),
        ("embed_tokens", True),
    ]


def excepted(**exceptions):
    asked = {"targets": ["q_proj"], "rank": 4, "alpha": 8.0, "exceptions": exceptions}
    return plan_adapter(AdapterConfig(**asked), LINEARS)


def test_an_exception_has_its_own_rank_and_alpha_among_the_targets_or_not():
    made = excepted(
        **{
            "layers.1.self_attn.q_proj": RankAndAlpha(rank=2, alpha=3.0),
            "embed_tokens": RankAndAlpha(rank=6, alpha=8.0),
        }
    )
    assert len(made.matrices) == 13
    by_name = {matrix.name: (matrix.rank, matrix.scale) for matrix in made.matrices}
    assert by_name.pop("layers.1.self_attn.q_proj") == (2, 1.5)
    assert by_name.pop("embed_tokens") == (6, float(np.float32(8) / np.float32(6)))
    assert set(by_name.values()) == {(4, 2.0)}
    assert made.shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] == (2, 40)
    assert made.shapes["base_model.model.model.embed_tokens.lora_embedding_B"] == (40, 6)


@pytest.mark.parametrize(
    ("name", "by", "code"),
    [
        ("q_proj", RankAndAlpha(rank=2, alpha=3.0), "adapter-target"),  # not a whole name
        ("layers.1.self_attn.q_proj", RankAndAlpha(rank=2, alpha=0.0), "adapter-scale"),
        ("layers.1.self_attn.q_proj", RankAndAlpha(rank=2, alpha=2.0**65), "adapter-scale"),
    ],
)
def test_an_exception_that_can_t_be_is_refused_by_its_name(name, by, code):
    with pytest.raises(BackendError) as caught:
        excepted(**{name: by})
    assert caught.value.error.code == code
    assert name in caught.value.error.message


def test_first_values_of_an_embedding_are_a_zero_a_and_a_normal_b_by_the_polar_method():
    made = plan(["embed_tokens", "q_proj"], rank=5)
    seed = 2**40 + 5
    tensors = initial_tensors(made, seed)
    matrix = made.matrices[0]
    a, b = (tensors[key] for key in matrix.keys)
    assert (a.shape, b.shape) == ((5, 97), (40, 5))
    assert a.tobytes() == bytes(a.nbytes)
    for i in range(0, 200, 7):
        attempt = 0
        while True:
            words = philox(seed, (i // 2, matrix.number, 2, attempt))[:2]
            u, v = (2 * (word >> 8) + 1 - 2**24 for word in words)
            if u * u + v * v < 2**48:
                break
            attempt += 1
        s = (u * u + v * v) / 2**48
        exact = (u, v)[i % 2] / 2**24 * math.sqrt(-2 * math.log(s) / s)
        # s is rounded before its logarithm, which is near zero where s is near 1.
        assert b.flat[i] == pytest.approx(exact, rel=2**-22 - 2**-25 / math.log(s))


def test_the_logarithm_of_first_values_is_the_definition_s():
    x = np.exp(np.random.default_rng(0).uniform(-33, 0, 40)).astype(np.float32)
    found = log(np.array([*x, 1.0, 2.0**-48], np.float32)).view(np.uint32).tolist()
    assert found == [integers.log(int(bits)) for bits in np.array([*x, 1.0, 2.0**-48], "<f4").view("<u4")]


def test_many_first_values_are_normal():
    values = np.sort(normals(3, 0, 100_001).astype(np.float64))
    assert len(values) == 100_001
    exact = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in values]))
    # Kolmogorov's distance: 1.95 / sqrt(n) is passed by one set in a thousand.
    assert np.abs(exact - (np.arange(len(values)) + 0.5) / len(values)).max() < 1.95 / math.sqrt(len(values))
    assert np.abs(np.corrcoef(normals(3, 0, 100_000).reshape(-1, 2).T)[0, 1]) < 0.012


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
    assert plan(["q_proj"], rank=rank, alpha=alpha, rank_stabilised=stabilised).matrices[0].scale == scale


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
