"""The formats of rows, told apart by their keys and brought into three forms.

A `Conversation` is rendered by the chat template, a `Continuation` is a prompt and what follows it,
a `PlainText` is learned whole. Instructions (alpaca) and "conversations" (sharegpt) are conversations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vox_host.chat.messages import MessageError, parse_messages
from vox_host.training.data.row_json import RowError, parse_json

__all__ = [
    "CONVERSATIONS",
    "FORMATS",
    "Content",
    "Continuation",
    "Conversation",
    "FormatName",
    "PlainText",
    "detect",
    "parse",
]

FormatName = Literal["chat", "sharegpt", "prompt/completion", "alpaca", "text"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form templates see, and the tools shown with them."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt, which is read, and a completion, which is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text of which everything is learned."""

    text: str


Content = Conversation | Continuation | PlainText


@dataclass(frozen=True, slots=True)
class _Format:
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Content]


def detect(row: Mapping[str, Any]) -> FormatName:
    """Return the format that the keys of a row say.

    Raises:
        RowError: none, or several.
    """
    fitting = [name for name, form in FORMATS.items() if all(key in row for key in form.needed)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise RowError(f"could be {' or '.join(fitting)}: it has the keys of both")
    keys = ", ".join(json.dumps(key)[:40] for key in list(row)[:8])
    known = "; ".join(f"{name}: {' and '.join(form.needed)}" for name, form in FORMATS.items())
    raise RowError(f"has the keys {keys}, which are no known format ({known})")


def parse(row: Mapping[str, Any], name: FormatName) -> tuple[Content, list[str]]:
    """Return what a row says, and those of its keys that say nothing here.

    Raises:
        RowError: a field is not what it should be.
    """
    form = FORMATS[name]
    ignored = [key for key in row if key not in form.needed and key not in form.optional]
    return form.read(row), ignored


def _read_chat(row: Mapping[str, Any]) -> Conversation:
    return _conversation(row["messages"], row.get("tools"))


def _read_sharegpt(row: Mapping[str, Any]) -> Conversation:
    roles = {
        "human": "user",
        "user": "user",
        "gpt": "assistant",
        "assistant": "assistant",
        "system": "system",
    }
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise RowError("conversations: must be a list of turns")
    messages: list[dict[str, Any]] = []
    if row.get("system"):
        messages.append({"role": "system", "content": _text(row, "system")})
    for index, turn in enumerate(turns):
        who = turn.get("from") if isinstance(turn, dict) else None
        if not isinstance(who, str) or who not in roles:
            raise RowError(
                f"conversations[{index}].from: must be one of {', '.join(roles)}; tool calls "
                "are written as messages"
            )
        if not isinstance(turn.get("value"), str):
            raise RowError(f"conversations[{index}].value: must be text")
        messages.append({"role": roles[who], "content": turn["value"]})
    return _conversation(messages, None)


def _read_continuation(row: Mapping[str, Any]) -> Continuation:
    prompt, completion = _text(row, "prompt"), _text(row, "completion")
    if not completion:
        raise RowError("completion: is empty, so there is nothing to learn")
    return Continuation(prompt, completion)


def _read_alpaca(row: Mapping[str, Any]) -> Conversation:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    if not instruction.strip():
        raise RowError("instruction: is empty")
    more = _text(row, "input") if row.get("input") is not None else ""
    messages = [{"role": "user", "content": f"{instruction}\n\n{more}" if more.strip() else instruction}]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": _text(row, "system")})
    return _conversation([*messages, {"role": "assistant", "content": output}], None)


def _read_text(row: Mapping[str, Any]) -> PlainText:
    text = _text(row, "text")
    if not text.strip():
        raise RowError("text: is empty, so there is nothing to learn")
    return PlainText(text)


FORMATS: dict[FormatName, _Format] = {
    "chat": _Format(("messages",), ("tools",), _read_chat),
    "sharegpt": _Format(("conversations",), ("system",), _read_sharegpt),
    "prompt/completion": _Format(("prompt", "completion"), (), _read_continuation),
    "alpaca": _Format(("instruction", "output"), ("input", "system"), _read_alpaca),
    "text": _Format(("text",), (), _read_text),
}
"""In the order in which they are named to a user."""
CONVERSATIONS: tuple[FormatName, ...] = ("chat", "sharegpt", "alpaca")
"""Those that need a chat template."""


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise RowError(f"{key}: must be text")
    return value


# --- conversations ---------------------------------------------------------------------------


def _conversation(messages: object, tools: object) -> Conversation:
    """Check what a server would, and what only training asks for."""
    try:
        parsed = parse_messages(messages)
    except MessageError as error:
        raise RowError(str(error)) from None
    assert isinstance(messages, list)
    offered = _tools(tools)
    # A row that says nothing of tools may call any; one that offers none may call none.
    names = None if tools is None else {tool["function"]["name"] for tool in offered or ()}
    for index, message in enumerate(parsed):
        if message["role"] == "assistant":
            if not message["content"].strip() and not message.get("tool_calls"):
                raise RowError(f"messages[{index}]: the assistant says nothing and calls nothing")
            _check_calls(messages[index], message, names, index)
    if not any(message["role"] == "assistant" for message in parsed):
        raise RowError("messages: hold no assistant turn, so there is nothing to learn")
    if parsed[-1]["role"] != "assistant":
        raise RowError(f"messages: end with a {parsed[-1]['role']} message, which is not answered")
    return Conversation(parsed, offered)


def _check_calls(given: Any, message: dict[str, Any], names: set[str] | None, index: int) -> None:
    for number, call in enumerate(message.get("tool_calls", ())):
        where = f"messages[{index}].tool_calls[{number}].function"
        arguments = given["tool_calls"][number]["function"].get("arguments", "{}")
        if isinstance(arguments, str):
            try:
                parsed = parse_json(arguments)
            except RowError as error:
                raise RowError(f"{where}.arguments: {error}") from None
            if not isinstance(parsed, dict):
                raise RowError(f"{where}.arguments: must be an object, or text that spells one")
        name = call["function"]["name"]
        if names is not None and name not in names:
            raise RowError(f"{where}.name: {json.dumps(name)[:80]} is not among the tools of this row")


def _tools(value: object) -> list[Any] | None:
    # The server reads an empty list as none, and so do we.
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RowError("tools: must be a list")
    seen: set[str] = set()
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise RowError(f"tools[{index}].function.name: must be non-empty text")
        if name in seen:
            raise RowError(f"tools[{index}].function.name: {json.dumps(name)[:80]} is there twice")
        seen.add(name)
    return value
