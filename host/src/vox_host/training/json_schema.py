"""Check a value against the part of JSON Schema that tools' parameters are written in.

What is not checked is refused, not passed over: a schema with another keyword is an error of the
schema. One thing is stricter than the standard: an argument that `properties` doesn't list is
refused unless `additionalProperties` allows it, since no tool would know what to do with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["SchemaError", "check_schema", "mismatch"]

_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
_ANNOTATIONS = {"title", "description", "default", "examples", "format"}
_CHECKED = {
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
}


class SchemaError(ValueError):
    """The schema itself says something that is not checked here."""


def check_schema(schema: object, where: str = "parameters") -> None:
    """Refuse a schema that could not be checked whole.

    Raises:
        SchemaError: it has an unknown keyword, or a keyword has the wrong kind of value.
    """
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{where}: must be an object")
    if unknown := sorted(schema.keys() - _CHECKED - _ANNOTATIONS):
        raise SchemaError(f"{where}: {', '.join(unknown)} can't be checked")
    for name in _types(schema):
        if name not in _TYPES:
            raise SchemaError(f"{where}.type: {json.dumps(name)} is no type")
    for key, kind in (("enum", list), ("required", list), ("properties", Mapping)):
        if key in schema and not isinstance(schema[key], kind):
            raise SchemaError(f"{where}.{key}: has the wrong kind of value")
    for key in ("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"):
        if key in schema and (isinstance(schema[key], bool) or not isinstance(schema[key], int | float)):
            raise SchemaError(f"{where}.{key}: must be a number")
    for name, inner in schema.get("properties", {}).items():
        check_schema(inner, f"{where}.{name}")
    if "items" in schema:
        check_schema(schema["items"], f"{where}[]")
    if not isinstance(schema.get("additionalProperties", True), bool):
        check_schema(schema["additionalProperties"], f"{where}.*")


def mismatch(value: object, schema: Mapping[str, Any], where: str = "arguments") -> str | None:
    """Return the first thing about `value` that `schema` forbids; None where it fits.

    The schema is one that `check_schema` passed.
    """
    types = _types(schema)
    if types and not any(_is(value, name) for name in types):
        return f"{where}: must be {' or '.join(types)}, not {_shown(value)}"
    if "enum" in schema and not any(_equal(value, allowed) for allowed in schema["enum"]):
        return f"{where}: must be one of {_shown(schema['enum'])}, not {_shown(value)}"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{where}: must be {_shown(schema['const'])}, not {_shown(value)}"
    if isinstance(value, str):
        return _outside(len(value), schema, "Length", f"{where}: its length")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _outside(value, schema, "imum", where)
    if isinstance(value, list):
        items = schema.get("items", {})
        return _outside(len(value), schema, "Items", f"{where}: the number of its items") or _first(
            mismatch(item, items, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if isinstance(value, dict):
        return _object_mismatch(value, schema, where)
    return None


def _object_mismatch(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str | None:
    for name in schema.get("required", ()):
        if name not in value:
            return f"{where}.{name}: is missing"
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", not properties)
    for name, inner in value.items():
        if name in properties:
            found = mismatch(inner, properties[name], f"{where}.{name}")
        elif isinstance(others, Mapping):
            found = mismatch(inner, others, f"{where}.{name}")
        else:
            found = None if others else f"{where}.{name}: is no argument of this tool"
        if found is not None:
            return found
    return None


def _outside(number: float, schema: Mapping[str, Any], suffix: str, what: str) -> str | None:
    least, most = schema.get(f"min{suffix}"), schema.get(f"max{suffix}")
    if least is not None and number < least:
        return f"{what} must be at least {least}, not {number}"
    if most is not None and number > most:
        return f"{what} must be at most {most}, not {number}"
    return None


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    match name:
        case "string":
            return isinstance(value, str)
        case "integer":
            # 2.0 is an integer in JSON Schema: JSON has one kind of number.
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        case "number":
            return isinstance(value, int | float)
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
        case "null":
            return value is None
    return False


def _equal(one: object, other: object) -> bool:
    """Equality of JSON values; Python's holds True and 1 for equal."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return one == other


def _types(schema: Mapping[str, Any]) -> list[Any]:
    value = schema.get("type", [])
    return value if isinstance(value, list) else [value]


def _first(found: Any) -> str | None:
    return next((problem for problem in found if problem is not None), None)


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "..."
