from __future__ import annotations

import hashlib
import json
import os
import tracemalloc

import pytest

from vox_host.cli.output import render_error
from vox_host.errors import UsageError
from vox_host.training.data import problems, read_rows
from vox_host.training.data.formats import Continuation, Conversation, PlainText

USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def chat(*messages, **more):
    return {"messages": list(messages), **more}


def answer(content="yes", **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("form", "row", "content"),
    [
        ("chat", chat(USER, answer()), Conversation([USER, answer()])),
        ("prompt/completion", {"prompt": "a", "completion": "b"}, Continuation("a", "b")),
        ("text", {"text": "a"}, PlainText("a")),
        ("alpaca", {"instruction": "hi", "output": "yes"}, Conversation([USER, answer()])),
        ("alpaca", {"instruction": "hi", "input": "", "output": "yes"}, Conversation([USER, answer()])),
        (
            "alpaca",
            {"instruction": "hi", "input": "you", "output": "yes", "system": "s"},
            Conversation(
                [{"role": "system", "content": "s"}, {"role": "user", "content": "hi\n\nyou"}, answer()]
            ),
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
            Conversation([USER, answer()]),
        ),
    ],
)
def test_a_format_is_known_by_its_keys_and_brought_into_one_of_three_forms(write, form, row, content):
    rows = read_rows(write(row, row))
    rows.check()
    assert (rows.format, len(rows)) == (form, 2)
    assert rows.are_conversations == isinstance(content, Conversation)
    assert [(row.line, row.content) for row in rows] == [(1, content), (2, content)]


def test_calls_and_their_tools_come_as_templates_expect_them(write):
    [row] = read_rows(write(chat(USER, answer(None, tool_calls=[CALL]), tools=TOOLS)))
    assert row.content.tools == TOOLS
    assert row.content.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    [row] = read_rows(write(chat(USER, answer(), tools=[])))
    assert row.content.tools is None


BAD = [
    (b"", "is empty"),
    (b" \t", "is empty"),
    (b"{}", "is an empty object"),
    (b"[1]", "is a list"),
    (b'"x"', "is text"),
    (b"1", "is a number"),
    (b"null", "is null"),
    (b"true", "is a boolean"),
    (b'{"text": "a"', "is not JSON: Expecting ',' delimiter (column 13)"),
    (b'{"text": "a"} {"text": "b"}', "is not JSON: Extra data"),
    (b"{'text': 'a'}", "is not JSON"),
    (b'{"text": "caf\xe9"}', "is not UTF-8: byte 14 is 0xe9"),
    (b'{"text": "a", "text": "b"}', 'gives the key "text" twice'),
    (b'{"text": "a", "more": {"k": 1, "k": 1}}', 'gives the key "k" twice'),
    (b'{"text": "a", "n": NaN}', "holds NaN"),
    (b'{"text": "a", "n": -Infinity}', "holds -Infinity"),
    (b'{"text": "a", "n": 1e999}', "holds the number 1e999"),
    (b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    (b'{"text": "\\ude00\\ud83d"}', "half of a surrogate pair"),
    (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    (b'{"text": "a", "n": ' + b"[" * 300 + b"]" * 300 + b"}", "nested too deeply"),
    (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "is not JSON that can be read"),
    (b'{"text": 3}', "text: must be text"),
    (b'{"text": " \\n"}', "text: is empty"),
    (b'{"prompt": "a", "completion": ""}', "completion: is empty"),
    (b'{"prompt": ["a"], "completion": "b"}', "prompt: must be text"),
    (b'{"instruction": " ", "output": "b"}', "instruction: is empty"),
    (b'{"instruction": "a", "output": " "}', "the assistant says nothing"),
    (b'{"conversations": {}}', "conversations: must be a list"),
    (b'{"conversations": [{"from": "observation", "value": "x"}]}', "conversations[0].from: must be one of"),
    (b'{"conversations": [{"from": "gpt"}]}', "conversations[0].value: must be text"),
    (b'{"txt": "a"}', 'has the keys "txt", which are no known format (chat: messages;'),
    (b'{"text": "a", "messages": []}', "could be chat or text"),
    (chat(), "messages: must hold at least one message"),
    (chat({"role": "usr", "content": "x"}), "messages[0].role: must be one of"),
    (chat({"role": "user"}), "messages[0].content: is required"),
    (chat(USER, answer(3)), "messages[1].content: must be text"),
    (chat(USER, answer(" ")), "messages[1]: the assistant says nothing and calls nothing"),
    (chat(USER), "hold no assistant turn"),
    (chat(USER, answer(), USER), "end with a user message, which is not answered"),
    (chat(USER, answer(), tools={}), "tools: must be a list"),
    (chat(USER, answer(), tools=[{"function": {}}]), "tools[0].function.name: must be non-empty text"),
    (chat(USER, answer(), tools=TOOLS * 2), 'tools[1].function.name: "f" is there twice'),
    (
        chat(USER, answer("", tool_calls=[{"function": {"name": "f"}}]), tools=[]),
        'messages[1].tool_calls[0].function.name: "f" is not among the tools of this row',
    ),
    (
        chat(USER, answer("", tool_calls=[{"function": {"name": "g"}}]), tools=TOOLS),
        'messages[1].tool_calls[0].function.name: "g" is not among the tools of this row',
    ),
    (
        chat(USER, answer("", tool_calls=[{"function": {"name": "f", "arguments": "{'a': 1}"}}])),
        "messages[1].tool_calls[0].function.arguments: is not JSON",
    ),
    (
        chat(USER, answer("", tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}])),
        'function.arguments: gives the key "a" twice',
    ),
    (
        chat(USER, answer("", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}])),
        "function.arguments: must be an object",
    ),
]


