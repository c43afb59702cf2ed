"""What no plugin could load is refused before anything of it is written; what only others know comes in."""

import json
import random
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.scripted_home import command_line, run_command, scripted_home
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import GEMMA3, QWEN3, open_model, random_tensors, write_model
from vox_host.errors import VoxError
from vox_host.models.catalogue import Catalogue
from vox_host.models.family_check import check_family
from vox_host.models.gguf_config import CONFIG_KEYS, FAMILIES, gguf_name
from vox_host.models.gguf_header import read_gguf_header
from vox_host.models.gguf_import import translate
from vox_host.models.importing import import_model, open_source
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError
from vox_plugin_api.families import expected_shapes, parse_config, stored_tensors

CASES = Path(__file__).parents[2] / "cases"
IDS = ("C1", "C2", "C5", "C7", "C8", "C10", "C12", "C14", "Q8")
INDEX = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] in IDS]
TOWER = {"model_type": "gemma3", "vision_config": {}, "text_config": GEMMA3}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def with_tokenizer(folder):
    shutil.copy(CASES / "hand/tok/T1_template_bos/tokenizer.json", folder / "tokenizer.json")
    return folder


def made(tmp_path, config, tensors=None):
    return with_tokenizer(write_model(tmp_path / "folder", config, tensors))


def bring(source, store):
    opened = open_source(str(source), environment={})
    imported = import_model(opened, Catalogue(store), name="m", accept_license=True, progress=lambda *_: None)
    return imported.model, opened.notes


def refusal(source, tmp_path):
    """The error of an import; nothing was written, and it is said what to do."""
    with pytest.raises(VoxError) as caught:
        bring(source, tmp_path / "store")
    error = caught.value
    assert not (tmp_path / "store").exists()
    assert error.exit_code == 2
    assert "nothing was imported" in error.message
    assert str(source) in error.message
    return error


# --- the cases that broke others --------------------------------------------------------------


