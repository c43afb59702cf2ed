"""gguf_import: every block arrives as it was, under its new name."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from vox_host.errors import ModelError
from vox_host.models.gguf_config import FAMILIES, hugging_face_names
from vox_host.models.gguf_header import read_gguf_header
from vox_host.models.gguf_import import GgufSource, translate
from vox_host.models.safetensors_write import write_safetensors
from vox_plugin_api.checkpoint import Checkpoint

CASES = Path(__file__).parents[2] / "cases"
NORMS = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] == "Q6"]


def silent(step, done, total):
    pass


def imported(source, directory):
    directory.mkdir()
    return source.write(directory, directory, silent)


@pytest.fixture(params=["gemma3", "qwen3"])
def architecture(request):
    return request.param


@pytest.fixture
def small(tmp_path, write_gguf, architecture):
    """(what was written, the checkpoint's directory) of a small complete model."""
    written = write_gguf(tmp_path / "small.gguf", architecture)
    imported(GgufSource(tmp_path / "small.gguf"), tmp_path / "model")
    return written, tmp_path / "model"


def test_every_byte_of_every_tensor_survives(tmp_path, small, architecture):
    written, directory = small
    names = hugging_face_names(read_gguf_header(tmp_path / "small.gguf"), FAMILIES[architecture])
    checkpoint = Checkpoint.open(directory)
    assert len(checkpoint) == len(written)
    for name, tensor in names.items():
        kind, data = written[tensor.name]
        assert checkpoint.data(name) == data.tobytes(), name
        quantised = checkpoint.quant_metadata.tensors.get(name)
        if kind == "F32":
            assert quantised is None
            assert (checkpoint[name].dtype, checkpoint[name].shape) == ("F32", data.shape)
        else:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
            assert quantised.format == kind.lower()
            assert quantised.shape == (data.shape[0], data.shape[1] // block_bytes * block)


def test_all_block_formats_take_part(small):
    formats = {tensor.format for tensor in Checkpoint.open(small[1]).quant_metadata.tensors.values()}
    assert formats == {"q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"}


def test_other_software_reads_the_file(small):
    with safe_open(small[1] / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        tensor = file.get_tensor("model.norm.weight")
    assert tensor.dtype == np.float32
    assert np.array_equal(tensor, small[0]["output_norm.weight"][1])


def test_the_floats_lie_on_their_natural_boundaries(small):
    checkpoint = Checkpoint.open(small[1])
    assert all(entry.offset % 8 == 0 for entry in checkpoint.values() if entry.dtype == "F32")


def test_config_and_tokenizer_are_complete(small, architecture):
    config = json.loads((small[1] / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(small[1] / "tokenizer.json"))
    assert config["model_type"] == FAMILIES[architecture].model_type
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["tie_word_embeddings"]
    generation = json.loads((small[1] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]
    if architecture == "qwen3":
        ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
        assert config["eos_token_id"] == ends
    else:
        assert config["eos_token_id"] == 1


def test_an_output_matrix_unties_the_embedding(tmp_path, write_gguf):
    write_gguf(tmp_path / "m.gguf", "qwen3", head=True)
    translation = translate(read_gguf_header(tmp_path / "m.gguf"))
    assert "lm_head.weight" in {piece.name for piece in translation.pieces}
    assert translation.config["tie_word_embeddings"] is False


def test_importing_twice_gives_the_same_bytes(tmp_path, write_gguf):
    write_gguf(tmp_path / "m.gguf")
    first = imported(GgufSource(tmp_path / "m.gguf"), tmp_path / "one").digests
    assert imported(GgufSource(tmp_path / "m.gguf"), tmp_path / "two").digests == first


def test_a_chat_template_is_kept_as_text(tmp_path, write_gguf):
    template = "{% for m in messages %}é{{ m.content }}\n{% endfor %}"
    write_gguf(tmp_path / "m.gguf", keys={"tokenizer.chat_template": template})
    imported(GgufSource(tmp_path / "m.gguf"), tmp_path / "model")
    assert (tmp_path / "model" / "chat_template.jinja").read_text(encoding="utf-8") == template


def test_the_licence_is_the_one_the_file_states(tmp_path, write_gguf):
    write_gguf(tmp_path / "m.gguf", keys={"general.license.link": "https://example.org/terms"})
    licence = GgufSource(tmp_path / "m.gguf").license
    assert (licence.id, licence.terms) == ("apache-2.0", "https://example.org/terms")


@pytest.mark.parametrize(
    ("changes", "code", "blamed"),
    [
        ({"drop": ["blk.1.attn_q_norm"]}, "weights-missing", "blk.1.attn_q_norm.weight"),
        ({"drop": ["token_embd"]}, "weights-missing", "token_embd.weight"),
        ({"extra": ["blk.0.mystery"]}, "gguf-tensor-unknown", "blk.0.mystery.weight"),
        ({"keys": {"split.count": 3}}, "gguf-split", "one of 3 parts"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(tmp_path, write_gguf, changes, code, blamed):
    write_gguf(tmp_path / "m.gguf", "qwen3", **changes)
    with pytest.raises(ModelError) as caught:
        GgufSource(tmp_path / "m.gguf")
    assert caught.value.code == code
    assert blamed in caught.value.message


@pytest.mark.parametrize("case", NORMS, ids=lambda case: Path(case["file"]).stem)
def test_a_norm_multiplies_by_what_its_family_means(tmp_path, case):
    translation = translate(read_gguf_header(CASES / case["file"]))
    write_safetensors(
        tmp_path / "model.safetensors",
        CASES / case["file"],
        translation.pieces,
        step="weights",
        progress=silent,
    )
    (tmp_path / "quant-metadata.json").write_text(json.dumps(translation.quant_metadata))
    checkpoint = Checkpoint.open(tmp_path)
    stored = np.frombuffer(checkpoint.data("model.layers.0.input_layernorm.weight"), np.float32)
    family_adds_one = translation.config["model_type"].startswith("gemma3")
    adds_one = family_adds_one and not checkpoint.quant_metadata.norms_include_one
    effective = stored + np.float32(1 if adds_one else 0)
    start, step = case["expect"]["value"]["effective_multiplier"].split(" + i/")
    expected = np.float32(start) + np.arange(len(stored), dtype=np.float32) / np.float32(step)
    assert np.array_equal(effective, expected)


@pytest.mark.real_model
def test_the_demo_model_arrives_whole(demo_gguf, demo_model):
    file = read_gguf_header(demo_gguf)
    checkpoint = Checkpoint.open(demo_model)
    assert len(checkpoint) == len(file.tensors) == 236
    with demo_gguf.open("rb") as original:
        for name, tensor in hugging_face_names(file, FAMILIES["gemma3"]).items():
            original.seek(tensor.offset)
            assert checkpoint.data(name) == original.read(tensor.nbytes), name
            checkpoint.release(name)
            quantised = checkpoint.quant_metadata.tensors.get(name)
            assert (quantised.shape if quantised else checkpoint[name].shape) == tensor.shape
    assert checkpoint.quant_metadata.norms_include_one
