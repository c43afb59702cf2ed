"""Rows to examples: token ids, and which of them are learned.

Training has to see the ids that serving sees. So a conversation is rendered whole and encoded once,
as the server does it; where each answer begins is found by encoding the prompt for it, again as the
server does, and that prompt must be how the whole begins, in text and in tokens. Where it isn't (a
template that rewrites earlier turns, a token that spans the end of the prompt and the beginning of
the answer) the row is reported: what it would teach is not what would be asked.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vox_host.chat.protection import ProtectedText
from vox_host.chat.template import ChatTemplate
from vox_host.counted import counted
from vox_host.errors import UsageError
from vox_host.literals import LiteralFinder
from vox_host.models.tokenizer import PromptTooLong, Tokenizer
from vox_host.training.data.formats import Content, Continuation, Conversation, PlainText
from vox_host.training.data.problems import Problem, Problems, data_error
from vox_host.training.data.row_json import RowError
from vox_host.training.data.rows import Rows
from vox_plugin_api.train_messages import TrainExample

__all__ = ["Answers", "Encoded", "Encoder", "Example", "encode_rows"]

Answers = Literal["all", "last"]
"""Which answers of a conversation are learned."""


@dataclass(frozen=True, slots=True)
class Example:
    """What a row teaches."""

    token_ids: array[int]
    loss_mask: bytes
    """One byte per token, 1 where it is learned; the first is 0, since it follows nothing."""
    line: int
    """The row's line in the file, from 1."""

    @property
    def trained_tokens(self) -> int:
        """How many tokens are learned."""
        return self.loss_mask.count(1)

    def digest(self) -> bytes:
        """Return SHA-256 of ids (4 bytes each, little-endian) and mask: what is learned, wherever it is."""
        ids = b"".join(token_id.to_bytes(4, "little") for token_id in self.token_ids)
        return hashlib.sha256(ids + self.loss_mask).digest()

    def message(self) -> TrainExample:
        """Return the example as it is sent to a worker."""
        return TrainExample(token_ids=list(self.token_ids), loss_mask=[bool(b) for b in self.loss_mask])


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The examples of a data file."""

    path: Path
    examples: list[Example]
    """In the order of the rows."""
    found: Problems
    warnings: tuple[str, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Bad rows by line, those of `Rows` included; of very many, the first thousand."""
        return tuple(sorted(self.found.kept))

    def check(self) -> None:
        """Refuse the data if a row is bad.

        Raises:
            UsageError: with every bad row and its line.
        """
        if self.found.count:
            raise data_error(self.path, self.found)


def encode_rows(
    rows: Rows,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    max_length: int,
    *,
    answers: Answers = "all",
    progress: Callable[[int], None] | None = None,
) -> Encoded:
    """Make an example of every usable row; a bad one is a problem, beside those of `rows`.

    Args:
        template: for conversations; the one that will serve.
        max_length: tokens a row may have. A longer one is reported, never cut.
        answers: which answers of a conversation are learned: all, or the last alone.
        progress: called with the number of rows done.

    Raises:
        UsageError: the file is no longer the one that was checked.
    """
    encoder = Encoder(tokenizer, template, max_length, answers=answers)
    problems = Problems()
    examples: list[Example] = []
    endless = 0
    for done, row in enumerate(rows, start=1):
        try:
            ids, mask, ends = encoder.encode(row.content)
        except RowError as error:
            problems.add(row.line, str(error))
        else:
            examples.append(Example(array("I", ids), bytes(mask), row.line))
            endless += not ends
        if progress is not None:
            progress(done)
    warnings: list[str] = []
    if endless:
        warnings.append(
            f"in {counted(endless, 'example')} of {len(examples)} an answer does not end with a token that "
            f"ends answers ({encoder.end_names}): a model trained on them is not taught where to stop"
        )
    return Encoded(
        path=rows.path, examples=examples, found=rows.found.joined(problems), warnings=tuple(warnings)
    )


