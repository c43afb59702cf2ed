"""Make a tokenizer.json from the vocabulary inside a GGUF file.

Two kinds are known: "llama" (SentencePiece pieces with scores; Gemma) and "gpt2" with the
pre-tokenizer "qwen2" (byte-level pieces with a list of merges; Qwen). The result gives the
ids that the model's original tokenizer gives; the tests compare them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.sentencepiece_merges import Priority, sentencepiece_merges

__all__ = ["SpecialIds", "Vocabulary", "parse_vocabulary", "tokenizer_config", "tokenizer_json"]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "▁"
"""What SentencePiece writes for a space."""

QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids with a role; None where the file names none."""

    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    ends: tuple[int, ...]
    """Every id that ends an answer."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer part of a GGUF file's metadata, checked."""

    model: str
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    special: SpecialIds
    add_bos: bool
    add_eos: bool
    chat_template: str | None


def parse_vocabulary(metadata: Mapping[str, Any], source: str) -> Vocabulary:
    """Check the tokenizer keys of `metadata`.

    Args:
        source: the file, for messages.

    Raises:
        ModelError: a key is missing or contradicts another, or this kind isn't known here.
    """
    reader = _Keys(metadata, source)
    model = reader.get("model", str)
    tokens = reader.get("tokens", list)
    count = len(tokens)
    # Files without types hold normal tokens only.
    types = reader.sequence("token_type", count, default=[NORMAL] * count)
    merges: list[str] = []
    scores: Sequence[float] = ()
    if model == "llama":
        scores = reader.sequence("scores", count)
        tokens = [
            token.replace(" ", SPACE) if kind == USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ]
        # Llama's own tokenizers put a space before a text; no family served here does.
        if reader.get("add_space_prefix", bool, default=True):
            raise reader.error("add_space_prefix", "is true or missing; only false is known here")
    elif model == "gpt2":
        merges = reader.get("merges", list)
        pre = reader.get("pre", str)
        if pre != "qwen2":
            raise reader.error("pre", f"is {pre!r:.60}; known is 'qwen2'")
    else:
        raise reader.error("model", f"is {model!r:.60}; known are 'llama' and 'gpt2'")
    reader.check_distinct(tokens)
    named = {
        key: reader.token_id(f"{key}_token_id", count)
        for key in ("bos", "eos", "unknown", "padding", "eot", "eom")
    }
    ends = dict.fromkeys(i for i in (named["eos"], named["eot"], named["eom"]) if i is not None)
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        scores=scores,
        merges=merges,
        special=SpecialIds(named["bos"], named["eos"], named["unknown"], named["padding"], tuple(ends)),
        add_bos=reader.get("add_bos_token", bool, default=model == "llama"),
        add_eos=reader.get("add_eos_token", bool, default=False),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


class _Keys:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any], source: str) -> None:
        self.metadata = metadata
        self.source = source

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(
            "gguf-tokenizer",
            f"{self.source}: tokenizer.ggml.{key} {problem}; nothing was imported",
            facts=[("file", self.source), ("key", f"tokenizer.ggml.{key}")],
            remedy="Import the model from its Hugging Face folder, which has a tokenizer.json of its own.",
        )

    def get(self, key: str, kind: type, *, default: Any = None) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, kind):
            raise self.error(key, f"is a {type(value).__name__}; wanted {kind.__name__}")
        return value

    def sequence(self, key: str, count: int, default: Any = None) -> Any:
        values = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if values is None or isinstance(values, str) or not hasattr(values, "__len__"):
            raise self.error(key, "is missing or not an array")
        if len(values) != count:
            raise self.error(key, f"has {len(values)} elements for {count} tokens")
        return values

    def token_id(self, key: str, count: int) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (type(value) is not int or not 0 <= value < count):
            raise self.error(key, f"is {value!r:.40}; the vocabulary has {count} tokens")
        return value

    def check_distinct(self, tokens: Sequence[Any]) -> None:
        if len(set(tokens)) != len(tokens):
            seen: dict[Any, int] = {}
            for i, token in enumerate(tokens):
                if seen.setdefault(token, i) != i:
                    raise self.error("tokens", f"has {token!r:.60} twice, as {seen[token]} and {i}")


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json, in the format of the `tokenizers` library."""
    specific = _sentencepiece(vocabulary) if vocabulary.model == "llama" else _byte_level(vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        **specific,
    }


def tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    special = vocabulary.special
    names = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": special.unknown,
        "pad_token": special.padding,
    }
    return {
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
        **{name: vocabulary.tokens[i] for name, i in names.items() if i is not None},
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens matched in the text as they stand, before anything is normalised or split.

    A control token is special: decoding may hide it, and the text of a message never becomes
    one. GGUF doesn't record the original's own flag.
    """
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in (CONTROL, UNKNOWN),
        }
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _template(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return the post-processor that adds the first and last token, or None if there is none to add."""
    before = [vocabulary.special.bos] if vocabulary.add_bos else []
    after = [vocabulary.special.eos] if vocabulary.add_eos else []
    ids = [i for i in (*before, *after) if i is not None]
    if not ids:
        return None

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        def special(some: Sequence[int | None]) -> list[dict[str, Any]]:
            return [
                {"SpecialToken": {"id": vocabulary.tokens[i], "type_id": type_id}}
                for i in some
                if i is not None
            ]

        return [*special(before), {"Sequence": {"id": name, "type_id": type_id}}, *special(after)]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {
            vocabulary.tokens[i]: {
                "id": vocabulary.tokens[i],
                "ids": [i],
                "tokens": [vocabulary.tokens[i]],
            }
            for i in ids
        },
    }


def _bpe(vocabulary: Vocabulary, merges: Sequence[str], **changes: Any) -> dict[str, Any]:
    unknown = vocabulary.special.unknown
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {
            token: i
            for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
            if kind != UNUSED
        },
        # "left right" takes a quarter of the memory of ["left", "right"] while it is loaded.
        "merges": merges,
        **changes,
    }


# --- byte-level (Qwen) -------------------------------------------------------------------------


def _byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    template = _template(vocabulary)
    words = {"type": "Split", "pattern": {"Regex": QWEN2_WORDS}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": {"type": "Sequence", "processors": [byte_level, template]}
        if template
        else byte_level,
        "decoder": byte_level,
        "model": _bpe(vocabulary, vocabulary.merges, unk_token=None),
    }


# --- SentencePiece (Gemma) ---------------------------------------------------------------------


def _sentencepiece(vocabulary: Vocabulary) -> dict[str, Any]:
    priorities: dict[str, Priority] = {
        # SentencePiece gives its user-defined pieces the score 0; GGUF writes -1000 for them.
        token: (-score if kind == NORMAL else 0.0, i)
        for i, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
        )
        if kind in (NORMAL, USER_DEFINED)
    }
    replace = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "post_processor": _template(vocabulary),
        "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": _bpe(vocabulary, sentencepiece_merges(priorities), fuse_unk=True, byte_fallback=True),
    }
