"""Read a request's JSON body; everything that is not a JSON object is an ApiError, never a 500."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from aiohttp import web

from vox_host.server.api_error import ApiError
from vox_host.server.encoding import BodyTooLargeError, decoded, known_encoding

__all__ = ["MAX_BODY_BYTES", "parse_body", "read_json_object"]

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 64


class _RefusedError(ValueError):
    """JSON's grammar allows it, this server doesn't; the text is for the client."""


async def read_json_object(request: web.Request) -> dict[str, Any]:
    """Return the body as an object.

    Raises:
        ApiError: 413 too large (decoded, too), 415 not JSON or of an unknown encoding by its own
            word, 400 not of the encoding it names or not a JSON object.
    """
    content_type = request.headers.get("Content-Type")
    if content_type is not None and not _is_json_type(content_type):
        raise ApiError(
            415,
            f"the body must be JSON (Content-Type: application/json), not {content_type[:100]}",
            code="unsupported_media_type",
        )
    encoding = known_encoding(request.headers.get("Content-Encoding"))
    if request.content_length is not None and request.content_length > MAX_BODY_BYTES:
        raise _too_large()
    try:
        data = decoded(await request.read(), encoding, MAX_BODY_BYTES)
    except (web.HTTPRequestEntityTooLarge, BodyTooLargeError):
        raise _too_large() from None
    return parse_body(data)


def parse_body(data: bytes) -> dict[str, Any]:
    """Return `data` as a JSON object.

    Raises:
        ApiError: it is not one.
    """
    if not data.strip():
        raise _not_json("the body is empty; a JSON object is expected")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise _not_json(f"the body is not UTF-8 (byte {problem.start})") from None
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise _not_json("the body is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise _not_json(
            f"the body is not JSON: {problem.msg} (line {problem.lineno}, column {problem.colno})"
        ) from None
    except _RefusedError as problem:
        raise _not_json(f"the body is not JSON that can be read: {problem}") from None
    except ValueError:
        # The interpreter refuses to read very long integers, in words of its own.
        raise _not_json("the body is not JSON that can be read: an integer has too many digits") from None
    if not isinstance(value, dict):
        raise _not_json("the body must be a JSON object")
    if _is_deeper_than(value, MAX_DEPTH):
        raise _not_json(f"the body is nested too deeply; the limit is {MAX_DEPTH} levels")
    return value


def _is_json_type(content_type: str) -> bool:
    essence = content_type.split(";", 1)[0].strip().lower()
    return essence == "application/json" or (essence.startswith("application/") and essence.endswith("+json"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in value if keys.count(key) > 1)
        # Parsers disagree on which one counts; guessing would change what was asked for.
        raise _RefusedError(f"key {json.dumps(twice[:60])} is given twice in one object")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise _RefusedError(f"{text} is not a JSON number")


def _is_deeper_than(value: Any, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _not_json(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")
