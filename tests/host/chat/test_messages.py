from __future__ import annotations

import pytest

from vox_host.chat.messages import MessageError, parse_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_three_spellings_of_an_absent_content_give_one_message():
    spellings = [{"content": None}, {"content": ""}, {}]
    parsed = [parse_messages([{"role": "assistant", "tool_calls": [CALL], **s}]) for s in spellings]
    assert parsed[0] == parsed[1] == parsed[2]
    assert parsed[0][0]["content"] == ""
    assert parsed[0][0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_developer_is_the_system_and_parts_are_joined():
    parsed = parse_messages(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "Sunny", "name": "f"},
        ]
    )
    assert parsed[0] == {"role": "system", "content": "be brief"}
    assert parsed[1] == {"role": "user", "content": "ab"}
    assert parsed[2] == {"role": "tool", "content": "Sunny", "name": "f", "tool_call_id": "c1"}


@pytest.mark.parametrize("arguments", ["not json", '{"a": ', "[1]", "3", "[" * 100_000])
def test_a10_arguments_that_are_no_json_object_are_passed_as_text(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


def test_arguments_that_are_an_object_already_are_kept():
    call = {"function": {"name": "f", "arguments": {"a": [1]}}}
    [message] = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": [1]}


def test_reasoning_is_accepted_under_both_names():
    for name in ("reasoning_content", "reasoning"):
        [message] = parse_messages([{"role": "assistant", "content": "x", name: "because"}])
        assert message["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "messages[1].content"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
    ids=str,
)
def test_a_malformed_message_is_named_by_its_path(messages, param):
    with pytest.raises(MessageError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
