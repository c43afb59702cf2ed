"""Read a JSON object from a file someone else wrote.

The standard parser accepts duplicate keys, NaN and nesting that exhausts the stack; a file
from a model hub gets none of these. Sizes are checked before anything is read.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["CheckpointError", "parse_json_object", "read_json_object"]

MAX_JSON_BYTES = 100 * 1024 * 1024
"""Largest text parsed as JSON here; the safetensors format sets the same bound for headers."""


class CheckpointError(Exception):
    """A model's file is not what it should be. The host and the worker each wrap it in their own error."""

    def __init__(
        self, code: str, message: str, *, facts: dict[str, Any] | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.facts = facts or {}
        self.remedy = remedy


class _LaxError(ValueError):
    """What the standard parser would take."""


def parse_json_object(data: bytes, *, source: str, code: str) -> dict[str, Any]:
    """Parse `data` as one JSON object.

    Args:
        source: what the text is, for the message: a path, or a part of a file.
        code: the error's code.

    Raises:
        CheckpointError: it isn't UTF-8, isn't JSON, repeats a key, or isn't an object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_distinct_keys, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise CheckpointError(
            code, f"{source} is not UTF-8 text", facts={"byte": error.start, "length": len(data)}
        ) from None
    except RecursionError:
        raise CheckpointError(code, f"{source} is not usable JSON: it is nested too deeply") from None
    except (json.JSONDecodeError, _LaxError) as error:
        raise CheckpointError(code, f"{source} is not valid JSON: {error}") from None
    except ValueError:  # Python's words for it are of a setting of Python's
        raise CheckpointError(
            code, f"{source} is not valid JSON: it holds a whole number of thousands of digits"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            code,
            f"{source} must hold a JSON object",
            facts={"expected": "object", "found": _json_type(value)},
        )
    return value


def read_json_object(path: Path, *, code: str = "json-invalid") -> dict[str, Any]:
    """Read `path` and parse it with `parse_json_object`.

    Raises:
        CheckpointError: it can't be read, is too big, or is not one JSON object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(code, f"{path} is not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                code,
                f"{path} is too large to be read as JSON",
                facts={"size_bytes": status.st_size, "limit_bytes": MAX_JSON_BYTES},
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(code, f"{path} cannot be read: {error.strerror}") from None
    return parse_json_object(data, source=str(path), code=code)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _LaxError(f"the key {key!r} occurs twice")
            seen.add(key)
    return mapping


def _refuse_constant(text: str) -> NoReturn:
    raise _LaxError(f"{text} is not a JSON number")


def _json_type(value: object) -> str:
    names = {
        list: "array",
        str: "string",
        bool: "boolean",
        int: "number",
        float: "number",
        type(None): "null",
    }
    return names.get(type(value), "object")
