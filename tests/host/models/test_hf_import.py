"""hf_import: a folder is copied whole, or refused before anything is written."""

import json
import os
import shutil
from pathlib import Path

import pytest

from vox_host.errors import ModelError
from vox_host.models.hf_import import HuggingFaceSource
from vox_plugin_api.checkpoint import Checkpoint

CASES = Path(__file__).parents[2] / "cases"


def silent(step, done, total):
    pass


def write(folder, target):
    target.mkdir()
    return HuggingFaceSource(folder).write(target, target, silent)


def refusal(folder):
    with pytest.raises(ModelError) as caught:
        HuggingFaceSource(folder)
    return caught.value


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_shards_index_tokenizer_and_terms_are_copied_as_they_are(hugging_face_folder, tmp_path):
    contents = write(hugging_face_folder, tmp_path / "model")
    assert contents.architecture == "qwen3"
    names = {str(path.relative_to(tmp_path / "model")) for path in (tmp_path / "model").rglob("*.*")}
    copied = {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert names == copied
    assert set(contents.digests) == copied | {"license/LICENSE"}
    for name in copied:
        assert (tmp_path / "model" / name).read_bytes() == (hugging_face_folder / name).read_bytes()
    assert len(Checkpoint.open(tmp_path / "model")) == 13


def test_the_copy_does_not_follow_the_original(hugging_face_folder, tmp_path):
    write(hugging_face_folder, tmp_path / "model")
    before = (tmp_path / "model" / "config.json").read_bytes()
    with (hugging_face_folder / "config.json").open("r+b") as file:
        file.write(b"#####")
    assert (tmp_path / "model" / "config.json").read_bytes() == before


def test_what_is_no_part_of_a_model_is_left_behind(hugging_face_folder, tmp_path):
    (hugging_face_folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (hugging_face_folder / "train.py").write_text("raise SystemExit")
    (hugging_face_folder / "model-00003-of-00002.safetensors").write_bytes(b"")
    digests = write(hugging_face_folder, tmp_path / "model").digests
    assert not {"pytorch_model.bin", "train.py", "model-00003-of-00002.safetensors"} & set(digests)


def test_our_own_quantised_folders_come_back(tmp_path, write_gguf):
    from vox_host.models.gguf_import import GgufSource

    write_gguf(tmp_path / "m.gguf")
    (tmp_path / "first").mkdir()
    first = GgufSource(tmp_path / "m.gguf").write(tmp_path / "first", tmp_path, silent)
    second = write(tmp_path / "first", tmp_path / "second")
    assert second == first


@pytest.mark.parametrize("case", ["C5_shard_absent", "C5_index_lies", "C5_no_weight_map", "C5_escape/m"])
def test_a_malformed_checkpoint_is_refused_before_anything_is_copied(case):
    assert "nothing was imported" in refusal(CASES / "hand/ckpt" / case).message


def test_pickles_are_refused_with_the_reason(hugging_face_folder):
    for path in hugging_face_folder.glob("model*"):
        path.unlink()
    (hugging_face_folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    error = refusal(hugging_face_folder)
    assert "run code" in error.remedy


def test_a_missing_tokenizer_is_named_with_what_is_there_instead(hugging_face_folder):
    (hugging_face_folder / "tokenizer.json").unlink()
    (hugging_face_folder / "tokenizer.model").write_bytes(b"")
    error = refusal(hugging_face_folder)
    assert error.code == "tokenizer-missing"
    assert "tokenizer.json" in error.message
    assert dict(error.facts)["found instead"] == ["tokenizer.model"]


def test_a_tokenizer_that_does_not_load_is_refused(hugging_face_folder, tmp_path):
    (hugging_face_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        write(hugging_face_folder, tmp_path / "model")
    assert caught.value.code == "tokenizer-invalid"


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": 3}, "model_type is 3"),
        ({"vision_config": {}}, "a multimodal model (vision_config) and has no text_config"),
        ({"text_config": {}}, "text_config.hidden_size is missing"),
    ],
)
def test_a_config_that_does_not_say_what_the_model_is_is_refused(hugging_face_folder, changes, blamed):
    change_config(hugging_face_folder, **changes)
    assert blamed in refusal(hugging_face_folder).message


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "a", "model_type": "b"}', None])
def test_a_config_that_is_not_one_json_object_is_refused(hugging_face_folder, text):
    if text is None:
        (hugging_face_folder / "config.json").unlink()
    else:
        (hugging_face_folder / "config.json").write_text(text)
    assert "config.json" in refusal(hugging_face_folder).message


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: tongyi-qianwen\n---\n", "tongyi-qianwen"),
        ("# A model\nlicense: none at all\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_licence_is_the_one_the_readme_states(hugging_face_folder, readme, expected):
    (hugging_face_folder / "README.md").unlink()
    if readme is not None:
        (hugging_face_folder / "README.md").write_text(readme)
    licence = HuggingFaceSource(hugging_face_folder).license
    assert licence.id == expected
    if expected == "unknown":
        assert str(hugging_face_folder / "LICENSE") in licence.terms


def test_without_any_terms_the_licence_says_so(hugging_face_folder):
    (hugging_face_folder / "README.md").unlink()
    (hugging_face_folder / "LICENSE").unlink()
    assert "states no licence" in HuggingFaceSource(hugging_face_folder).license.terms


def test_the_same_folder_elsewhere_is_the_same_model(hugging_face_folder, tmp_path):
    shutil.copytree(hugging_face_folder, tmp_path / "elsewhere")
    one = HuggingFaceSource(hugging_face_folder).identity(silent)
    other = HuggingFaceSource(tmp_path / "elsewhere").identity(silent)
    assert one["sha256"] == other["sha256"]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", [99999, "x", -1, True, 1.0, [1, 99999]])
def test_a_token_id_that_no_token_has_is_refused(hugging_face_folder, file, key, value):
    path = hugging_face_folder / file
    size = json.loads((hugging_face_folder / "config.json").read_text())["vocab_size"]
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {key: value}))
    error = refusal(hugging_face_folder)
    assert error.code == "config-invalid"
    assert f"{path}: {key} is {value!r}; wanted a token id" in error.message
    assert f"from 0 to {size - 1} " in error.message


@pytest.mark.parametrize("value", [None, 0, [0, 1]])
def test_token_ids_of_the_vocabulary_are_taken(hugging_face_folder, value):
    change_config(hugging_face_folder, eos_token_id=value, bos_token_id=value)
    HuggingFaceSource(hugging_face_folder)


def test_a_config_that_is_a_pipe_is_not_called_missing(hugging_face_folder):
    path = hugging_face_folder / "config.json"
    path.unlink()
    os.mkfifo(path)
    assert f"{path} is not a regular file" in refusal(hugging_face_folder).message
