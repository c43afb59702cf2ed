"""gguf_tokenizer: the ids of the original tokenizer, from the GGUF's own vocabulary."""

import json
import os
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vox_host.errors import ModelError
from vox_host.models.gguf_header import read_gguf_header
from vox_host.models.gguf_tokenizer import parse_vocabulary, tokenizer_config, tokenizer_json


def metadata(kind, **changes):
    values = {f"tokenizer.ggml.{key}": value for key, value in kind.items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in values.items() if value is not None}


@pytest.fixture(scope="session")
def gemma_like(sentencepiece):
    tokens, scores, types = sentencepiece
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "padding_token_id": 0,
        "add_bos_token": True,
        "add_space_prefix": False,
    }


def tokenizer_of(values):
    return Tokenizer.from_str(json.dumps(tokenizer_json(parse_vocabulary(values, "x.gguf"))))


def original(variable):
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} does not name the original tokenizer.json")
    return path


# --- Gemma -----------------------------------------------------------------------------------


@pytest.mark.real_model
def test_gemma_gives_the_original_ids_and_texts(demo_model, texts, golden):
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    for text, ids, decoded in zip(texts, golden["gemma3"]["ids"], golden["gemma3"]["decoded"], strict=True):
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == decoded


@pytest.mark.real_model
@pytest.mark.oracle
def test_gemma_equals_the_original_on_any_text(demo_model):
    theirs = Tokenizer.from_file(original("VOX_GEMMA3_TOKENIZER"))
    ours = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    # The image token is beyond the text model's vocabulary.
    pieces = sorted(set(theirs.get_vocab()) - {"<image_soft_token>"})

    @settings(max_examples=1500, deadline=None)
    @given(st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=12)), max_size=12))
    def compare(parts):
        text = "".join(parts)
        if "<image_soft_token>" not in text:
            assert ours.encode(text).ids == theirs.encode(text).ids

    compare()


@pytest.mark.real_model
@pytest.mark.oracle
def test_gemma_keeps_of_the_original_merges_one_for_each_piece_in_their_order(demo_model):
    theirs = json.loads(Path(original("VOX_GEMMA3_TOKENIZER")).read_text())["model"]["merges"]
    ours = json.loads((demo_model / "tokenizer.json").read_text())["model"]["merges"]
    kept = set(ours)
    assert [text for text in (" ".join(pair) for pair in theirs) if text in kept] == ours
    assert len({text.replace(" ", "") for text in ours}) == len(ours)


def test_spaces_bytes_and_added_tokens_become_what_sentencepiece_makes_of_them(gemma_like):
    tokenizer = tokenizer_of(metadata(gemma_like))

    def tokens(text):
        return tokenizer.encode(text).tokens

    assert tokens("hello the") == ["<bos>", "hello", "▁the"]
    assert tokens("the   the") == ["<bos>", "the", "▁▁", "▁the"]
    assert tokens("é") == ["<bos>", "<0xC3>", "<0xA9>"]
    assert tokens("a\n\na") == ["<bos>", "a", "\n\n", "a"]
    # The user-defined piece of two spaces is written as SentencePiece writes it.
    assert tokens("a▁▁▁a") == ["<bos>", "a", "▁▁", "▁a"]
    assert tokens("<start_of_turn>a<eos>") == ["<bos>", "<start_of_turn>", "a", "<eos>"]
    assert tokenizer.decode(tokenizer.encode("hello é   the").ids) == "hello é   the"


def test_a_control_token_is_special_and_a_user_defined_one_is_not(gemma_like):
    described = tokenizer_json(parse_vocabulary(metadata(gemma_like), "x"))
    added = {token["content"]: token for token in described["added_tokens"]}
    assert added["<start_of_turn>"]["special"]
    assert not added["\n\n"]["special"]
    tokenizer = tokenizer_of(metadata(gemma_like))
    tokenizer.encode_special_tokens = True
    assert "<start_of_turn>" not in tokenizer.encode("<start_of_turn>").tokens


