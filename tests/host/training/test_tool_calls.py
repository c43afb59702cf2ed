from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_host.chat.template import ChatTemplate
from vox_host.chat.templates import BASE_TEMPLATE, named_template
from vox_host.training.data import read_rows
from vox_host.training.json_schema import SchemaError
from vox_host.training.tool_calls import ToolCall, grade, parse_answer, questions

CASES = Path(__file__).parents[2] / "cases"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_timer",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer"}, "label": {"type": "string"}},
                "required": ["minutes"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def written(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def hermes(*ids):
    """The cases in the template's form."""
    cases = []
    for case_id in ids:
        for number, case in enumerate(json.loads((CASES / f"hand/toolcall/{case_id}.json").read_text())):
            if case["format"] == "hermes":
                cases.append(pytest.param(case, id=f"{case_id}-{number}"))
    return cases


REPAIRED = {"X4-0", "X4-2", "X4-3", "X4-4", "X4-5", "X4-6"}
"""Single quotes, True, a raw line break, a comma too many, arguments as text, a list: a server may
salvage them and say so; an answer that needs it is not a valid call."""


@pytest.mark.parametrize("case", hermes("X1", "X2", "X4", "X8"))
def test_x1_x2_x4_x8_calls_are_found_where_they_are_json_to_the_letter(case, request):
    answer = parse_answer(case["text"])
    if request.node.callspec.id in REPAIRED:
        assert answer.calls == () and answer.problem is not None
        assert answer.content == case["text"].strip()
        return
    expected = [ToolCall(c["name"], c["arguments"]) for c in case["expect"]["tool_calls"]]
    if "optional" in case:
        expected = []  # "or no call": it is cut before its closing tag
    assert list(answer.calls) == expected
    if "optional" not in case:
        assert answer.content == case["expect"]["content"]
    assert (answer.problem is None) == ("<tool_call>" not in answer.content)
    if case.get("cut"):
        assert answer.problem == "the answer ends within a call"


@pytest.mark.parametrize(
    "text",
    [
        written("set_timer", {"minutes": 3}),
        written("set_timer", {"minutes": 3.0, "label": "a </tool_call> b"}),
        f"Sure!\n{written('set_timer', {'minutes': 3})}",
        written("stop", {}),
        written("stop", {}) + "\n" + written("set_timer", {"minutes": 3}),
        '<tool_call>{"name":"stop","arguments":{}}</tool_call>',
    ],
)
def test_a_valid_call(text):
    assert grade(text, TOOLS).is_valid


@pytest.mark.parametrize(
    ("text", "why_not"),
    [
        ("", "the answer holds no call"),
        ("I set a timer for 3 minutes.", "the answer holds no call"),
        ('{"name": "stop", "arguments": {}}', "the answer holds no call"),
        ('```json\n{"name": "stop", "arguments": {}}\n```', "the answer holds no call"),
        (written("start", {}), '"start" is not among the tools offered'),
        (written("set_timer", {}), "set_timer: arguments.minutes: is missing"),
        (written("set_timer", {"minutes": "3"}), 'set_timer: arguments.minutes: must be integer, not "3"'),
        (
            written("set_timer", {"minutes": 3, "name": "x"}),
            "set_timer: arguments.name: is no argument of this tool",
        ),
        (written("set_timer", {"minutes": True}), "must be integer, not true"),
        (written("stop", {}) + written("start", {}), '"start" is not among the tools'),
        (written("stop", {}) + "<tool_call>", "the answer ends within a call"),
        (written("stop", {})[:-1], "the answer ends within a call"),
        ('<tool_call>\n{"name": "stop", "argu', "the answer ends within a call"),
        ('<tool_call>{"name": "stop", "arguments": {}}}</tool_call>', "</tool_call> does not follow"),
        ('<tool_call>{"name": "stop", "arguments": {}} now', "</tool_call> does not follow"),
        ("<tool_call>stop()</tool_call>", "the call is not JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "the call is not JSON"),
        ("<tool_call>[]</tool_call>", "the call is no object with a name"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "the call is no object with a name"),
        ('<tool_call>{"name": "stop"}</tool_call>', "the call's arguments are no object"),
        ('<tool_call>{"name": "stop", "parameters": {}}</tool_call>', "the call's arguments are no object"),
        ('<tool_call>{"name": "stop", "arguments": "{}"}</tool_call>', "the call's arguments are no object"),
        ('<tool_call>{"name": "stop", "arguments": {}, "id": 1}</tool_call>', "the call has id beside name"),
        (
            '<tool_call>{"name": "stop", "name": "x", "arguments": {}}</tool_call>',
            'gives the key "name" twice',
        ),
        ('<tool_call>{"name": "stop", "arguments": {"a": NaN}}</tool_call>', "holds NaN"),
    ],
)
def test_an_answer_that_is_no_valid_call_is_told_why(text, why_not):
    found = grade(text, TOOLS)
    assert not found.is_valid and not found.is_expected
    assert found.why_not is not None and why_not in found.why_not


def test_the_expected_call_is_told_from_another_valid_one():
    expected = [ToolCall("set_timer", {"minutes": 3, "label": "tea"})]
    assert grade(written("set_timer", {"label": "tea", "minutes": 3}), TOOLS, expected).is_expected
    for arguments in ({"minutes": 4, "label": "tea"}, {"minutes": 3}):
        found = grade(written("set_timer", arguments), TOOLS, expected)
        assert found.is_valid and not found.is_expected
    twice = written("set_timer", {"minutes": 3, "label": "tea"}) * 2
    assert grade(twice, TOOLS, expected).is_valid and not grade(twice, TOOLS, expected).is_expected


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.text(max_size=8)
    | st.just("</tool_call><tool_call>"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
calls = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), st.dictionaries(st.text(max_size=4), values, max_size=3)),
    min_size=1,
    max_size=2,
)


@pytest.fixture(scope="module")
def plain():
    source = named_template(BASE_TEMPLATE).source
    made = ChatTemplate(source, name="plain", special_tokens={"eos_token": "</s>"}, protect=[])
    yield made
    made.close()


@settings(deadline=None)
@given(calls, st.sampled_from(["", "Sure.", "Two lines\nof { text"]))
def test_what_the_template_writes_is_what_the_grader_reads(plain, made, content):
    tool_calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    text = plain.render([message], add_generation_prompt=False).text
    answer = parse_answer(text.removeprefix("Assistant:\n").removesuffix("</s>\n"))
    assert answer.calls == tuple(ToolCall(name, arguments) for name, arguments in made)
    assert (answer.content, answer.problem) == (content, None)


@given(st.text('<tool_call>/{}"name:,argumets [] \n', max_size=60))
def test_no_text_breaks_the_grader(text):
    assert grade(text, TOOLS).is_valid == (grade(text, TOOLS).why_not is None)


def test_a_question_is_what_comes_before_the_first_call(tmp_path):
    user = {"role": "user", "content": "three minutes"}
    call = {"function": {"name": "set_timer", "arguments": '{"minutes": 3}'}}
    rows = [
        {"messages": [user, {"role": "assistant", "content": "no call"}], "tools": TOOLS},
        {
            "messages": [
                user,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "ok"},
                {"role": "assistant", "content": "Done."},
            ],
            "tools": TOOLS,
        },
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [question] = questions(read_rows(path))
    assert (question.line, question.messages, question.tools) == (2, [user], TOOLS)
    assert question.expected == (ToolCall("set_timer", {"minutes": 3}),)
    rows[1]["tools"][0]["function"]["parameters"]["properties"]["label"]["pattern"] = "x"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SchemaError, match=r"line 2: set_timer\.label: pattern can't be checked"):
        questions(read_rows(path))