def case_source(case, tmp_path):
    """What a user would import: the case as it is, or in the smallest folder that makes a model of it."""
    given = CASES / case["file"]
    if given.suffix == ".gguf":
        return given
    folder = tmp_path / "folder"
    if case["id"] in ("C1", "C2"):
        with_tokenizer(write_model(folder, QWEN3))
        (folder / "model.safetensors").unlink()
        shutil.copy(given, folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": given.name}}))
    elif given.suffix == ".json":
        config = json.loads(given.read_text())
        broken = case["expect"]["kind"] == "error" and "alt" not in case["expect"]
        tensors = random_tensors(parse_config(QWEN3 if broken else config))
        with_tokenizer(write_model(folder, config, tensors))
    else:
        # C5_escape points outside its folder, at a file beside it.
        shutil.copytree(given, folder)
        folder = folder / "m" if (folder / "m").is_dir() else folder
        with_tokenizer(folder)
    return folder


def test_the_cases_that_concern_an_import_are_all_here():
    ids = [case["id"] for case in INDEX]
    counts = {"C1": 13, "C2": 11, "C5": 5, "C7": 3, "C8": 5, "C10": 9, "C12": 7, "C14": 1, "Q8": 19}
    assert {i: ids.count(i) for i in ids} == counts


@pytest.mark.parametrize("case", INDEX, ids=lambda c: f"{c['id']}-{Path(c['file']).stem}")
def test_a_published_case_is_refused_or_imported_with_its_note(case, tmp_path):
    source, expect = case_source(case, tmp_path), case["expect"]
    is_refused = (expect["kind"] == "error" and "alt" not in expect) or case["id"] == "Q8"
    if is_refused:
        error = refusal(source, tmp_path)
        for word in expect.get("must_mention", expect.get("error", ())):
            assert word in error.message
        return
    model, notes = bring(source, tmp_path / "store")
    assert model.architecture == json.loads((source / "config.json").read_text())["model_type"]
    name = Path(case["file"]).stem
    noted = {
        "C8_tied_with_other_head": "lm_head.weight is not used",
        "C8_tied_no_embed": "model.embed_tokens.weight is missing; lm_head.weight is used for both",
        "C10_yarn_no_orig": "original_max_position_embeddings is missing",
        "C14_gemma3_fp16": "stored as float16",
    }
    assert len(notes) == (1 if name in noted else 0), notes
    assert name not in noted or noted[name] in notes[0]


def test_an_index_without_a_weight_map_is_told_what_it_has(tmp_path):
    error = refusal(case_source({"id": "C5", "file": "hand/ckpt/C5_no_weight_map"}, tmp_path), tmp_path)
    assert "weight_map is missing" in error.message
    assert dict(error.facts) == {"keys": ["metadata"]}
    assert "None" not in f"{error.message} {error.facts}"


# --- what the import refuses, a plugin refuses, and what it takes, a plugin loads --------------

CHANGES = [
    ({"model_type": "gemma3"}, "config-unsupported", "has no text_config"),
    ({"vision_config": {}}, "config-unsupported", "multimodal"),
    ({"hidden_size": None}, "config-invalid", "hidden_size is None"),
    ({"hidden_size": 0}, "config-invalid", "hidden_size is 0"),
    ({"vocab_size": -5}, "config-invalid", "vocab_size is -5"),
    ({"intermediate_size": "56"}, "config-invalid", "intermediate_size is '56'"),
    ({"num_hidden_layers": True}, "config-invalid", "num_hidden_layers is True"),
    ({"num_hidden_layers": 10**9}, "config-invalid", "from 1 to 4096"),
    ({"num_attention_heads": 4.0}, "config-invalid", "num_attention_heads is 4.0"),
    ({"num_key_value_heads": 3}, "config-invalid", "num_key_value_heads is 3; wanted a divisor of"),
    ({"head_dim": 15}, "config-invalid", "head_dim is 15"),
    ({"rms_norm_eps": 0}, "config-invalid", "rms_norm_eps is 0"),
    ({"rope_theta": "1e6"}, "config-invalid", "rope_theta is '1e6'"),
    ({"rope_theta": None}, "config-invalid", "rope_theta is None; wanted it to be given"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "config-invalid", "rope_type is 'llama3'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "config-invalid", "type is 'dynamic'"),
    ({"rope_scaling": {"type": "yarn"}}, "config-invalid", "rope_scaling.factor is missing"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "config-invalid", "rope_type is 'longrope'"),
    ({"attention_bias": True}, "config-unsupported", "attention_bias is True; wanted false"),
    ({"partial_rotary_factor": 0.5}, "config-unsupported", "partial_rotary_factor is 0.5; wanted 1"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "config-unsupported", "'gptq'"),
    ({"quantization_config": {"quant_method": "awq"}}, "config-unsupported", "'awq'"),
    ({"quantization_config": {"load_in_4bit": True}}, "config-unsupported", "quantization_config is"),
    ({"layer_types": ["full_attention"] * 2}, "config-invalid", "layer_types has 2 entries"),
    (
        {"layer_types": ["full_attention", "full_attention", "linear_attention"]},
        "config-invalid",
        "layer_types[2] is 'linear_attention'; wanted 'full_attention' or 'sliding_attention'",
    ),
    (
        {"use_sliding_window": True, "max_window_layers": 1},
        "config-invalid",
        "sliding_window is missing; wanted it to be given",
    ),
    ({"use_sliding_window": 1}, "config-invalid", "use_sliding_window is 1; wanted true or false"),
    ({"hidden_act": "relu"}, "config-invalid", "hidden_act is 'relu'"),
    ({"tie_word_embeddings": "yes"}, "config-invalid", "tie_word_embeddings is 'yes'"),
    ({"head_dim": 18}, "weights-shape", f"{Q_PROJ} is [64,40]; config implies [72,40]"),
    ({"num_hidden_layers": 4}, "weights-missing", "lacks 11 of the tensors"),
    ({"tie_word_embeddings": False, "vocab_size": 98}, "weights-shape", "embed_tokens.weight is [97,40]"),
]


@pytest.mark.parametrize(("change", "code", "said"), CHANGES, ids=lambda v: str(v)[:60])
def test_what_does_not_fit_is_refused_by_host_and_plugin_alike(change, code, said, tmp_path):
    folder = made(tmp_path, {**QWEN3, **change}, random_tensors(parse_config(QWEN3)))
    error = refusal(folder, tmp_path)
    assert error.code == code
    assert said in error.message
    assert error.remedy
    with pytest.raises(CheckpointError) as caught:
        open_model(folder, NumpyLane())
    assert caught.value.code == code


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        {**QWEN3, "hidden_size": 64, "head_dim": None},
        {**QWEN3, "num_key_value_heads": None},
        {**QWEN3, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8},
        {**QWEN3, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        GEMMA3,
        {**GEMMA3, "layer_types": ["full_attention"] * 7},
        TOWER,
    ],
)
def test_what_is_imported_a_plugin_loads(config, tmp_path):
    parsed = parse_config(config)
    prefix = "model.language_model." if parsed.is_text_tower else "model."
    model, _ = bring(made(tmp_path, config, random_tensors(parsed, prefix=prefix)), tmp_path / "store")
    loaded = open_model(model.path, NumpyLane())
    assert loaded.model.config == parsed
    assert model.context_length == parsed.context_length == 1024


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_tower_comes_in_in_both_layouts_and_not_in_both_at_once(prefix, tmp_path):
    tensors = random_tensors(parse_config(TOWER), prefix=prefix)
    folder = made(tmp_path, TOWER, tensors)
    assert bring(folder, tmp_path / "one")[0].architecture == "gemma3_text"
    for other in ("model.language_model.", "language_model.model."):
        tensors[f"{other}norm.weight"] = np.ones(40, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert refusal(folder, tmp_path).code == "weights-ambiguous"


def test_weights_in_a_format_that_is_not_read_are_refused(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.float64)
    error = refusal(made(tmp_path, QWEN3, tensors), tmp_path)
    assert error.code == "weights-format"
    assert f"{Q_PROJ} is stored as F64" in error.message
    assert "BF16" in dict(error.facts)["supported"]


def test_many_problems_are_counted_and_the_first_spelt_out(tmp_path):
    tensors = {n: t for n, t in random_tensors(parse_config(QWEN3)).items() if "layers.1." not in n}
    message = refusal(made(tmp_path, QWEN3, tensors), tmp_path).message
    assert "lacks 11 of the tensors" in message
    assert "and 1 more" in message


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_tokenizer_that_no_server_could_read_is_refused_too(name, tmp_path):
    folder = made(tmp_path, QWEN3)
    (folder / name).write_text("[1")
    assert name in refusal(folder, tmp_path).message


ODD = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 16, 1.5, 1e-6, 1e300, 10**30, "", "x", [], {}, [[1]]),
    *(["full_attention"] * 3, ["sliding_attention"] * 7, "full_attention"),
    *({"rope_type": "linear", "factor": 2}, {"type": "yarn", "factor": 2}, {"rope_type": None}),
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 5}},
    {"full_attention": 3},
]
KEYS = [*QWEN3, *GEMMA3, "layer_types", "rope_parameters", "quantization_config", "attention_bias", "dtype"]
KEYS += ["use_sliding_window", "max_window_layers", "text_config", "vision_config", "partial_rotary_factor"]


