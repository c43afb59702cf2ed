"""hf_shapes and hf_sizes: a folder that no plugin could load is refused before it is imported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lanes.tiny_models import GEMMA3, QWEN3, random_tensors, write_model
from mens_core import weights
from mens_core.config import parse_config
from vox_host.errors import ModelError
from vox_host.models.catalogue import Catalogue
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.hf_shapes import expected_shapes
from vox_host.models.hf_sizes import read_sizes
from vox_host.models.importing import import_model
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint

CASES = Path(__file__).parents[2] / "cases"
INDEX = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] in ("C7", "C8")]
TOWER = {"model_type": "gemma3", "vision_config": {}, "text_config": GEMMA3}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def with_tokenizer(folder):
    shutil.copy(CASES / "hand/tok/T1_template_bos/tokenizer.json", folder / "tokenizer.json")
    return folder


def made(tmp_path, config, tensors=None):
    if tensors is None:
        tensors = random_tensors(parse_config(config))
    return with_tokenizer(write_model(tmp_path / "folder", config, tensors))


def bring(folder, store):
    return import_model(
        HuggingFaceSource(folder),
        Catalogue(store),
        name="m",
        accept_license=True,
        progress=lambda *_: None,
    )


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        HuggingFaceSource(folder)
    assert caught.value.exit_code == 2
    assert "nothing was imported" in caught.value.message
    return caught.value


@pytest.mark.parametrize("case", INDEX, ids=lambda c: Path(c["file"]).stem)
def test_a_published_case_is_imported_or_refused_as_it_loads_or_not(case, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(CASES / case["file"], folder)
    with_tokenizer(folder)
    if case["expect"]["kind"] == "error":
        error = refusal(folder)
        for word in case["expect"]["must_mention"]:
            assert word in error.message
        return
    assert bring(folder, tmp_path / "store").model.architecture == "qwen3"


@pytest.mark.parametrize(
    "config",
    [
        QWEN3,
        {**QWEN3, "hidden_size": 64, "head_dim": None},
        {**QWEN3, "num_key_value_heads": None},
        GEMMA3,
        {key: value for key, value in GEMMA3.items() if "heads" not in key and key != "head_dim"},
        TOWER,
    ],
)
def test_the_shapes_are_those_that_the_plugins_expect(config):
    theirs = parse_config(config)
    ours = read_sizes(config, Path("config.json"))
    assert expected_shapes(ours) == weights.expected_shapes(theirs)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=lambda c: c["model_type"])
def test_a_model_of_each_family_passes(config, tmp_path):
    assert HuggingFaceSource(made(tmp_path, config)).architecture == config["model_type"]


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_a_text_tower_passes_in_both_layouts_and_not_in_both_at_once(prefix, tmp_path):
    tensors = random_tensors(parse_config(TOWER), prefix=prefix)
    folder = made(tmp_path, TOWER, tensors)
    assert HuggingFaceSource(folder).architecture == "gemma3_text"
    for other in ("model.language_model.", "language_model.model."):
        tensors[f"{other}norm.weight"] = np.ones(40, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert refusal(folder).code == "weights-ambiguous"


CHANGES = [
    ({"model_type": "llama"}, "config-unsupported", "model_type 'llama' is not supported"),
    ({"model_type": "gemma3"}, "config-unsupported", "needs a text_config"),
    ({"hidden_size": None}, "config-invalid", "hidden_size is None"),
    ({"hidden_size": 0}, "config-invalid", "hidden_size is 0"),
    ({"vocab_size": -5}, "config-invalid", "vocab_size is -5"),
    ({"intermediate_size": "56"}, "config-invalid", "intermediate_size is '56'"),
    ({"num_hidden_layers": True}, "config-invalid", "num_hidden_layers is True"),
    ({"num_hidden_layers": 10**9}, "config-invalid", "from 1 to 4096"),
    ({"num_attention_heads": 4.0}, "config-invalid", "num_attention_heads is 4.0"),
    ({"num_key_value_heads": 3}, "config-invalid", "num_key_value_heads 3"),
    ({"head_dim": 15}, "config-invalid", "head_dim is 15"),
    ({"rms_norm_eps": 0}, "config-invalid", "rms_norm_eps is 0"),
    ({"rope_theta": "1e6"}, "config-invalid", "rope_theta is '1e6'"),
    ({"tie_word_embeddings": "yes"}, "config-invalid", "tie_word_embeddings is 'yes'"),
    ({"head_dim": 18}, "weights-shape", f"{Q_PROJ} is [64,40] where config.json implies [72,40]"),
    ({"num_hidden_layers": 4}, "weights-missing", "lacks 11 of the tensors"),
]


@pytest.mark.parametrize(("change", "code", "said"), CHANGES)
def test_a_config_that_does_not_fit_is_refused_by_host_and_plugin_alike(change, code, said, tmp_path):
    config = {**QWEN3, **change}
    folder = made(tmp_path, config, random_tensors(parse_config(QWEN3)))
    error = refusal(folder)
    assert error.code == code
    assert said in error.message
    with pytest.raises(BackendError) as caught:
        weights.plan_weights(parse_config(config), Checkpoint.open(folder))
    assert caught.value.error.code == code


def test_weights_in_a_format_that_is_not_read_are_refused(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.float64)
    error = refusal(made(tmp_path, QWEN3, tensors))
    assert error.code == "weights-format"
    assert f"{Q_PROJ} is stored as F64" in error.message


def test_many_problems_are_counted_and_the_first_spelt_out(tmp_path):
    tensors = {n: t for n, t in random_tensors(parse_config(QWEN3)).items() if "layers.1." not in n}
    message = refusal(made(tmp_path, QWEN3, tensors)).message
    assert "lacks 11 of the tensors" in message
    assert "and 6 more" in message
