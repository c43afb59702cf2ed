"""One line to a JSON object, more strictly than JSON readers are: what they would mend silently is said."""

from __future__ import annotations

import json
import math
from typing import Any

from vox_host.chat.messages import is_encodable

__all__ = ["RowError", "parse_json", "parse_line"]

_BOM = b"\xef\xbb\xbf"
_DEPTH_LIMIT = 200


class RowError(ValueError):
    """Why a row can't be trained on."""


def parse_line(content: bytes | None, *, is_first: bool) -> dict[str, Any]:
    """Return the object a line spells.

    Raises:
        RowError: it is none, or has two meanings (a key given twice), or no UTF-8 form.
    """
    if content is None:
        raise RowError("is longer than 16 MiB; one line is one row")
    if is_first:
        content = content.removeprefix(_BOM)
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RowError("is not UTF-8: the file begins as UTF-16 does")
    if not content.strip():
        raise RowError("is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        found = content[error.start]
        raise RowError(f"is not UTF-8: byte {error.start + 1} is 0x{found:02x} ({error.reason})") from None
    value = parse_json(text)
    if not isinstance(value, dict):
        raise RowError(f"is {_kind(value)}; a row is an object")
    if not value:
        raise RowError("is an empty object")
    return value


def parse_json(text: str) -> Any:
    """Return the value `text` spells.

    Raises:
        RowError: it is not JSON, gives a key twice, has a number or a character that JSON's readers
            don't agree on, or is nested out of reach.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite_float
        )
        if not is_encodable(text) or ("\\u" in text and not _is_encodable_within(value)):
            raise RowError("holds half of a surrogate pair, which is not a character")
        if _depth(value) > _DEPTH_LIMIT:
            raise RowError("is nested too deeply")
    except json.JSONDecodeError as error:
        raise RowError(f"is not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise RowError("is nested too deeply") from None
    except RowError:
        raise
    except ValueError:  # an integer of more digits than Python reads, and says so of a setting of its own
        raise RowError(
            "is not JSON that can be read: it holds a whole number of thousands of digits"
        ) from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise RowError(f"gives the key {json.dumps(twice)[:80]} twice in one object")
    return value


def _no_constant(name: str) -> Any:
    raise RowError(f"holds {name}, which is not JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise RowError(f"holds the number {text[:40]}, which no float reaches")
    return number


def _is_encodable_within(value: Any) -> bool:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str) and not is_encodable(item):
            return False
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            pending += item
    return True


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _kind(value: object) -> str:
    if value is None:
        return "null"
    words: dict[type, str] = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return words.get(type(value), "something else")