class Encoder:
    """Turns what rows say into token ids and masks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_length: int,
        *,
        answers: Answers = "all",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._answers = answers
        self._specials = LiteralFinder(tokenizer.special_tokens)
        self._end_id = _end_id(tokenizer)
        names = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in tokenizer.eos_ids]
        self.end_names = ", ".join(sorted(names)) or "none"

    def encode(self, content: Content) -> tuple[list[int], list[int], bool]:
        """Return token ids, one 0 or 1 per id, and whether every answer ends with a token that ends answers.

        Raises:
            RowError: the row can't be trained on.
        """
        self._refuse_special_tokens(content)
        try:
            match content:
                case Conversation():
                    ids, mask, ends = self._conversation(content)
                case Continuation():
                    ids, mask, ends = self._continuation(content)
                case PlainText():
                    ids, ends = self._with_end(self._tokenizer.encode(content.text, limit=self._max_length))
                    mask = [1] * len(ids)
        except PromptTooLong as finding:
            about = "about " if finding.is_estimate else ""
            raise RowError(self._too_long(f"{about}{finding.tokens}")) from None
        if len(ids) > self._max_length:
            raise RowError(self._too_long(str(len(ids))))
        if mask:
            mask[0] = 0  # it follows nothing, so there is nothing to predict it from
        if not any(mask):
            raise RowError("holds nothing to learn")
        # Nothing that is learned looks at what comes after it.
        used = len(mask) - mask[::-1].index(1)
        return ids[:used], mask[:used], ends

    def _too_long(self, tokens: str) -> str:
        return f"has {tokens} tokens; the limit is {self._max_length} (--max-length)"

    # --- prompts and texts -------------------------------------------------------------------

    def _continuation(self, content: Continuation) -> tuple[list[int], list[int], bool]:
        whole = self._tokenizer.encode(content.prompt + content.completion, limit=self._max_length)
        prompt = self._tokenizer.encode(content.prompt)
        start = _common(whole, prompt)
        if start < len(prompt):
            raise RowError(
                f"completion: {self._spanning(whole, start)} spans the end of the prompt and the beginning "
                "of the completion, but a server sees the prompt alone; move white space from the end of the "
                "prompt to the beginning of the completion"
            )
        ids, ends = self._with_end(whole)
        return ids, [0] * start + [1] * (len(ids) - start), ends

    def _with_end(self, ids: list[int]) -> tuple[list[int], bool]:
        """Let a text end as an answer would; a tokenizer that adds the end itself gets no second one."""
        if ids and ids[-1] in self._tokenizer.eos_ids:
            return ids, True
        return (ids, False) if self._end_id is None else ([*ids, self._end_id], True)

    # --- conversations -----------------------------------------------------------------------

    def _conversation(self, content: Conversation) -> tuple[list[int], list[int], bool]:
        if self._template is None:
            raise RowError("is a conversation, and no chat template was given")
        whole = self._render(content, len(content.messages), is_prompt=False)
        ids = self._tokenizer.encode_markup(whole.text, whole.positions, limit=self._max_length)
        self._refuse_left_out(content, whole.text)
        mask = [0] * len(ids)
        ends = True
        for index in self._learned(content.messages):
            text_start, start = self._boundary(content, index, whole, ids, is_prompt=True)
            if index + 1 == len(content.messages):
                text_end, end = len(whole.text), len(ids)
            else:
                text_end, end = self._boundary(content, index + 1, whole, ids, is_prompt=False)
            self._refuse_unsaid(content.messages[index], index, whole.text[text_start:text_end])
            # What a template writes behind the end of an answer is never generated.
            found = (at + 1 for at in range(start, end) if ids[at] in self._tokenizer.eos_ids)
            stop = next(found, None)
            ends = ends and stop is not None
            end = end if stop is None else stop
            mask[start:end] = [1] * (end - start)
        return ids, mask, ends

    def _learned(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return indices if self._answers == "all" else indices[-1:]

    def _render(self, content: Conversation, count: int, *, is_prompt: bool) -> ProtectedText:
        assert self._template is not None
        try:
            return self._template.render(
                content.messages[:count], tools=content.tools, add_generation_prompt=is_prompt
            )
        except UsageError as error:
            raise RowError(error.message) from None

    def _boundary(
        self, content: Conversation, count: int, whole: ProtectedText, ids: list[int], *, is_prompt: bool
    ) -> tuple[int, int]:
        """Return where the first `count` messages end in the whole: in characters and in tokens."""
        assert self._template is not None
        part = self._render(content, count, is_prompt=is_prompt)
        what = f"the prompt for messages[{count}]" if is_prompt else f"messages up to [{count - 1}]"
        at = _common(whole.text, part.text)
        if at < len(part.text):
            raise RowError(
                f"{what}: the chat template of {self._template.name} writes this otherwise if more follows: "
                f"after {at} characters {_quoted(part.text[at:])} becomes {_quoted(whole.text[at:])}; learn "
                "the last answer alone (--answers last), or use a template that leaves earlier turns alone"
            )
        part_ids = self._tokenizer.encode_markup(part.text, part.positions)
        same = _common(ids, part_ids)
        if same < len(part_ids):
            raise RowError(
                f"{what}: {self._spanning(ids, same)} spans its end and what follows, but a server sees it "
                "alone; remove white space from the beginning of the answer"
            )
        return len(part.text), len(part_ids)

    def _spanning(self, ids: list[int], at: int) -> str:
        if at >= len(ids):
            return "a token"
        return f"the token {_quoted(self._tokenizer.token_bytes(ids[at]).decode('utf-8', 'replace'))}"

    # --- what would go wrong unseen ----------------------------------------------------------

    def _refuse_special_tokens(self, content: Content) -> None:
        match content:
            case Conversation():
                values: list[tuple[str, Any]] = [("messages", content.messages), ("tools", content.tools)]
            case Continuation():
                values = [("prompt", content.prompt), ("completion", content.completion)]
            case PlainText():
                values = [("text", content.text)]
        for where, text in _strings(values):
            for start in self._specials.starts(text):
                special = next(self._specials.at(text, start))
                raise RowError(
                    f"{where}: holds {_quoted(special)}, the text of a special token of this model"
                )

    def _refuse_left_out(self, content: Conversation, text: str) -> None:
        """Refuse what the template doesn't show: it would be trained without, and nobody would notice."""
        assert self._template is not None
        for tool in content.tools or ():
            if tool["function"]["name"] not in text:
                raise RowError(
                    f"tools: the chat template of {self._template.name} does not show them to the model"
                )
        for index, message in enumerate(content.messages):
            # Results of tools may be written as JSON text, which spells them differently.
            if message["role"] in ("system", "user") and message["content"].strip() not in text:
                raise RowError(
                    f"messages[{index}].content: the chat template of {self._template.name} leaves it out"
                )

    def _refuse_unsaid(self, message: dict[str, Any], index: int, answer: str) -> None:
        assert self._template is not None
        said = [("content", message["content"]), ("reasoning_content", message.get("reasoning_content", ""))]
        said += [("tool_calls", call["function"]["name"]) for call in message.get("tool_calls", ())]
        for field, text in said:
            if text.strip() not in answer:
                raise RowError(
                    f"messages[{index}].{field}: the chat template of {self._template.name} leaves it out"
                )


def _end_id(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a text: the one the model calls eos_token, if answers end there."""
    name = tokenizer.special_names.get("eos_token")
    ids = [] if name is None else tokenizer.encode(name, add_special_tokens=False)
    if len(ids) == 1 and ids[0] in tokenizer.eos_ids:
        return ids[0]
    return min(tokenizer.eos_ids, default=None)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    if one[: len(other)] == other:
        return len(other)
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _strings(values: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield every text within values, keys included, with its place."""
    for where, value in values:
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, dict):
            yield from ((where, key) for key in value)
            yield from _strings([(f"{where}.{key}", item) for key, item in value.items()])
        elif isinstance(value, list):
            yield from _strings([(f"{where}[{n}]", item) for n, item in enumerate(value)])


def _quoted(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")
