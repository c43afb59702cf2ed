"""Typed reading of request fields; a wrong value is a 400 that names the field.

null means "not given", as clients send it for options left alone. A boolean is not a number.
"""

from __future__ import annotations

import math
from typing import Any

from vox_host.chat.messages import is_encodable
from vox_host.server.api_error import bad_request

__all__ = ["Fields"]

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class Fields:
    """The fields of one request body."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def has(self, name: str) -> bool:
        """Whether the field is given (null is not)."""
        return self._body.get(name) is not None

    def raw(self, name: str) -> Any:
        """Return the value unchecked."""
        return self._body.get(name)

    def text(self, name: str) -> str | None:
        """Return a string."""
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise bad_request(name, f"{name} must be text, not {_kind(value)}", code="invalid_type")
        return check_text(value, name)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_request(name, f"{name} must be true or false, not {_kind(value)}", code="invalid_type")
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """Return an integer of a closed range. 3.0 is 3."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad_request(name, f"{name} must be an integer, not {_kind(value)}", code="invalid_type")
        if not low <= value <= high:
            raise bad_request(name, f"{name} must be from {low} to {high}, not {_shown(value)}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        """Return a finite number of a closed range."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise bad_request(name, f"{name} must be a number, not {_kind(value)}", code="invalid_type")
        if not low <= value <= high or math.isnan(value):
            raise bad_request(name, f"{name} must be from {low:g} to {high:g}, not {_shown(value)}")
        return float(value)

    def stops(self, name: str = "stop") -> tuple[str, ...]:
        """Return the stop strings: a string is a list of one; null and [] are none."""
        value = self._body.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list):
            raise bad_request(name, f"{name} must be text or a list of texts, not {_kind(value)}")
        if len(values) > MAX_STOPS:
            raise bad_request(name, f"{name} may hold at most {MAX_STOPS} texts, not {len(values)}")
        for stop in values:
            if not isinstance(stop, str):
                raise bad_request(name, f"{name} must hold texts only, not {_kind(stop)}")
            if not stop:
                raise bad_request(name, f"{name} must not hold an empty text, which would stop at once")
            if len(stop) > MAX_STOP_CHARS:
                raise bad_request(name, f"a text in {name} may have at most {MAX_STOP_CHARS} characters")
            check_text(stop, name)
        return tuple(dict.fromkeys(values))

    def token_biases(self, name: str, vocab_size: int) -> dict[int, float]:
        """Return a map from token id to the number added to its logit."""
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_request(name, f"{name} must be an object, not {_kind(value)}", code="invalid_type")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
                raise bad_request(
                    name, f"{name} has the key {_shown(key)}, which is no token id below {vocab_size}"
                )
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
                raise bad_request(name, f"{name}[{key}] must be a number from -100 to 100")
            biases[int(key)] = float(bias)
        return biases

    def object(self, name: str) -> dict[str, Any]:
        """Return an object; {} when absent."""
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_request(name, f"{name} must be an object, not {_kind(value)}", code="invalid_type")
        return value


def check_text(value: str, param: str) -> str:
    """Return `value` if it has a UTF-8 form."""
    if not is_encodable(value):
        raise bad_request(param, f"{param} holds half of a surrogate pair, which is not a character")
    return value


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    words: dict[type, str] = {str: "text", list: "a list", dict: "an object", type(None): "null"}
    return words.get(type(value), "something else")


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text[:60]
