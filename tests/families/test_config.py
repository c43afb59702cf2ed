"""config.json into ModelConfig: every published spelling, and every refusal by key and value."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from lanes.tiny_models import GEMMA3, QWEN3
from mens_core.models.layers import attention_spec
from vox_plugin_api.checkpoint import CheckpointError
from vox_plugin_api.families import UnknownFamilyError, Yarn, parse_config
from vox_plugin_api.families.float32 import square_root

CASES = Path(__file__).parents[1] / "cases"
INDEX = [
    case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] in ("C10", "C12", "C14")
]


def refusal(config):
    with pytest.raises(CheckpointError) as caught:
        parse_config(config)
    return caught.value


def test_the_cases_of_this_part_are_all_here():
    ids = [case["id"] for case in INDEX]
    assert {i: ids.count(i) for i in ids} == {"C10": 9, "C12": 7, "C14": 1}


@pytest.mark.parametrize("case", INDEX, ids=lambda c: Path(c["file"]).stem)
def test_a_published_case_gives_its_answer(case):
    config = json.loads((CASES / case["file"]).read_text())
    expect = case["expect"]
    if case["id"] == "C14":
        # The documented alternative to refusing: everything is computed in float32, and said.
        assert expect["alt"] == "runs in float32 with a warning"
        assert any("float16" in note and "float32" in note for note in parse_config(config).notes)
    elif expect["kind"] == "error":
        error = refusal(config)
        for word in expect["must_mention"]:
            assert word in error.message
    else:
        found = parse_config(config)
        assert summary(found, expect["value"]) == expect["value"]
        assert bool(found.notes) == expect.get("warning", False)


def summary(config, wanted):
    """What the case asks about, out of the parsed config."""
    full, sliding = config.ropes["full"].scaling, config.ropes["sliding"].scaling
    everything = {
        "type": "yarn" if isinstance(full, Yarn) else "linear" if full else "default",
        "factor": full.factor if isinstance(full, Yarn) else full,
        "original_max_position_embeddings": full.original_context if isinstance(full, Yarn) else None,
        "full_layers": [i for i, kind in enumerate(config.attention_kinds) if kind == "full"],
        "full_factor": full or 1,
        "sliding_factor": sliding or 1,
    }
    return {key: everything[key] for key in wanted}


@pytest.mark.parametrize("given", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_sizes_are_read_from_their_own_keys(given):
    config = parse_config(given)
    assert [config.vocab_size, config.hidden_size, config.intermediate_size, config.layers] == [
        given[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    ]
    assert [config.heads, config.kv_heads, config.head_dim, config.context_length] == [
        given[key]
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
    ]


def test_a_root_barely_above_a_tie_is_rounded_up():
    tie = 1 + Fraction(1, 2**24)
    assert square_root(tie * tie) == 1.0
    assert square_root(tie * tie + Fraction(1, 2**155)) == 1.0 + 2.0**-23


def test_gemma_sliding_layers_have_their_own_theta_and_window():
    config = parse_config(GEMMA3)
    assert config.ropes["full"].theta == 1_000_000
    assert config.ropes["sliding"].theta == 10_000
    assert attention_spec(config, 0).window == 20
    assert attention_spec(config, 5).window is None


def test_scales_are_the_nearest_float32():
    config = parse_config(GEMMA3 | {"hidden_size": 640, "query_pre_attn_scalar": 24})
    assert config.embed_scale == float(np.float32(math.sqrt(640)))
    assert config.attention_scale == float(np.float32(24**-0.5))
    assert config.logit_softcap == 2.5
    assert config.rms_eps == float(np.float32(1e-6))
    for head_dim in range(2, 400, 2):
        scale = parse_config(QWEN3 | {"head_dim": head_dim}).attention_scale
        assert scale == float(np.float32(head_dim**-0.5)), head_dim


def test_families_differ_in_what_they_add():
    qwen, gemma = parse_config(QWEN3), parse_config(GEMMA3)
    assert (qwen.embed_scale, qwen.norm_plus_one, qwen.logit_softcap) == (None, False, None)
    assert gemma.norm_plus_one
    assert (qwen.activation, gemma.activation) == ("silu", "gelu_tanh")


def test_the_text_tower_is_found_by_text_config_and_not_by_name():
    inner = {k: v for k, v in GEMMA3.items() if k not in ("architectures", "torch_dtype")}
    outer = {
        "architectures": ["SomethingElseForConditionalGeneration"],
        "model_type": "something_else",
        "text_config": inner,
        "vision_config": {"hidden_size": 9},
        "torch_dtype": "bfloat16",
    }
    config = parse_config(outer)
    assert (config.family, config.is_text_tower, config.stored_dtype) == ("gemma3", True, "bfloat16")
    assert not parse_config(GEMMA3).is_text_tower


def test_a_text_config_without_a_type_takes_the_outer_one():
    inner = {k: v for k, v in GEMMA3.items() if k != "model_type"}
    assert parse_config({"model_type": "gemma3", "text_config": inner}).family == "gemma3"


def test_what_large_gemma_files_leave_out_is_filled_in_and_said():
    sparse = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = parse_config({"model_type": "gemma3", "text_config": sparse})
    assert (config.heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert (config.ropes["full"].theta, config.ropes["sliding"].theta) == (1_000_000, 10_000)
    assert sum("default" in note for note in config.notes) == 5
    assert config.notes[0].startswith("text_config.num_attention_heads is missing")


@pytest.mark.parametrize(
    "config",
    [
        GEMMA3 | {"model_type": "gemma3"},
        QWEN3 | {"vision_config": {}},
        {"model_type": "llava", "vision_config": {"depth": 2}},
    ],
)
def test_a_multimodal_checkpoint_without_text_config_is_refused_with_the_reason(config):
    error = refusal(config)
    assert error.code == "config-unsupported"
    assert "multimodal" in error.message
    assert "text_config" in error.message


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3_moe", "gemma2"])
def test_other_families_are_named_beside_the_supported_ones(model_type):
    error = refusal(QWEN3 | {"model_type": model_type})
    assert isinstance(error, UnknownFamilyError)
    assert error.code == "config-unsupported"
    for word in (repr(model_type), "qwen3", "gemma3_text"):
        assert word in error.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, ["model_type", "None", "qwen3", "gemma3_text"]),
        ({"hidden_size": "40"}, ["hidden_size", "'40'"]),
        ({"hidden_size": 40.0}, ["hidden_size", "40.0"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers", "-3"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
        ({"rope_theta": 1}, ["rope_theta"]),
        ({"rope_theta": None}, ["rope_theta"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "num_attention_heads"]),
        ({"head_dim": 15}, ["head_dim is 15; wanted a number that is even"]),
        ({"head_dim": None, "num_attention_heads": 3}, ["head_dim", "40 / 3"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        (
            {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
            ["layer_types[1]", "'linear_attention'", "'sliding_attention'"],
        ),
        ({"use_sliding_window": True, "max_window_layers": 1}, ["sliding_window"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "[1]"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_scaling.rope_type"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor"]),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, ["rope_scaling.factor", "-1"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["rope_scaling.factor", "0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, ["rope_scaling.factor", "nan"]),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 8}}, ["attention_factor", "8"]),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": 5.0}}, ["rope_theta", "1000000"]),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "default"}},
            ["rope_"],
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_key(change, words):
    error = refusal(QWEN3 | change)
    assert error.code in ("config-invalid", "config-unsupported")
    for word in words:
        assert word in error.message


def test_a_quantiser_that_signs_beside_the_text_model_is_refused_too():
    inner = {k: v for k, v in GEMMA3.items() if k != "architectures"}
    outer = {"model_type": "gemma3", "text_config": inner, "quantization_config": {"quant_method": "awq"}}
    error = refusal(outer)
    assert error.code == "config-unsupported"
    assert error.message.startswith("config.json: quantization_config is {'quant_method': 'awq'}; wanted")


def test_all_problems_come_at_once():
    error = refusal(QWEN3 | {"hidden_size": -1, "vocab_size": "many", "rope_scaling": {"type": "spiral"}})
    assert len(error.facts["problems"]) == 3


def test_both_spellings_of_rope_settings_are_one():
    new = {k: v for k, v in QWEN3.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0}
    old = QWEN3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert parse_config(new).ropes == parse_config(old).ropes
    assert parse_config(old | {"rope_parameters": new["rope_parameters"]}).ropes == parse_config(old).ropes


def test_gemma_rope_settings_per_kind_of_layer():
    per_kind = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    new = {k: v for k, v in GEMMA3.items() if not k.startswith("rope_")} | {"rope_parameters": per_kind}
    assert parse_config(new).ropes == parse_config(GEMMA3).ropes
    per_kind["sliding_attention"] = {"rope_type": "linear", "factor": 8.0}
    assert "rope_parameters.sliding_attention.rope_type" in refusal(new).message


def test_qwen_sliding_layers_begin_after_max_window_layers():
    config = parse_config(QWEN3 | {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": 64})
    assert config.attention_kinds == ("full", "full", "sliding")
    assert attention_spec(config, 2).window == 64
    assert parse_config(QWEN3 | {"sliding_window": 64}).attention_kinds == ("full",) * 3


def test_layer_types_win_over_a_pattern_that_disagrees_and_this_is_said():
    kinds = ["full_attention"] * 7
    config = parse_config(GEMMA3 | {"layer_types": kinds})
    assert config.attention_kinds == ("full",) * 7
    assert any("sliding_window_pattern" in note for note in config.notes)


def test_yarn_settings_are_exact_fractions():
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 16,
        "beta_slow": 0.5,
        "truncate": False,
        "attention_factor": 1.1,
        "unheard_of": 1,
    }
    config = parse_config(QWEN3 | {"rope_scaling": scaling})
    assert config.ropes["full"].scaling == Yarn(
        factor=Fraction(4),
        original_context=256,
        beta_fast=Fraction(16),
        beta_slow=Fraction(1, 2),
        truncate=False,
        attention_factor=Fraction(1.1),
    )
    assert config.notes == ("rope_scaling.unheard_of is not used",)
