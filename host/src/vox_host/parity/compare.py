"""Find where two sides part: the byte, the request, the token (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from vox_host.parity.training import Taken, apart

__all__ = ["Answered", "Parting", "SideResult", "first_parting", "labelled_apart"]


@dataclass(frozen=True, slots=True)
class Answered:
    """What one side made of one request."""

    number: int
    logits_digest: str
    """Of the prompt's logits, every position."""
    token_ids: tuple[int, ...]
    answer_sha256: str
    """Of the answer's canonical lines: tokens, logprobs, how it ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SideResult:
    """Everything one side answered."""

    label: str
    plugin: str
    plugin_version: str
    plugin_tree_digest: str | None
    lane: str
    lane_options: Mapping[str, str]
    numerics: str
    numerics_version: int
    answers: tuple[Answered, ...]
    transcript: bytes | None
    """None: of another machine, which sent hashes only."""
    transcript_sha256: str
    taken: tuple[Taken, ...] = ()
    """Steps of training, the adapter before the first one included; none where none were asked for."""
    observation: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return it as a certificate holds it; observations stand apart."""
        facts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("transcript", "observation"):
            del facts[name]
        facts["answers"] = [asdict(answer) for answer in self.answers]
        facts["taken"] = [asdict(step) for step in self.taken]
        facts["lane_options"] = dict(self.lane_options)
        return facts


@dataclass(frozen=True, kw_only=True, slots=True)
class Parting:
    """The first place where a side is not the first side."""

    side: str
    against: str
    byte: int | None
    """Of the transcript; None where one of them is known by hashes alone."""
    request: int
    what: str
    """`logits` of the prompt, `token`, or `answer`: the tokens are the same and a logprob is not."""
    position: int | None = None
    """Of the token in the answer."""
    operator: str | None = None
    name: str | None = None
    """Of the operator's output: its layer is in it."""
    element: int | None = None
    expected: str | None = None
    found: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        where = f"request {self.request}: {self.what}"
        if self.position is not None:
            where += f" {self.position}"
        if self.byte is not None:
            where += f", byte {self.byte} of the transcript"
        if self.name is not None:
            where += f"; first operator {self.name} ({self.operator})"
            if self.element is not None:
                where += f", element {self.element}"
        if self.expected is not None:
            where += f": expected {self.expected}, found {self.found}"
        return where


def labelled_apart(here: Sequence[SideResult], elsewhere: Sequence[SideResult]) -> list[SideResult]:
    """Return the sides from elsewhere with a label of its own for each: two files may have one name."""
    taken = {side.label for side in here}
    named = []
    for side in elsewhere:
        label, number = side.label, 1
        while label in taken:
            number += 1
            label = f"{side.label} #{number}"
        taken.add(label)
        named.append(replace(side, label=label))
    return named


def first_parting(first: SideResult, other: SideResult) -> Parting | None:
    """Return where `other` stops being `first`; None: nowhere."""
    byte = None
    if first.transcript is not None and other.transcript is not None:
        byte = _first_byte(first.transcript, other.transcript)
        if byte is None:
            return None
    for a, b in zip(first.answers, other.answers, strict=False):
        if a != b:
            return _parting_of(first, other, byte, a, b)
    if len(first.answers) == len(other.answers) and byte is None:
        return None
    missing = min(len(first.answers), len(other.answers)) + 1
    return Parting(side=other.label, against=first.label, byte=byte, request=missing, what="answer")


def _parting_of(first: SideResult, other: SideResult, byte: int | None, a: Answered, b: Answered) -> Parting:
    shared: dict[str, Any] = {"side": other.label, "against": first.label, "byte": byte, "request": a.number}
    if a.logits_digest != b.logits_digest:
        expected, found = apart(a.logits_digest, b.logits_digest)
        return Parting(**shared, what="logits", expected=expected, found=found)
    if a.token_ids != b.token_ids:
        position = _first_unequal(a.token_ids, b.token_ids)
        return Parting(
            **shared,
            what="token",
            position=position,
            expected=_at(a.token_ids, position),
            found=_at(b.token_ids, position),
        )
    expected, found = apart(a.answer_sha256, b.answer_sha256)
    return Parting(**shared, what="answer", expected=expected, found=found)


def _first_byte(a: bytes, b: bytes) -> int | None:
    if a == b:
        return None
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _first_unequal(a: Sequence[int], b: Sequence[int]) -> int:
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def _at(tokens: Sequence[int], position: int) -> str:
    return str(tokens[position]) if position < len(tokens) else "the end"
