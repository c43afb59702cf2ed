"""Adapters that PEFT wrote: what is honoured, what is refused by name, which tensor is which."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from vox_host.errors import ModelError
from vox_host.runs.open import open_adapter
from vox_host.runs.peft_config import _HARMLESS, _HONOURED, _OFF, read_peft_config
from vox_plugin_api.messages import AdapterParams, RankAndAlpha

CASES = Path(__file__).parents[2] / "cases" / "hand" / "lora"
RIGHT = CASES / "L1_right"
EXPECTED = {
    Path(case["file"]).name: case["expect"]
    for case in json.loads((CASES.parents[1] / "INDEX.json").read_text())
    if case["kind"] == "lora"
}
OURS = {
    f"base_model.model.model.layers.0.{layer}.lora_{part}.weight"
    for layer in ("self_attn.q_proj", "mlp.down_proj")
    for part in "AB"
}


def copy(folder: Path, case: Path = RIGHT) -> Path:
    shutil.copytree(case, folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    folder.chmod(0o755)
    return folder


def with_config(folder: Path, **fields) -> Path:
    """The right case, with these fields changed; None takes one away."""
    copy(folder)
    config = json.loads((folder / "adapter_config.json").read_text()) | fields
    config = {name: value for name, value in config.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def with_tensors(folder: Path, change) -> Path:
    copy(folder)
    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    return folder


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        open_adapter(path)
    return caught.value


def everything(error: ModelError) -> str:
    return f"{error.message} {error.facts} {error.remedy}"


def test_l1_right_is_read_as_it_stands():
    source = open_adapter(RIGHT)
    assert source.origin == "peft"
    assert set(source.key_map) == OURS
    assert all(ours == theirs for ours, theirs in source.key_map.items())
    assert sorted(source.config.targets) == ["layers.0.mlp.down_proj", "layers.0.self_attn.q_proj"]
    assert (source.config.rank, source.config.alpha, source.config.rank_stabilised) == (4, 8.0, False)
    assert (source.base_name, source.base_digest, source.notes) == ("toy", None, ())
    assert source.sha256 == hashlib.sha256(source.file.read_bytes()).hexdigest()


def test_l1_vlm_prefix_names_the_same_parameters():
    source = open_adapter(CASES / "L1_vlm_prefix")
    assert set(source.key_map) == OURS
    assert all("language_model" in theirs for theirs in source.key_map.values())
    assert source.config == open_adapter(RIGHT).config


@pytest.mark.parametrize(
    "spell",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: key.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."),
        lambda key: key.replace("base_model.model.model.", "base_model.model."),
        lambda key: key.replace("base_model.model.model.", "base_model.model.language_model.model."),
        lambda key: key.replace("base_model.model.model.", "model.language_model."),
    ],
)
def test_names_that_others_write_are_the_same_parameters(tmp_path, spell):
    folder = with_tensors(tmp_path / "a", lambda tensors: {spell(k): v for k, v in tensors.items()})
    source = open_adapter(folder)
    assert dict(source.key_map) == {key: spell(key) for key in OURS}


@pytest.mark.parametrize("name", ["L1_no_match", "L1_unpaired", "L2_no_alpha", "L2_r_mismatch"])
def test_l1_and_l2_errors_name_what_is_wrong(name):
    text = everything(refused(CASES / name))
    for mention in EXPECTED[name]["must_mention"]:
        assert mention in text


@pytest.mark.parametrize("name", ["L5_dora", "L5_flag_off", "L5_wrong_len"])
def test_l5_dora_is_refused_by_its_name(name):
    """Case L5."""
    assert "DoRA" in refused(CASES / name).message


@pytest.mark.parametrize("name", ["L2_plain", "L2_rslora", "L2_alpha0"])
def test_l2_alpha_rank_and_stabilisation_give_the_factor(name):
    """Case L2."""
    source = open_adapter(CASES / name)
    config = source.config
    root = config.rank**0.5 if config.rank_stabilised else config.rank
    assert config.alpha / root == EXPECTED[name]["value"]["scale"]
    assert bool(source.notes) is bool(EXPECTED[name].get("warning"))


CHANGES_THE_RESULT = {
    "alora_invocation_tokens": [1, 2],
    "arrow_config": {"top_k": 3},
    "bias": "lora_only",
    "ensure_weight_tying": True,
    "fan_in_fan_out": True,
    "kasa_config": {"beta": 1},
    "layer_replication": [[0, 4], [2, 5]],
    "lora_bias": True,
    "megatron_config": {"a": 1},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"a": 1},
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [3],
    "use_bdlora": {"target_modules_bd_a": ["q_proj"]},
    "use_dora": True,
    "use_qalora": True,
    "velora_config": {"a": 1},
    "init_lora_weights": "pissa_niter_4",
    "task_type": "SEQ_CLS",
    "peft_type": "LOHA",
    "something_new": 17,
}


@pytest.mark.parametrize("name", CHANGES_THE_RESULT)
def test_what_changes_the_result_is_refused_with_its_value(tmp_path, name):
    value = CHANGES_THE_RESULT[name]
    error = refused(with_config(tmp_path / "a", **{name: value}))
    assert error.code == "adapter-unsupported"
    assert name in error.message and repr(value)[:60] in error.message


def test_every_such_field_is_tried_here():
    assert set(_OFF) <= set(CHANGES_THE_RESULT)
    assert not set(_OFF) & _HONOURED and not _HARMLESS & (_HONOURED | set(_OFF))


def test_all_that_is_refused_is_said_at_once(tmp_path):
    message = refused(with_config(tmp_path / "a", use_dora=True, bias="all", new=1)).message
    assert (
        "use_dora (DoRA) is True" in message
        and "bias is 'all'" in message
        and "new (unknown here)" in message
    )


def test_a_number_in_place_of_false_is_not_false(tmp_path):
    assert refused(with_config(tmp_path / "a", use_dora=0)).code == "adapter-unsupported"


def test_what_peft_writes_by_default_changes_nothing(tmp_path):
    defaults = json.loads((Path(__file__).parent / "peft-0.21-defaults.json").read_text())
    config = {**defaults, "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    source = open_adapter(with_config(tmp_path / "a", **config))
    assert (source.config, source.notes) == (open_adapter(RIGHT).config, ())
    assert set(defaults) <= set(_OFF) | _HONOURED | _HARMLESS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r", ...), ("r", 0), ("r", 4097), ("r", 4.0), ("r", True), ("r", "4"),
        ("lora_alpha", None), ("lora_alpha", -1), ("lora_alpha", "8"), ("lora_alpha", True),
        ("lora_dropout", 1), ("lora_dropout", -0.5), ("use_rslora", 1), ("use_rslora", "false"),
        ("target_modules", [1]), ("target_modules", {"q_proj": 1}), ("exclude_modules", 3),
        ("rank_pattern", {"q_proj": 0}), ("rank_pattern", {"q_proj": 2.0}), ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": -1}), ("alpha_pattern", {"q_proj": True}), ("lora_alpha", [8, 4]),
        ("layers_pattern", 3),
        ("layers_to_transform", "0"), ("layers_to_transform", [0.5]), ("base_model_name_or_path", 7),
    ],
)  # fmt: skip
def test_a_value_that_can_t_be_is_named_beside_what_is_wanted(tmp_path, name, value):
    error = refused(with_config(tmp_path / "a", **{name: value}))
    assert error.code == "adapter-config"
    assert f"{name} is" in error.message and "wanted" in error.message


@pytest.mark.parametrize("value", [1e308, 10**39, 10**400, 3e38, 1e30, 1e-30, 1e-300])
@pytest.mark.parametrize("name", ["lora_alpha", "alpha_pattern"])
def test_an_alpha_beyond_what_float32_has_room_for_is_named_with_what_it_holds(tmp_path, name, value):
    found = value if name == "lora_alpha" else {"q_proj": value}
    error = refused(with_config(tmp_path / "a", **{name: found}))
    assert error.code == "adapter-config"
    assert f"adapter_config.json: {name} is {found!r:.80}; wanted" in error.message
    assert "above 1e-30 and below 1e+30: float32 holds 1.2e-38 to 3.4e38" in error.message
    assert "nothing was loaded" in error.message


@pytest.mark.parametrize("value", [1.1e-30, 9.9e29, 10**29])
def test_an_alpha_within_them_goes_to_the_worker(tmp_path, value):
    source = open_adapter(with_config(tmp_path / "a", lora_alpha=value))
    assert AdapterParams.model_validate_json(source.params().model_dump_json()).config.alpha > 0


def test_a_dropout_that_float32_rounds_to_1_is_refused(tmp_path):
    assert "lora_dropout is" in refused(with_config(tmp_path / "a", lora_dropout=1 - 2**-25)).message


def test_a_whole_number_of_thousands_of_digits_is_said_without_python_s_words(tmp_path):
    folder = copy(tmp_path / "a")
    (folder / "adapter_config.json").write_text('{"lora_alpha": 1' + "0" * 10_000 + "}")
    message = refused(folder).message
    assert "thousands of digits" in message and "sys." not in message


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 4, "r": 8}', '{"lora_alpha": NaN}'])
def test_a_file_that_is_no_object_is_refused(tmp_path, text):
    folder = copy(tmp_path / "a")
    (folder / "adapter_config.json").write_text(text)
    assert refused(folder).code == "adapter-config"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "own_proj"]},
        {"exclude_modules": ["down_proj"]},
        {"layers_to_transform": [1, 2]},
        {"layers_to_transform": 3, "layers_pattern": "layers"},
    ],
)
def test_updates_that_peft_would_leave_out_are_refused(tmp_path, fields):
    error = refused(with_config(tmp_path / "a", **fields))
    assert error.code == "adapter-tensors"
    assert "doesn't ask for" in error.message and "layers.0.mlp.down_proj" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q_proj|down_proj)"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "mlp.down_proj"]},
        {"target_modules": ["model.language_model.layers.0.self_attn.q_proj", "down_proj"]},
        {"target_modules": None},
        {"layers_to_transform": [0, 5]},
        {"layers_to_transform": 0},
        {"exclude_modules": ["lm_head"]},
    ],
)
def test_updates_that_are_asked_for_are_taken(tmp_path, fields):
    assert set(open_adapter(with_config(tmp_path / "a", **fields)).key_map) == OURS


def test_a_target_without_an_update_is_a_note(tmp_path):
    source = open_adapter(with_config(tmp_path / "a", target_modules=["q_proj", "down_proj", "k_proj"]))
    (note,) = source.notes
    assert "k_proj" in note


def test_patterns_give_layers_a_rank_and_an_alpha_of_their_own(tmp_path):
    folder = with_tensors(
        tmp_path / "a",
        lambda tensors: {
            key: (values[:3] if "lora_A" in key else np.ascontiguousarray(values[:, :3]))
            if "q_proj" in key
            else values
            for key, values in tensors.items()
        },
    )
    file = folder / "adapter_config.json"
    patterns = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {r".*\.down_proj": 2.5, "k_proj": 1}}
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns))
    source = open_adapter(folder)
    assert source.config.targets == []
    assert source.config.exceptions == {
        "layers.0.self_attn.q_proj": RankAndAlpha(rank=3, alpha=8.0),
        "layers.0.mlp.down_proj": RankAndAlpha(rank=4, alpha=2.5),
    }
    (note,) = source.notes
    assert "k_proj" in note and "fits no layer" in note
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rank_pattern": {"q_proj": 2}}))
    assert "with rank 2 it would be" in refused(folder).message


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
A = KEY.format("A")
EMBEDDED = "base_model.model.model.embed_tokens.lora_embedding_A"
VISION = "model.vision_tower.encoder.layers"


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (lambda t: {}, "no tensor"),
        (lambda t: {**t, "x.weight": t[A]}, "x.weight"),
        (lambda t: {**t, KEY.format("B").replace("weight", "bias"): np.zeros(64, "f4")}, "biases"),
        (lambda t: {**t, "base_model.model.lm_head.base_layer.weight": t[A]}, "copies of base"),
        (lambda t: {**t, A: t[A].astype("f8")}, "F64"),
        (lambda t: {**t, A: t[A].T.copy()}, "[32, 4]"),
        (lambda t: {**t, A: t[A].reshape(4, 32, 1)}, "[4, 32, 1]"),
        (lambda t: {**t, A.replace("lora_A", "lora_A.default"): t[A]}, "both lora_A"),
        (lambda t: {**t, A.replace("lora_A", "lora_A.other"): t[A]}, "lora_A.other"),
        (lambda t: {**t, EMBEDDED: t[A]}, "no lora_B"),
        (lambda t: {**t, EMBEDDED + ".weight": t[A]}, "no place"),
        (lambda t: {**t, A.replace("lora_A", "lora_embedding_A"): t[A]}, "no place"),
        (lambda t: {k.replace("model.layers", VISION): v for k, v in t.items()}, "vision_tower"),
    ],
)
def test_a_tensor_without_a_place_is_named(tmp_path, change, mentions):
    error = refused(with_tensors(tmp_path / "a", change))
    assert error.code == "adapter-tensors"
    assert mentions in error.message


def test_a_pickle_is_never_read_and_what_is_missing_is_named(tmp_path):
    folder = copy(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    file.rename(folder / "adapter_model.bin")
    error = refused(folder)
    assert error.code == "adapter-pickled" and "safe_serialization" in (error.remedy or "")
    (folder / "adapter_model.bin").unlink()
    assert "lacks adapter_model.safetensors" in refused(folder).message
    other = copy(tmp_path / "b")
    (other / "adapter_config.json").unlink()
    assert "lacks adapter_config.json" in refused(other).message


def test_a_damaged_file_is_named(tmp_path):
    folder = copy(tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    assert str(file) in refused(folder).message


def test_the_template_beside_it_comes_along(tmp_path):
    folder = copy(tmp_path / "a")
    (folder / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    assert open_adapter(folder).chat_template == "{{ messages }}"
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert refused(folder).code == "adapter-template"


def test_a_configuration_that_we_write_is_one_that_we_read(tmp_path):
    from fixtures.runs import some_facts
    from vox_host.runs.adapter_config import peft_config_text

    path = tmp_path / "adapter_config.json"
    facts = some_facts(rank_stabilised=True, alpha=2.5)
    path.write_text(peft_config_text(facts))
    config = read_peft_config(path)
    assert (config.rank, config.alpha, config.rank_stabilised, config.dropout) == (4, 2.5, True, 0.1)
    assert set(config.targets or ()) == set(facts.targets)
