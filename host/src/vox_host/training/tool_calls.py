"""Grade answers that should call a tool: is the call one that a program could carry out?

Pure and strict: a call is `<tool_call>`, one JSON object with name and arguments, `</tool_call>`, as
the template `plain-turns` (and Qwen's) writes it. It is valid if it is JSON to the letter, names an
offered tool, and its arguments match that tool's schema. Nothing is repaired. Text around calls is not
judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vox_host.training.data.formats import Conversation
from vox_host.training.data.row_json import RowError, parse_json
from vox_host.training.data.rows import Rows
from vox_host.training.json_schema import check_schema, mismatch

__all__ = ["Answer", "Grade", "Question", "ToolCall", "grade", "parse_answer", "questions"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool's name and the arguments it is called with."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, taken apart."""

    calls: tuple[ToolCall, ...]
    content: str
    """What is no call, without the white space around calls; what couldn't be read stays in it."""
    problem: str | None
    """Why the first thing that begins like a call is none; None where all are."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What an answer is worth."""

    is_valid: bool
    is_expected: bool
    """Valid, and just the calls that were expected, in their order."""
    why_not: str | None
    """Why it is not valid."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that asks for a call."""

    line: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    expected: tuple[ToolCall, ...]


def questions(rows: Rows) -> list[Question]:
    """Return what the rows ask until the assistant calls a tool for the first time, and those calls.

    Raises:
        SchemaError: a tool's schema holds what can't be checked.
    """
    found: list[Question] = []
    for row in rows:
        if not isinstance(row.content, Conversation):
            continue
        messages, tools = row.content.messages, row.content.tools or []
        for index, message in enumerate(messages):
            if message.get("tool_calls"):
                for tool in tools:
                    check_schema(_parameters(tool), f"line {row.line}: {tool['function']['name']}")
                expected = tuple(
                    ToolCall(call["function"]["name"], call["function"]["arguments"])
                    for call in message["tool_calls"]
                )
                found.append(Question(row.line, messages[:index], tools, expected))
                break
    return found


def grade(text: str, tools: Sequence[Mapping[str, Any]], expected: Sequence[ToolCall] = ()) -> Grade:
    """Grade an answer; the tools' schemas are ones that `check_schema` passed."""
    answer = parse_answer(text)
    problem = answer.problem or _problem_of(answer.calls, tools)
    if problem is not None:
        return Grade(False, False, problem)
    return Grade(True, _same(answer.calls, expected), None)


def parse_answer(text: str) -> Answer:
    """Take an answer apart. Never fails: what is no call is content."""
    calls: list[ToolCall] = []
    content: list[str] = []
    at = 0
    while (start := text.find(_OPEN, at)) >= 0:
        try:
            call, end = _call_at(text, start)
        except RowError as error:
            return Answer(tuple(calls), _joined([*content, text[at:]]), str(error))
        content.append(text[at:start])
        calls.append(call)
        at = end
    return Answer(tuple(calls), _joined([*content, text[at:]]), None)


def _call_at(text: str, start: int) -> tuple[ToolCall, int]:
    begin = start + len(_OPEN)
    begin += len(text[begin:]) - len(text[begin:].lstrip())
    if begin == len(text):
        raise RowError("the answer ends within a call")
    # The closing tag may also stand in an argument, so the JSON says where it ends.
    try:
        _, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        if text.find(_CLOSE, begin) < 0:
            raise RowError("the answer ends within a call") from None
        raise RowError(f"the call is not JSON: {error}") from None
    value = parse_json(text[begin:end])
    behind = text[end:].lstrip()
    if not behind.startswith(_CLOSE):
        if _CLOSE.startswith(behind):
            raise RowError("the answer ends within a call")
        raise RowError(f"{_CLOSE} does not follow the call's JSON")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise RowError("the call is no object with a name")
    if not isinstance(value.get("arguments"), dict):
        raise RowError("the call's arguments are no object")
    if more := sorted(value.keys() - {"name", "arguments"}):
        raise RowError(f"the call has {', '.join(more)} beside name and arguments")
    return ToolCall(value["name"], value["arguments"]), len(text) - len(behind) + len(_CLOSE)


def _problem_of(calls: Sequence[ToolCall], tools: Sequence[Mapping[str, Any]]) -> str | None:
    if not calls:
        return "the answer holds no call"
    schemas = {tool["function"]["name"]: _parameters(tool) for tool in tools}
    for call in calls:
        if call.name not in schemas:
            return f"{json.dumps(call.name, ensure_ascii=False)[:60]} is not among the tools offered"
        found = mismatch(call.arguments, schemas[call.name])
        if found is not None:
            return f"{call.name}: {found}"
    return None


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = tool["function"].get("parameters") or {"type": "object"}
    return parameters


def _same(calls: Sequence[ToolCall], expected: Sequence[ToolCall]) -> bool:
    return [(c.name, _canonical(c.arguments)) for c in calls] == [
        (c.name, _canonical(c.arguments)) for c in expected
    ]


def _canonical(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True)


def _joined(pieces: Sequence[str]) -> str:
    return "\n".join(piece.strip() for piece in pieces if piece.strip())