@pytest.mark.parametrize(("row", "problem"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_row_is_named_with_its_line_and_the_others_are_read(write, row, problem):
    # Two rows of each format the bad one could have, so that it is not in the minority.
    like = {
        "messages": chat(USER, answer()),
        "conversations": {"conversations": [{"from": "gpt", "value": "x"}]},
    }
    like["instruction"] = {"instruction": "a", "output": "b"}
    like["prompt"] = {"prompt": "a", "completion": "b"}
    text = row if isinstance(row, bytes) else str(row).encode()
    good = next((value for key, value in like.items() if key.encode() in text[:20]), {"text": "good"})
    rows = read_rows(write(good, row, good))
    [found] = rows.problems
    assert (found.line, len(rows)) == (2, 2)
    assert problem in found.what
    assert [row.line for row in rows] == [1, 3]


def test_every_bad_row_is_said_at_once_in_the_order_of_lines(write):
    path = write(
        {"prompt": "a", "completion": "b"}, {"text": "one"}, b"{", {"text": 2}, b"", {"text": "three"}
    )
    rows = read_rows(path)
    with pytest.raises(UsageError) as caught:
        rows.check()
    assert caught.value.code == "data-rows-bad"
    assert "4 rows are not fit" in caught.value.message and "nothing was trained" in caught.value.message
    assert [name for name, _ in caught.value.facts] == ["line 1", "line 3", "line 4", "line 5"]
    assert caught.value.facts[0][1] == "is prompt/completion, but most rows of the file are text"
    assert len(rows) == 2


@pytest.mark.parametrize(("count", "left"), [(20, None), (21, "1 more"), (2500, "2480 more")])
def test_of_many_bad_rows_a_text_has_the_first_and_how_many_more_and_the_data_all(write, count, left):
    with pytest.raises(UsageError) as caught:
        read_rows(write(*[b"{"] * count)).check()
    names = [f"line {n}" for n in range(1, count + 1)]
    assert list(caught.value.as_dict()["facts"]) == names
    first, *lines, remedy = render_error(caught.value).splitlines()
    assert f"{count} rows are not fit" in first and "Repair" in remedy
    if left is not None:
        assert lines.pop().split() == ["and", *f"{left}, which the same command lists with --json".split()]
    assert [" ".join(line.split()[:2]) for line in lines] == names[:20]


def test_what_is_wrong_is_kept_of_so_many_rows_and_the_others_are_counted(write, monkeypatch):
    monkeypatch.setattr(problems, "_KEPT", 30)
    rows = read_rows(write(*[b"{"] * 50))
    assert (rows.problem_count, len(rows.problems)) == (50, 30)
    with pytest.raises(UsageError) as caught:
        rows.check()
    assert caught.value.facts[-1] == ("beyond these", "20 more, counted alone")


def test_blank_lines_behind_the_last_row_are_no_rows(write):
    path = write({"text": "a"}, b"", b"  ")
    assert not read_rows(path).problems
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}')
    rows = read_rows(path)
    assert [row.content for row in rows] == [PlainText("a"), PlainText("b")]
    assert not rows.problems


def test_keys_that_say_nothing_are_counted(write):
    rows = read_rows(write({"text": "a", "id": 1}, {"text": "b", "id": 2, "source": "x"}))
    assert rows.ignored_keys == {"id": 2, "source": 1}


def test_the_digest_is_that_of_the_file(write):
    path = write({"text": "a"}, b"{", {"text": "b"})
    assert read_rows(path).digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_changes_between_two_readings_is_refused(write):
    path = write({"text": "a"}, {"text": "b"})
    rows = read_rows(path)
    path.write_bytes(path.read_bytes().replace(b"b", b"c"))
    with pytest.raises(UsageError, match="changed while it was read") as caught:
        list(rows)
    assert caught.value.code == "data-changed"


def test_a_file_that_grows_while_it_is_read_is_refused(write):
    path = write({"text": "a"}, {"text": "b"})
    rows = iter(read_rows(path))
    next(rows)
    with path.open("ab") as more:
        more.write(b'{"text": "c"}\n')
    with pytest.raises(UsageError, match="changed while it was read"):
        list(rows)


def test_what_is_no_readable_file_is_said(tmp_path, write):
    with pytest.raises(UsageError) as caught:
        read_rows(tmp_path / "none.jsonl")
    assert caught.value.code == "data-missing"
    with pytest.raises(UsageError, match="is a folder"):
        read_rows(tmp_path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe; nothing was read") as caught:
        read_rows(pipe)
    assert "read again" in caught.value.facts[0][1]
    for content in (b"", b"\n \n"):
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(UsageError, match="holds no row"):
            read_rows(path)
    utf16 = tmp_path / "utf16.jsonl"
    utf16.write_bytes('{"text": "a"}'.encode("utf-16"))
    assert "begins as UTF-16 does" in read_rows(utf16).problems[0].what


def test_a_file_is_not_held_in_memory(tmp_path):
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for _ in range(24):
            file.write(b'{"text": "' + b"x" * 1024 * 1024 + b'"}\n')
        file.write(b'{"text": "' + b"x" * 40 * 1024 * 1024 + b'"}\n{"text": "last"}\n')
    tracemalloc.start()
    try:
        rows = read_rows(path)
        assert sum(1 for _ in rows) == 25
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 * 1024 * 1024
    [problem] = rows.problems
    assert (problem.line, problem.what) == (25, "is longer than 16 MiB; one line is one row")


def test_a_whole_number_of_thousands_of_digits_is_said_without_python_s_words(write):
    rows = read_rows(write('{"text": "a", "n": 1' + "0" * 10_000 + "}\n"))
    (problem,) = rows.problems
    assert "a whole number of thousands of digits" in str(problem) and "sys." not in str(problem)


ARRAY = [{"prompt": "a", "completion": "b"}] * 3


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ARRAY),
        json.dumps(ARRAY, indent=2),
        "[\n" + ",\n".join(map(json.dumps, ARRAY)) + "\n]\n",
    ],
)
def test_an_array_is_one_error_that_says_how_lines_are_made_of_it(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_rows(path)
    assert caught.value.code == "data-is-array" and not caught.value.facts
    assert f"jq -c '.[]' {path} > rows.jsonl" in (caught.value.remedy or "")


@pytest.mark.parametrize("text", ["[1]\n[2]\n", '[1]\n{"text": "a"}\n'])
def test_lines_of_which_some_are_arrays_are_told_line_by_line(tmp_path, text):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    assert read_rows(path).problems[0].line == 1
