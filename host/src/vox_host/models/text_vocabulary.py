"""A tokenizer for one text: of a large vocabulary, the pieces that can occur in that text.

Building all of Gemma's vocabulary and merges takes the tokenizers library half a second, and it holds the
interpreter's lock meanwhile. A command that encodes one text and ends needs few of them
(`docs/models.md`, "One text", says why the ids are the same).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from vox_host.models.tokenizer_file import trim_heap

__all__ = ["TextVocabulary", "read_for_text"]

_SPACES_ARE_PIECES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_MAX_CHARS = 4096
"""Each piece is looked for in the text: in a long one that takes longer than keeping all."""
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


class TextVocabulary:
    """What `Tokenizer` asks of the library's tokenizer: every piece by id and by text, and the encoding of
    stretches of one text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: dict[str, int], text: str) -> None:
        """`tokenizer` is cut down to `text`; `vocabulary` holds every piece and its id."""
        self._tokenizer = tokenizer
        self._ids = vocabulary
        self._pieces = {token_id: piece for piece, token_id in vocabulary.items()}
        self._text = text

    @property
    def decoder(self) -> Any:
        """The decoder that tokenizer.json describes."""
        return self._tokenizer.decoder

    @property
    def encode_special_tokens(self) -> bool:
        """Whether the names of special tokens are encoded as plain text."""
        found: bool = self._tokenizer.encode_special_tokens
        return found

    @encode_special_tokens.setter
    def encode_special_tokens(self, wanted: bool) -> None:
        self._tokenizer.encode_special_tokens = wanted

    def get_added_tokens_decoder(self) -> Any:
        """Return the added tokens by id."""
        return self._tokenizer.get_added_tokens_decoder()

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Return how many pieces there are; each added token is one of them."""
        return len(self._pieces)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece with this id, whether it can occur in the text or not."""
        return self._pieces.get(token_id)

    def token_to_id(self, piece: str) -> int | None:
        """Return the id of this piece, whether it can occur in the text or not."""
        return self._ids.get(piece)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> Any:
        """Encode stretches of the one text.

        Raises:
            ValueError: one is no stretch of it; pieces of it may be missing here.
        """
        if not all(text in self._text for text in texts):
            raise ValueError("this vocabulary was cut down to another text")
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)


def read_for_text(path: Path, text: str) -> TextVocabulary | None:
    """Read `path`, a tokenizer.json, for the stretches of `text` alone.

    None where the text is long, or the file not of the form that the import writes for SentencePiece's
    vocabularies, the only one that is cut down: the library reads every form, and says what is wrong with a
    damaged file.
    """
    if len(text) > _MAX_CHARS:
        return None
    try:
        description = json.loads(path.read_bytes())
        vocabulary: dict[str, int] = description["model"]["vocab"]
        if not _can_be_cut(description, vocabulary):
            return None
        _cut(description, text.replace(" ", "\u2581"))
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(description))
    except Exception:  # noqa: BLE001 - also the library's bare one: whoever reads all of it says what is wrong
        return None
    del description
    trim_heap()
    return TextVocabulary(tokenizer, vocabulary, text)


def _can_be_cut(description: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    model = description["model"]
    unknown = model["unk_token"]
    return (
        model["type"] == "BPE"
        and description["normalizer"] == _SPACES_ARE_PIECES
        and description["pre_tokenizer"] is None
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and all(vocabulary.get(token["content"]) == token["id"] for token in description["added_tokens"])
        # What stands for absent pieces is no stretch of the text; merged, it could make another such piece.
        and not any(unknown in merge or _is_of_bytes(merge) for merge in model["merges"])
    )


def _is_of_bytes(merge: str) -> bool:
    return "<0x" in merge and any(map(_BYTE_PIECE.fullmatch, merge.split(" ")))


def _cut(description: dict[str, Any], normalised: str) -> None:
    """Leave the text's stretches, the pieces that stand for what is absent, and their merges."""
    model = description["model"]
    always = {token["content"] for token in description["added_tokens"]} | {model["unk_token"]}
    kept = {
        piece: token_id
        for piece, token_id in model["vocab"].items()
        if piece in normalised or piece in always or _BYTE_PIECE.fullmatch(piece)
    }
    possible = (merge for merge in model["merges"] if merge.replace(" ", "") in kept)
    model["vocab"] = kept
    # The name of an added token stays though its parts may not.
    model["merges"] = [merge for merge in possible if all(part in kept for part in merge.split(" "))]
