from __future__ import annotations

import pytest

from vox_host.chat.template import ChatTemplate
from vox_host.chat.templates import BASE_TEMPLATE, named_template, template_names
from vox_host.errors import UsageError


@pytest.fixture(scope="module")
def plain():
    made = ChatTemplate(
        named_template(BASE_TEMPLATE).source,
        name="plain",
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        protect=["<s>", "</s>"],
    )
    yield made
    made.close()


def tool(name, parameters=None, description=None):
    function = {"name": name, "parameters": parameters, "description": description}
    return {"type": "function", "function": {key: v for key, v in function.items() if v is not None}}


def test_a_whole_conversation_as_a_base_model_reads_it(plain):
    call = {
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
    }
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Weather in Zürich?\n"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "clear"}'},
        {"role": "assistant", "content": "Clear."},
    ]
    city = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    rendered = plain.render(
        messages, tools=[tool("get_weather", city, "Forecast")], add_generation_prompt=True
    )
    assert rendered.text == (
        "<s>Tools:\nget_weather(city: string, days?: integer): Forecast\n"
        "System:\nBe brief.\nUser:\nWeather in Zürich?\n"
        'Assistant:\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n'
        "</tool_call></s>\n"
        'Tool:\n{"sky": "clear"}\nAssistant:\nClear.</s>\nAssistant:\n'
    )


@pytest.mark.parametrize(
    ("parameters", "shown"),
    [
        (None, "f()"),
        ({}, "f()"),
        ({"type": "object", "properties": {}}, "f()"),
        ({"type": "object"}, 'f({"type": "object"})'),
        ({"properties": {"items": {"type": "array", "items": {"type": "number"}}}}, "f(items?: number[])"),
        ({"properties": {"a": {"enum": ["x", "y z"]}}, "required": ["a"]}, 'f(a: "x"|"y z")'),
        ({"properties": {"a": {"type": "string", "enum": ["x"]}}}, 'f(a?: "x")'),
        ({"properties": {"a": {"type": "string", "description": "how"}}}, "f(a?: string (how))"),
        (
            {"properties": {"a": {"type": "integer", "minimum": 1}}},
            'f(a?: {"type": "integer", "minimum": 1})',
        ),
        ({"properties": {"a": {"type": ["string", "null"]}}}, 'f(a?: {"type": ["string", "null"]})'),
        ({"properties": {"a": {}}}, "f(a?: {})"),
    ],
)
def test_a_tool_is_shown_as_a_signature_and_no_constraint_is_lost(plain, parameters, shown):
    rendered = plain.render([{"role": "user", "content": "x"}], tools=[tool("f", parameters)])
    assert rendered.text == f"<s>Tools:\n{shown}\nUser:\nx\nAssistant:\n"


def test_arguments_that_are_no_object_are_written_as_the_text_they_are(plain):
    calls = [
        {"function": {"name": "f", "arguments": "{broken"}},
        {"function": {"name": "g", "arguments": {}}},
    ]
    rendered = plain.render(
        [{"role": "assistant", "content": "Both:", "tool_calls": calls}], add_generation_prompt=False
    )
    assert rendered.text == (
        '<s>Assistant:\nBoth:\n<tool_call>\n{"name": "f", "arguments": {broken}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call></s>\n'
    )


def test_an_unknown_name_is_an_error_that_names_the_known(plain):
    assert BASE_TEMPLATE in template_names()
    for name in ("chatml", "../plain-turns", ""):
        with pytest.raises(UsageError) as caught:
            named_template(name)
        assert caught.value.code == "template-unknown"
        assert caught.value.facts == (("known", BASE_TEMPLATE),)
