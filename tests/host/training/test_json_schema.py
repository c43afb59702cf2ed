from __future__ import annotations

import pytest

from vox_host.training.json_schema import SchemaError, check_schema, mismatch

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, None),
        ({"type": "string"}, ""),
        ({"type": "integer"}, 2),
        ({"type": "integer"}, 2.0),
        ({"type": "number"}, 2),
        ({"type": "number"}, -2.5),
        ({"type": "boolean"}, False),
        ({"type": "null"}, None),
        ({"type": ["string", "null"]}, None),
        ({"type": "array"}, [1, "a"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [1, 2]),
        ({"enum": ["a", 1, None, [True]]}, [True]),
        ({"enum": [1]}, 1.0),
        ({"const": {"a": 1}}, {"a": 1}),
        ({"type": "string", "minLength": 2, "maxLength": 2}, "é😀"),
        ({"type": "number", "minimum": 1, "maximum": 2}, 2),
        ({"type": "object"}, {"anything": 1}),
        (PERSON, {"name": "x"}),
        (PERSON, {"name": "x", "age": 3}),
        ({**PERSON, "additionalProperties": True}, {"name": "x", "more": []}),
        ({**PERSON, "additionalProperties": {"type": "integer"}}, {"name": "x", "more": 1}),
        ({"type": "array", "items": PERSON}, [{"name": "x"}]),
    ],
)
def test_a_value_that_fits(schema, value):
    check_schema(schema)
    assert mismatch(value, schema) is None


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({"type": "string"}, 1, "arguments: must be string, not 1"),
        ({"type": "integer"}, 2.5, "arguments: must be integer, not 2.5"),
        ({"type": "integer"}, True, "arguments: must be integer, not true"),
        ({"type": "number"}, False, "arguments: must be number, not false"),
        ({"type": "number"}, "2", 'arguments: must be number, not "2"'),
        ({"type": "boolean"}, 1, "arguments: must be boolean, not 1"),
        ({"type": "null"}, 0, "must be null"),
        ({"type": ["string", "null"]}, 0, "must be string or null, not 0"),
        ({"type": "object"}, [], "must be object"),
        ({"enum": ["a", "b"]}, "c", 'must be one of ["a", "b"], not "c"'),
        ({"enum": [1]}, True, "must be one of [1], not true"),
        ({"enum": [[1]]}, [True], "must be one of"),
        ({"const": {"a": 1}}, {"a": 2}, "must be"),
        ({"type": "string", "minLength": 2}, "a", "its length must be at least 2, not 1"),
        ({"type": "string", "maxLength": 2}, "abc", "its length must be at most 2, not 3"),
        ({"minimum": 1}, 0.5, "arguments must be at least 1, not 0.5"),
        ({"maximum": 1}, 2, "arguments must be at most 1, not 2"),
        ({"minItems": 1}, [], "the number of its items must be at least 1, not 0"),
        ({"maxItems": 1}, [1, 2], "the number of its items must be at most 1, not 2"),
        ({"items": {"type": "integer"}}, [1, "x"], 'arguments[1]: must be integer, not "x"'),
        (PERSON, {"age": 1}, "arguments.name: is missing"),
        (PERSON, {"name": "x", "age": -1}, "arguments.age must be at least 0, not -1"),
        (PERSON, {"name": "x", "agee": 1}, "arguments.agee: is no argument of this tool"),
        ({"type": "object", "additionalProperties": False}, {"a": 1}, "arguments.a: is no argument"),
        (
            {**PERSON, "additionalProperties": {"type": "integer"}},
            {"name": "x", "m": ""},
            "arguments.m: must be",
        ),
        ({"items": PERSON}, [{"name": 1}], "arguments[0].name: must be string"),
    ],
)
def test_a_value_that_does_not_fit_is_told_where_and_why(schema, value, problem):
    check_schema(schema)
    found = mismatch(value, schema)
    assert found is not None and problem in found


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "pattern": "^a"}, "parameters: pattern can't be checked"),
        ({"properties": {"a": {"anyOf": []}}}, "parameters.a: anyOf can't be checked"),
        ({"items": {"$ref": "#"}}, "parameters[]: $ref can't be checked"),
        ({"additionalProperties": {"not": {}}}, "parameters.*: not can't be checked"),
        ({"type": "str"}, 'parameters.type: "str" is no type'),
        ({"type": 3}, "is no type"),
        ({"enum": "a"}, "parameters.enum: has the wrong kind"),
        ({"required": "a"}, "parameters.required: has the wrong kind"),
        ({"minimum": "0"}, "parameters.minimum: must be a number"),
        ({"maxItems": True}, "parameters.maxItems: must be a number"),
        (["a"], "parameters: must be an object"),
        ({"properties": {"a": True}}, "parameters.a: must be an object"),
    ],
)
def test_what_can_not_be_checked_is_refused_and_never_passed_over(schema, problem):
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert problem in str(caught.value)
