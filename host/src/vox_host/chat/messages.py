"""Check a conversation as it came over HTTP and bring it into the one form templates see.

Templates were written for `content` as text, so parts are joined, and an absent or null content
of an assistant turn that calls tools becomes "" (three spellings, one prompt). Arguments of a
tool call are given as an object, as templates expect; text that is not a JSON object stays text.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["MessageError", "parse_messages"]

ROLES = ("developer", "system", "user", "assistant", "tool")


class MessageError(ValueError):
    """A message is not what it should be; `param` names the field, like messages[1].content."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


def parse_messages(value: object) -> list[dict[str, Any]]:
    """Return the messages in the form templates see.

    Raises:
        MessageError: the list or one of its messages is malformed.
    """
    if value is None:
        raise MessageError("messages", "is required")
    if not isinstance(value, list):
        raise MessageError("messages", f"must be a list of messages, not {_kind(value)}")
    if not value:
        raise MessageError("messages", "must hold at least one message")
    return [_parse_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _parse_message(value: object, param: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MessageError(param, f"must be an object, not {_kind(value)}")
    role = value.get("role")
    if role is None:
        raise MessageError(f"{param}.role", "is required")
    if role not in ROLES:
        raise MessageError(f"{param}.role", f"must be one of {', '.join(ROLES)}, not {json.dumps(role)[:80]}")
    # Models learn the word "system"; "developer" is what the newer API calls the same author.
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = _parse_tool_calls(value.get("tool_calls"), f"{param}.tool_calls") if role == "assistant" else []
    message["content"] = _parse_content(value.get("content"), f"{param}.content", may_be_absent=bool(calls))
    if calls:
        message["tool_calls"] = calls
    for key in ("name", "tool_call_id", "reasoning_content"):
        text = value.get(key)
        if text is None and key == "reasoning_content":
            text = value.get("reasoning")
        if text is None:
            continue
        if not isinstance(text, str):
            raise MessageError(f"{param}.{key}", f"must be text, not {_kind(text)}")
        message[key] = _checked(text, f"{param}.{key}")
    return message


def _parse_content(value: object, param: str, *, may_be_absent: bool) -> str:
    if value is None:
        if may_be_absent:
            return ""
        raise MessageError(param, "is required (null is for assistant messages with tool_calls)")
    if isinstance(value, str):
        return _checked(value, param)
    if not isinstance(value, list):
        raise MessageError(param, f"must be text or a list of parts, not {_kind(value)}")
    return "".join(_parse_part(part, f"{param}[{index}]") for index, part in enumerate(value))


def _parse_part(part: object, param: str) -> str:
    if not isinstance(part, dict):
        raise MessageError(param, f"must be an object, not {_kind(part)}")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise MessageError(
            f"{param}.type", f'must be "text" (this server reads text only), not {json.dumps(kind)[:80]}'
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise MessageError(f"{param}.text", f"must be text, not {_kind(text)}")
    return _checked(text, f"{param}.text")


def _parse_tool_calls(value: object, param: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise MessageError(param, f"must be a list, not {_kind(value)}")
    return [_parse_tool_call(call, f"{param}[{index}]") for index, call in enumerate(value)]


def _parse_tool_call(call: object, param: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise MessageError(param, f"must be an object, not {_kind(call)}")
    function = call.get("function")
    if not isinstance(function, dict):
        raise MessageError(f"{param}.function", f"must be an object, not {_kind(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise MessageError(f"{param}.function.name", "must be non-empty text")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = _arguments(_checked(arguments, f"{param}.function.arguments"))
    elif not isinstance(arguments, dict):
        raise MessageError(f"{param}.function.arguments", f"must be JSON text, not {_kind(arguments)}")
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {"name": _checked(name, f"{param}.function.name"), "arguments": arguments},
    }
    identifier = call.get("id")
    if identifier is not None:
        if not isinstance(identifier, str):
            raise MessageError(f"{param}.id", f"must be text, not {_kind(identifier)}")
        parsed["id"] = _checked(identifier, f"{param}.id")
    return parsed


def _arguments(text: str) -> object:
    """Return the object `text` spells, or `text` itself: history is never refused for a bad call."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _checked(text: str, param: str) -> str:
    if not is_encodable(text):
        raise MessageError(param, "holds half of a surrogate pair, which is not a character")
    return text


def is_encodable(text: str) -> bool:
    """Whether `text` has a UTF-8 form; JSON's escapes can spell half a surrogate pair, which has none."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    """Return the JSON word for the type of `value`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    words: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return words.get(type(value), "something else")
