"""Text to token ids and token ids to bytes, with the model's own tokenizer.

Three kinds of text are told apart (docs/http.md, "Tokens"):

* a completion's prompt: special tokens may be written in it, and the tokenizer adds its own
  (one BOS, never two);
* a rendered chat template: its markup may hold special tokens, nothing is added, and at
  protected positions (what a message's author wrote) no special token is seen;
* a token on its own, as bytes: a character may span several tokens, so there is no decoding
  token by token to text here; `chat.text_stream` joins the bytes.

Encoding releases the GIL and takes place in slices where the text is long, so a thread can do
it beside an event loop, and text that can't fit is given up early.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from vox_host.errors import ModelError
from vox_host.literals import LiteralFinder
from vox_host.models.text_vocabulary import TextVocabulary, read_for_text
from vox_host.models.tokenizer_file import load_tokenizer

__all__ = ["ChatTemplateSource", "PromptTooLong", "Tokenizer"]

_SLICE_CHARS = 32 * 1024
_SLACK_TOKENS_PER_CUT = 8
"""A cut through the middle of a word may cost tokens that the whole text doesn't have."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_JSON_LIMIT_BYTES = 64 * 1024 * 1024


class PromptTooLong(Exception):  # noqa: N818 -- a finding, not a malfunction
    """The text has more tokens than allowed; `tokens` is how many, estimated if the text was given up."""

    def __init__(self, tokens: int, limit: int, *, is_estimate: bool) -> None:
        super().__init__(f"{tokens} tokens, limit {limit}")
        self.tokens = tokens
        self.limit = limit
        self.is_estimate = is_estimate


