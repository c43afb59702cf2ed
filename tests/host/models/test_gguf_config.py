"""gguf_config: Hugging Face names and constants from GGUF's."""

from pathlib import Path

import pytest

from vox_host.errors import ModelError
from vox_host.models.ggml_types import GGML_TYPES
from vox_host.models.gguf_config import FAMILIES, config_json, family_of, hugging_face_names
from vox_host.models.gguf_header import GgufFile, GgufTensor

F32 = GGML_TYPES[0]


def a_file(architecture="gemma3", *, names=(), **keys):
    values = {
        "embedding_length": 640,
        "block_count": 18,
        "feed_forward_length": 2048,
        "context_length": 32768,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "attention.sliding_window": 512,
        "rope.freq_base": 1000000.0,
        **keys,
    }
    metadata = {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    metadata["general.architecture"] = architecture
    tensors = tuple(GgufTensor(name, F32, (7, 640), 0, 7 * 640 * 4) for name in names)
    return GgufFile(Path("x.gguf"), 1, metadata, tensors)


def config_of(file):
    family = family_of(file)
    return config_json(file, family, hugging_face_names(file, family))


def test_the_config_of_gemma_3_is_the_one_its_publisher_wrote():
    config = config_of(a_file(names=["token_embd.weight"]))
    # The values of google/gemma-3-270m's config.json.
    published = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "vocab_size": 7,
    }
    assert {key: config[key] for key in published} == published


def test_a_qwen_config_has_nothing_of_gemma():
    config = config_of(a_file("qwen3", names=["token_embd.weight", "output.weight"]))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["hidden_act"] == "silu"
    assert config["tie_word_embeddings"] is False
    assert not {"sliding_window", "query_pre_attn_scalar", "hidden_activation"} & set(config)


def test_the_27b_model_scales_queries_by_the_width_per_head():
    keys = {"embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
    keys["attention.value_length"] = 128
    assert config_of(a_file(block_count=62, **keys))["query_pre_attn_scalar"] == 168
    assert config_of(a_file(block_count=48, **keys))["query_pre_attn_scalar"] == 128


def test_head_width_falls_back_to_the_width_per_head():
    file = a_file("qwen3", **{"attention.key_length": None, "attention.value_length": None})
    assert config_of(file)["head_dim"] == 160


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"rope.scaling.type": "none"}, None),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32768,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        ),
    ],
)
def test_rope_scaling_is_carried_over(keys, expected):
    assert config_of(a_file("qwen3", **keys))["rope_scaling"] == expected


def test_without_a_window_every_layer_sees_everything():
    config = config_of(a_file(**{"attention.sliding_window": None}))
    assert config["sliding_window"] is None
    assert config["layer_types"] == ["full_attention"] * 18


def test_another_pattern_of_windows_is_carried_over():
    assert config_of(a_file(**{"attention.sliding_window_pattern": 4}))["sliding_window_pattern"] == 4


@pytest.mark.parametrize(
    ("keys", "blamed"),
    [
        ({"embedding_length": None}, "gemma3.embedding_length is missing"),
        ({"block_count": 0}, "gemma3.block_count is 0"),
        ({"block_count": "18"}, "gemma3.block_count is '18'"),
        ({"attention.head_count": True}, "gemma3.attention.head_count is True"),
        ({"attention.value_length": 128}, "gemma3.attention.value_length differs"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"rope.scaling.type": "spiral"}, "gemma3.rope.scaling.type is 'spiral'"),
        ({"rope.scaling.type": "linear"}, "gemma3.rope.scaling.factor is missing"),
        ({"attention.sliding_window": 0}, "gemma3.attention.sliding_window is 0"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(keys, blamed):
    with pytest.raises(ModelError) as caught:
        config_of(a_file(**keys))
    assert blamed in caught.value.message
    assert "x.gguf" in caught.value.message


def test_each_norm_of_a_layer_has_its_own_name():
    names = [f"blk.3.{name}.weight" for name in FAMILIES["gemma3"].layer_tensors]
    mapped = hugging_face_names(a_file(names=names), FAMILIES["gemma3"])
    assert {new: tensor.name for new, tensor in mapped.items() if "layernorm" in new} == {
        "model.layers.3.input_layernorm.weight": "blk.3.attn_norm.weight",
        "model.layers.3.post_attention_layernorm.weight": "blk.3.post_attention_norm.weight",
        "model.layers.3.pre_feedforward_layernorm.weight": "blk.3.ffn_norm.weight",
        "model.layers.3.post_feedforward_layernorm.weight": "blk.3.post_ffw_norm.weight",
    }
    qwen = hugging_face_names(a_file("qwen3", names=["blk.3.ffn_norm.weight"]), FAMILIES["qwen3"])
    assert list(qwen) == ["model.layers.3.post_attention_layernorm.weight"]


@pytest.mark.parametrize(
    "name", ["blk.0.attn_q.bias", "blk.00.attn_q.weight", "blk.0.ssm_a.weight", "rope_freqs.weight", "x"]
)
def test_a_tensor_without_a_place_is_named_not_dropped(name):
    with pytest.raises(ModelError) as caught:
        hugging_face_names(a_file(names=[name]), FAMILIES["qwen3"])
    assert name in caught.value.message


def test_an_architecture_that_is_not_imported_is_named_with_those_that_are():
    with pytest.raises(ModelError) as caught:
        family_of(a_file("mamba"))
    assert "'mamba'" in caught.value.message
    assert dict(caught.value.facts)["supported"] == ["gemma3", "qwen3"]