@pytest.mark.parametrize("given", [QWEN3, GEMMA3, TOWER], ids=["qwen3", "gemma3", "tower"])
def test_whatever_stands_in_a_config_the_import_answers_as_the_load_does(given, tmp_path):
    parsed = parse_config(given)
    prefix = "model.language_model." if parsed.is_text_tower else "model."
    folder = made(tmp_path, given, random_tensors(parsed, prefix=prefix))
    stored = stored_tensors(Checkpoint.open(folder))
    generator, answers = random.Random(20261130), []
    for _ in range(150):
        config = json.loads(json.dumps(given))
        for _ in range(generator.randint(1, 2)):
            inner = config.get("text_config")
            fields = inner if isinstance(inner, dict) and generator.random() < 0.8 else config
            fields[generator.choice(KEYS)] = generator.choice(ODD)
        (folder / "config.json").write_text(json.dumps(config))
        answers.append((imports(config, stored), loads(folder)))
        assert answers[-1][0] == answers[-1][1], config
    assert {imported for imported, _ in answers} == {True, False}


def imports(config, stored):
    """Whether the import takes a model of a known family."""
    try:
        notes = check_family(config, stored, config_source="config.json", weights_source="folder")
    except CheckpointError:
        return False
    return not any("not one that vox-host knows" in note for note in notes)


def loads(folder):
    """Whether a plugin does."""
    try:
        open_model(folder, NumpyLane())
    except CheckpointError:
        return False
    return True