@dataclass(frozen=True, slots=True)
class ChatTemplateSource:
    """The model's chat template and the file it is from."""

    source: str
    file: str


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer | TextVocabulary,
        *,
        bos_id: int | None,
        eos_ids: frozenset[int],
        special_names: dict[str, str],
        chat_template: ChatTemplateSource | None,
        where: str = "tokenizer.json",
    ) -> None:
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Every token that ends an answer."""
        self.special_names = special_names
        """The texts templates know by name: bos_token, eos_token, ..."""
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        # `encode_special_tokens` is a switch on the shared object, so each encoding holds the lock.
        self._lock = threading.Lock()
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: t.content for token_id, t in added.items() if t.special}
        self._special_by_text = {t.content: t for t in added.values() if t.special}
        self._special_texts = LiteralFinder(self._special_by_text)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._bytes_of = lru_cache(maxsize=8192)(_token_decoder(tokenizer, where))

    @staticmethod
    def load(model_dir: Path, only_text: str | None = None) -> Tokenizer:
        """Read tokenizer.json and what other files of the folder say about special tokens.

        With `only_text`, stretches of that text are all that can be encoded, and a large vocabulary is
        read in less than half the time. Ids and the bytes of tokens are the same.

        Raises:
            ModelError: a file is missing or malformed.
        """
        path = model_dir / "tokenizer.json"
        cut_down = None if only_text is None else read_for_text(path, only_text)
        tokenizer = load_tokenizer(path) if cut_down is None else cut_down
        config = _read_json(model_dir / "tokenizer_config.json")
        model = _read_json(model_dir / "config.json")
        model = (
            {**model, **model.get("text_config", {})} if isinstance(model.get("text_config"), dict) else model
        )
        generation = _read_json(model_dir / "generation_config.json")
        names = _special_names(config)
        bos_id = _first_id(tokenizer, names.get("bos_token"), model.get("bos_token_id"))
        eos_ids: set[int] = set()
        for source in (generation, model):
            eos_ids.update(_ids(source.get("eos_token_id")))
        if "eos_token" in names and (eos := tokenizer.token_to_id(names["eos_token"])) is not None:
            eos_ids.add(eos)
        for name, token_id in (("bos_token", bos_id), ("eos_token", min(eos_ids, default=None))):
            if name not in names and token_id is not None and (text := tokenizer.id_to_token(token_id)):
                names[name] = text
        return Tokenizer(
            tokenizer,
            bos_id=bos_id,
            eos_ids=frozenset(eos_ids),
            special_names=names,
            chat_template=_chat_template(model_dir, config),
            where=str(path),
        )

    @property
    def special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        return list(self._special_by_text)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Return the ids of a completion's prompt.

        Raises:
            PromptTooLong: it has more than `limit` tokens.
        """
        if limit is not None:
            self.check_length(text, limit)
        ids = self._encode(text, add_special_tokens=add_special_tokens)
        # A prompt that spells the BOS itself gets no second one from the post-processor.
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            without = self._encode(text, add_special_tokens=False)
            ids = without if without[:1] == [self.bos_id] else ids
        return _within(ids, limit)

    def encode_markup(
        self, text: str, protected: Sequence[int] = (), *, limit: int | None = None
    ) -> list[int]:
        """Return the ids of a rendered template: special tokens are read, none is added.

        `protected` are positions whose characters are never part of a special token.

        Raises:
            PromptTooLong: it has more than `limit` tokens.
        """
        if limit is not None:
            self.check_length(text, limit)
        ids: list[int] = []
        for piece, positions in self._pieces(text, protected):
            if positions:
                ids += self._encode_protected(piece, positions)
            else:
                ids += self._encode(piece, add_special_tokens=False)
        return _within(ids, limit)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, special or not."""
        content = self._special.get(token_id)
        return content.encode() if content is not None else self._bytes_of(token_id)

    def text_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to an answer's text: none for a special token."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is markup, not text."""
        return token_id in self._special

    def _encode(self, text: str, *, add_special_tokens: bool, specials_are_text: bool = False) -> list[int]:
        with self._lock:
            self._tokenizer.encode_special_tokens = specials_are_text
            # The batch form releases the GIL, the single one doesn't.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def check_length(self, text: str, limit: int) -> None:
        """Encode little more than `limit` tokens of a long text, to find out if it can't fit.

        Raises:
            PromptTooLong: it can't.
        """
        if len(text) <= 2 * _SLICE_CHARS:
            return
        count = 0
        for cuts, start in enumerate(range(0, len(text), _SLICE_CHARS)):
            count += len(self._encode(text[start : start + _SLICE_CHARS], add_special_tokens=False))
            if count - _SLACK_TOKENS_PER_CUT * cuts > limit:
                share = min(1.0, (start + _SLICE_CHARS) / len(text))
                raise PromptTooLong(round(count / share), limit, is_estimate=share < 1.0)

    def _encode_protected(self, text: str, positions: Sequence[int]) -> list[int]:
        """Encode text in which no special token may be seen."""
        ids = self._encode(text, add_special_tokens=False, specials_are_text=True)
        if self._special.keys().isdisjoint(ids):
            return ids
        # Some vocabularies hold a special token's text as a word, too. Cut behind the first
        # character of each such text; what is found even so (a token of one character) is dropped.
        cuts = sorted({0, len(text), *(p + 1 for p in positions)})
        ids = []
        for start, end in pairwise(cuts):
            ids += self._encode(text[start:end], add_special_tokens=False, specials_are_text=True)
        return [token_id for token_id in ids if token_id not in self._special]

    def _pieces(self, text: str, protected: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Cut a prompt around the text that holds protected positions; each piece comes with its own.

        Between two real special tokens the tokenizer sees the same text either way, so only
        runs that have a protected position are encoded apart.
        """
        if not protected or not self._special_texts:
            return [(text, [])]
        pieces: list[tuple[str, list[int]]] = []
        plain_from = run_from = 0
        remaining = deque(protected)
        for start, end in [*self._real_specials(text, protected), (len(text), len(text))]:
            inside: list[int] = []
            while remaining and remaining[0] < start:
                inside.append(remaining.popleft() - run_from)
            if inside:
                if plain_from < run_from:
                    pieces.append((text[plain_from:run_from], []))
                pieces.append((text[run_from:start], inside))
                plain_from = start
            run_from = end
        if plain_from < len(text):
            pieces.append((text[plain_from:], []))
        return pieces

    def _real_specials(self, text: str, protected: Sequence[int]) -> list[tuple[int, int]]:
        """Return the spans of special tokens (leftmost, longest) that cover no protected position."""
        forbidden = set(protected)
        spans: list[tuple[int, int]] = []
        covered = 0
        for begin in self._special_texts.starts(text):
            if begin < covered:
                continue
            for special in self._special_texts.at(text, begin):
                start, end = begin, begin + len(special)
                if forbidden.isdisjoint(range(start, end)):
                    # The token may swallow the white space beside it.
                    token = self._special_by_text[special]
                    if token.lstrip:
                        start = max(covered, len(text[:start].rstrip()))
                    if token.rstrip:
                        end = len(text) - len(text[end:].lstrip())
                    spans.append((start, end))
                    covered = end
                    break
        return spans


def _within(ids: list[int], limit: int | None) -> list[int]:
    if limit is not None and len(ids) > limit:
        raise PromptTooLong(len(ids), limit, is_estimate=False)
    return ids


# --- reading the folder ----------------------------------------------------------------------


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > _JSON_LIMIT_BYTES:
            raise ValueError("larger than any such file is")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as problem:
        raise ModelError(
            "config-malformed",
            f"{path} could not be read: {problem}",
            remedy="Take the file from the model's makers, and import the model again.",
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            "config-malformed",
            f"{path} holds no JSON object",
            remedy="Take the file from the model's makers, and import the model again.",
        )
    return value


def _special_names(config: dict[str, Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            names[key] = value
    return names


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _first_id(
    tokenizer: tokenizers.Tokenizer | TextVocabulary, name: str | None, configured: object
) -> int | None:
    if name is not None:
        found: int | None = tokenizer.token_to_id(name)
        if found is not None:
            return found
    return next(iter(_ids(configured)), None)


def _chat_template(model_dir: Path, config: dict[str, Any]) -> ChatTemplateSource | None:
    separate = model_dir / "chat_template.jinja"
    if separate.is_file():
        return ChatTemplateSource(_read_template(separate), separate.name)
    value = config.get("chat_template")
    if isinstance(value, list):
        # Several named templates; "default" is the one for plain conversations.
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return ChatTemplateSource(value, "tokenizer_config.json") if isinstance(value, str) else None


def _read_template(path: Path) -> str:
    try:
        if path.stat().st_size > _JSON_LIMIT_BYTES:
            raise ValueError("larger than any template is")
        return path.read_text(encoding="utf-8")
    except ValueError as problem:
        is_text = not isinstance(problem, UnicodeDecodeError)
        raise ModelError(
            "template-malformed",
            f"{path} could not be read: {problem if is_text else 'it is not UTF-8 text'}",
            remedy="Take the file from the model's makers, and import the model again.",
        ) from None


# --- tokens to bytes -------------------------------------------------------------------------


def _byte_level_alphabet() -> dict[str, int]:
    """Return the character that stands for each byte in byte-level BPE vocabularies.

    Printable bytes stand for themselves; the others are numbered upwards from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet


def _token_decoder(tokenizer: tokenizers.Tokenizer | TextVocabulary, where: str) -> Any:
    """Return the function from an id to its bytes that the tokenizer's own decoder implies."""
    decoder = tokenizer.decoder
    description: dict[str, Any] = (
        json.loads(decoder.__getstate__()) if decoder is not None else {"type": None}
    )
    steps: list[dict[str, Any]] = (
        description["decoders"] if description["type"] == "Sequence" else [description]
    )
    kinds = {step["type"] for step in steps}

    def piece(token_id: int) -> str:
        text: str | None = tokenizer.id_to_token(token_id)
        return "" if text is None else text  # padding of the embedding beyond the vocabulary

    if kinds == {"ByteLevel"}:
        alphabet = _byte_level_alphabet()
        added = frozenset(tokenizer.get_added_tokens_decoder())

        def from_byte_level(token_id: int) -> bytes:
            text = piece(token_id)
            # Added tokens are spelled as they are; a space or an accent isn't in the alphabet.
            if token_id in added:
                return text.encode()
            return bytes(alphabet[character] for character in text)

        return from_byte_level

    if kinds == {None}:
        # No decoder: words, which the library joins with a space.
        return lambda token_id: f" {piece(token_id)}".encode()

    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        replacements = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        has_byte_tokens = "ByteFallback" in kinds

        def from_sentencepiece(token_id: int) -> bytes:
            text = piece(token_id)
            if has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(text)):
                return bytes([int(byte[1], 16)])
            for old, new in replacements:
                text = text.replace(old, new)
            return text.encode()

        return from_sentencepiece

    raise ModelError(
        "tokenizer-unsupported",
        f"{where} decodes with {', '.join(sorted(str(kind) for kind in kinds))}, which is not supported",
        facts=[("supported", "byte-level BPE; SentencePiece with byte fallback; whole words")],
        remedy="Take the tokenizer.json that the model's makers publish.",
    )
