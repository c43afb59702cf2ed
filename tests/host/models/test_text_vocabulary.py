"""A vocabulary cut down to one text gives that text the ids of the whole vocabulary."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vox_host.models.text_vocabulary import read_for_text
from vox_host.models.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = list("abhelo\u2581\n<>0xE2")
WORDS = [
    "he",
    "ll",
    "hell",
    "hello",
    "\u2581he",
    "\u2581hello",
    "aa",
    "aaa",
    "ab",
    "ba",
    "bab",
    "\n\n",
    "\u2581\u2581",
    "<0",
]
NAMES = ["<pad>", "<eos>", "<bos>", "<unk>", "<go>", "hello ab"]


def description(**changes):
    pieces = [*NAMES, *BYTES, *CHARACTERS, *WORDS]
    merges = [
        f"{word[:at]} {word[at:]}"
        for word in WORDS
        for at in range(1, len(word))
        if word[:at] in pieces and word[at:] in pieces
    ]
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
        "vocab": {piece: at for at, piece in enumerate(pieces)}, "merges": merges,
    }  # fmt: skip
    made = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [
            {"id": at, "content": name, "single_word": False, "lstrip": name == "<go>", "rstrip": False,
             "normalized": False, "special": name[0] == "<"}
            for at, name in enumerate(NAMES)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
        ]},
        "model": model,
    }  # fmt: skip
    for key, value in changes.items():
        (model if key in model else made)[key] = value
    return made


def write(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(description(**changes)))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def whole(folder):
    return Tokenizer.load(folder)


texts = st.lists(
    st.sampled_from([*WORDS, *CHARACTERS, *NAMES, " ", "  ", "<0xE2>", "\u00e9", "\U0001f600", "<un", "k>"]),
    max_size=12,
).map("".join) | st.text(max_size=20)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=texts)
def test_the_ids_of_the_text_and_of_its_stretches_are_those_of_the_whole(folder, whole, text):
    cut = Tokenizer.load(folder, text)
    assert read_for_text(folder / "tokenizer.json", text) is not None
    assert cut.encode(text) == whole.encode(text)
    assert cut.encode_markup(text, range(0, len(text), 3)) == whole.encode_markup(
        text, range(0, len(text), 3)
    )
    assert cut.encode(text[1:-1]) == whole.encode(text[1:-1])


def test_everything_else_is_that_of_the_whole(folder, whole):
    cut = Tokenizer.load(folder, "b")
    assert (cut.vocab_size, cut.bos_id, cut.eos_ids) == (whole.vocab_size, whole.bos_id, whole.eos_ids)
    assert (cut.special_names, cut.special_tokens) == (whole.special_names, whole.special_tokens)
    for token_id in range(whole.vocab_size + 2):
        assert cut.token_bytes(token_id) == whole.token_bytes(token_id)
        assert cut.text_bytes(token_id) == whole.text_bytes(token_id)
    assert cut.token_bytes(whole.vocab_size - len(WORDS)) == b"he"


def test_another_text_is_not_encoded_with_pieces_missing(folder):
    with pytest.raises(ValueError, match="another text"):
        Tokenizer.load(folder, "hell").encode("hello")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": None},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}},
        {"merges": [["h", "e"]]},
        {"end_of_word_suffix": "o"},
        {"vocab": {piece: at for at, piece in enumerate([*NAMES, *BYTES, *CHARACTERS, "<0xE2><0x96>"])},
         "merges": ["<0xE2> <0x96>"]},
        {"vocab": {piece: at for at, piece in enumerate([*NAMES, *BYTES, *CHARACTERS, "<unk>a"])},
         "merges": ["<unk> a"]},
        {"added_tokens": [{"id": 600, "content": "new", "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False, "special": True}]},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        {"model": {}},
    ],
)  # fmt: skip
def test_other_forms_are_left_to_the_library(tmp_path, changes):
    path = write(tmp_path, **changes) / "tokenizer.json"
    assert read_for_text(path, "hello") is None


def test_a_long_text_is_left_to_the_library(folder):
    assert read_for_text(folder / "tokenizer.json", "a" * 4096) is not None
    assert read_for_text(folder / "tokenizer.json", "a" * 4097) is None


@pytest.mark.real_model
def test_the_demo_models_ids_are_the_same(demo_model):
    whole = Tokenizer.load(demo_model)
    for text in (
        "Hello  world\n\n\tx",
        "漢字 😀 👨‍👩 é",
        "a<b>c</b> <0xE2>",
        "<bos>½ ﷺ \u00a0 end<eos>",
        "    two\n        more",
        "",
    ):
        cut = Tokenizer.load(demo_model, text)
        assert cut.encode(text) == whole.encode(text)
        assert all(cut.token_bytes(i) == whole.token_bytes(i) for i in range(0, whole.vocab_size, 97))