# --- families that only others know -----------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba2", "hidden_size": "anything"},
        {"model_type": "llava", "vision_config": {"depth": 2}},
        {"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}},
        {**QWEN3, "model_type": "qwen3_moe", "quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_a_family_that_is_not_known_here_comes_in_and_it_is_said_that_nobody_was_asked(config, tmp_path):
    tensors = {"backbone.w": np.ones((2, 2), np.float64)}
    model, notes = bring(made(tmp_path, config, tensors), tmp_path / "store")
    expected = config.get("text_config", config)["model_type"]
    assert model.architecture == expected
    assert len(notes) == 1
    for words in (repr(expected), "no installed plugin has been asked", "when a plugin loads"):
        assert words in notes[0]
    assert model.context_length is None
    with pytest.raises(CheckpointError) as caught:
        open_model(model.path, NumpyLane())
    assert caught.value.code == "config-unsupported"


def test_damage_is_found_whatever_the_family(tmp_path):
    folder = made(tmp_path, {"model_type": "mamba2"}, {"w": np.ones(4, np.float32)})
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert "belong to no tensor" in refusal(folder, tmp_path).message


def test_a_plugin_of_a_third_party_answers_for_a_family_of_its_own(tmp_path):
    folder = scripted_home(tmp_path / "made") / "models" / "tiny"
    (folder / "scripted.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "scripted"}))
    command, environment = command_line(tmp_path, tmp_path / "home")
    done = run_command(command, environment, "model", "import", str(folder), "--accept-license", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["architecture"] == "scripted"
    assert "no installed plugin has been asked" in facts["notes"][0]
    assert "warning: family 'scripted'" in done.stderr.decode()
    arguments = ("--prompt", "x", "--temperature", "0", "--max-tokens", "2", "--json")
    done = run_command(command, environment, "generate", "--model", "tiny", *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 2


# --- GGUF -------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_every_tensor_that_a_family_needs_has_a_name_in_gguf(architecture):
    config = parse_config({"qwen3": QWEN3, "gemma3": GEMMA3}[architecture])
    ours = [f"model.{name}" for name in expected_shapes(config)] + ["lm_head.weight"]
    theirs = [gguf_name(name, FAMILIES[architecture]) for name in ours]
    assert len(set(theirs)) == len(ours)
    assert not any(name.startswith("model.") for name in theirs)
    assert "blk.2.attn_q_norm.weight" in theirs


@pytest.mark.parametrize(
    ("keys", "code", "words"),
    [
        (
            {"qwen3.attention.head_count_kv": 3},
            "config-invalid",
            [
                "num_key_value_heads is 3",
                "divisor of num_attention_heads (4)",
                "qwen3.attention.head_count_kv",
            ],
        ),
        (
            {"qwen3.attention.key_length": 63, "qwen3.attention.value_length": 63},
            "config-invalid",
            ["head_dim is 63", "even", "qwen3.attention.key_length"],
        ),
        (
            {"qwen3.block_count": 5000},
            "config-invalid",
            ["num_hidden_layers is 5000", "from 1 to 4096", "qwen3.block_count"],
        ),
        (
            {"qwen3.rope.freq_base": 0.5},
            "config-invalid",
            ["rope_theta is 0.5", "above 1", "qwen3.rope.freq_base"],
        ),
        (
            {"qwen3.feed_forward_length": 768},
            "weights-shape",
            ["blk.0.ffn_gate.weight is [512,256]; config implies [768,256]"],
        ),
        ({"qwen3.block_count": 3}, "weights-missing", ["blk.2.attn_q.weight", "lacks 11 of the tensors"]),
    ],
)
def test_a_gguf_file_that_contradicts_itself_is_refused_in_its_own_words(
    tmp_path, write_gguf, keys, code, words
):
    path = tmp_path / "m.gguf"
    write_gguf(path, "qwen3")
    change_keys(path, keys)
    error = refusal(path, tmp_path)
    assert error.code == code
    for word in words:
        assert word in f"{error.message} {error.facts}"
    assert error.remedy
    assert "model.layers" not in f"{error.message} {error.facts}"


def test_every_key_of_a_config_is_made_from_the_key_that_is_named_for_it(tmp_path, write_gguf):
    path = tmp_path / "m.gguf"
    scaling = {
        "gemma3.rope.scaling.type": "yarn",
        "gemma3.rope.scaling.original_context_length": 512,
        "gemma3.attention.sliding_window_pattern": 6,
    }
    write_gguf(path, "gemma3", keys=scaling)
    file = read_gguf_header(path)
    metadata = {**file.metadata, "gemma3.rope.scaling.factor": 2.0}

    def flat(metadata):
        changed = type(file)(file.path, file.size_bytes, metadata, file.tensors)
        config = translate(changed).config
        return config | (config["rope_scaling"] or {})

    before = flat(metadata)
    for key, gguf_key in CONFIG_KEYS.items():
        if key == "vocab_size":
            continue  # taken from the embedding where there is one
        name = gguf_key.format("gemma3")
        old = metadata.get(name, 1.0)
        values = {name: "none" if isinstance(old, str) else old * 2}
        if key == "head_dim":
            values["gemma3.attention.value_length"] = old * 2
        after = flat(metadata | values)
        assert after[key] != before[key], key


def change_keys(path, keys):
    """Change numbers in the file's metadata, in place."""
    reader = gguf.GGUFReader(path)
    data = bytearray(path.read_bytes())
    for key, value in keys.items():
        field = reader.fields[key]
        offset = field.offset + 8 + len(key) + 4
        data[offset : offset + 4] = struct.pack("<f" if isinstance(value, float) else "<I", value)
    del reader
    path.write_bytes(data)