@pytest.mark.parametrize(
    ("bos", "eos", "tokens"),
    [
        (True, False, ["<bos>", "a"]),
        (False, True, ["a", "<eos>"]),
        (True, True, ["<bos>", "a", "<eos>"]),
        (False, False, ["a"]),
        (None, None, ["<bos>", "a"]),
    ],
)
def test_first_and_last_token_are_added_as_the_file_says(gemma_like, bos, eos, tokens):
    tokenizer = tokenizer_of(metadata(gemma_like, add_bos_token=bos, add_eos_token=eos))
    assert tokenizer.encode("a").tokens == tokens
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]


def test_the_config_names_the_special_tokens(gemma_like):
    config = tokenizer_config(parse_vocabulary(metadata(gemma_like), "x"))
    assert config["bos_token"] == "<bos>"
    assert config["eos_token"] == "<eos>"
    assert config["pad_token"] == "<pad>"
    assert config["add_bos_token"] is True


# --- Qwen ------------------------------------------------------------------------------------


def read_back(tmp_path, add_tokenizer):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(read_gguf_header(path).metadata)


def test_a_byte_level_tokenizer_survives_the_way_through_gguf(tmp_path, byte_level, texts, add_byte_level):
    ours = tokenizer_of(read_back(tmp_path, lambda writer: add_byte_level(writer, byte_level)))
    for text in texts:
        ids = byte_level.encode(text).ids
        assert ours.encode(text).ids == ids
        decoded = byte_level.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == decoded


def test_a_byte_level_tokenizer_survives_on_any_text(tmp_path, byte_level, add_byte_level):
    ours = tokenizer_of(read_back(tmp_path, lambda writer: add_byte_level(writer, byte_level)))

    @settings(max_examples=300, deadline=None)
    @given(st.text(max_size=60))
    def compare(text):
        assert ours.encode(text).ids == byte_level.encode(text).ids

    compare()


@pytest.mark.oracle
def test_qwen_gives_the_original_ids_through_gguf(tmp_path, texts, golden, add_byte_level):
    theirs = Tokenizer.from_file(original("VOX_QWEN3_TOKENIZER"))
    ours = tokenizer_of(read_back(tmp_path, lambda writer: add_byte_level(writer, theirs)))
    for text, ids, decoded in zip(texts, golden["qwen3"]["ids"], golden["qwen3"]["decoded"], strict=True):
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == decoded

    @settings(max_examples=500, deadline=None)
    @given(st.text(max_size=80))
    def compare(text):
        assert ours.encode(text).ids == theirs.encode(text).ids

    compare()


def test_padding_tokens_of_the_matrix_are_no_tokens_of_the_text(tmp_path, byte_level, add_byte_level):
    values = read_back(tmp_path, lambda writer: add_byte_level(writer, byte_level))
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "[PAD701]"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 5]
    assert tokenizer_of(values).token_to_id("[PAD701]") is None


def test_every_id_that_ends_an_answer_is_known(tmp_path, byte_level, add_byte_level):
    values = read_back(tmp_path, lambda writer: add_byte_level(writer, byte_level))
    ends = parse_vocabulary(values, "x").special.ends
    assert ends == (byte_level.token_to_id("<|im_end|>"), byte_level.token_to_id("<|endoftext|>"))


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": 7}, "tokenizer.ggml.model is a int"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a"]}, "elements for 1 tokens"),
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 elements"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 elements"),
        ({"bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id is 1000000"),
        ({"bos_token_id": "2"}, "tokenizer.ggml.bos_token_id is '2'"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token is a int"),
        ({"add_space_prefix": None}, "tokenizer.ggml.add_space_prefix is true or missing"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "merges": []}, "tokenizer.ggml.pre is missing"),
        ({"model": "gpt2", "merges": [], "pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_names_its_key(gemma_like, changes, blamed):
    with pytest.raises(ModelError) as caught:
        parse_vocabulary(metadata(gemma_like, **changes), "x.gguf")
    assert blamed in caught.value.message
    assert "x.gguf" in caught.value.message


def test_a_token_that_occurs_twice_is_named_with_both_ids(gemma_like):
    tokens = list(gemma_like["tokens"])
    tokens[8] = "<bos>"
    with pytest.raises(ModelError, match="'<bos>' twice, as 2 and 8"):
        parse_vocabulary(metadata(gemma_like, tokens=tokens), "x.gguf")
