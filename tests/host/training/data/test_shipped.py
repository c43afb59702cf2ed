from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.demo_model import demo_gguf
from vox_host.models.gguf_header import read_gguf_header
from vox_host.models.gguf_tokenizer import parse_vocabulary, tokenizer_config, tokenizer_json
from vox_host.models.tokenizer import Tokenizer
from vox_host.training.data import choose_template, encode_rows, read_rows, shipped_data
from vox_host.training.tool_calls import grade, questions

ROOT = Path(__file__).parents[4]


def texts(row):
    """The values of the arguments of a row's first call, as JSON text."""
    call = row["messages"][1]["tool_calls"][0]["function"]
    for name, value in json.loads(call["arguments"]).items():
        for item in value if isinstance(value, list) else [value]:
            yield (call["name"], name), json.dumps(item)


@pytest.fixture(scope="module")
def parts():
    return {
        part: [json.loads(line) for line in shipped_data("tool-calls", part).read_text().splitlines()]
        for part in ("train", "heldout")
    }


def test_the_script_beside_it_writes_the_data_set_that_is_shipped():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/make_tool_call_data.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("part", "count", "tools"), [("train", 400, 10), ("heldout", 120, 12)])
def test_every_row_is_good_and_is_answered_with_a_valid_call(part, count, tools):
    rows = read_rows(shipped_data("tool-calls", part))
    rows.check()
    asked = questions(rows)
    assert (rows.format, len(rows), len(asked), rows.ignored_keys) == ("chat", count, count, {})
    for question in asked:
        answer = "".join(
            f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>"
            for c in question.expected
        )
        assert grade(answer, question.tools, question.expected).is_expected
    assert len({question.expected[0].name for question in asked}) == tools


def test_held_out_rows_ask_for_what_training_never_showed(parts):
    train, held_out = parts["train"], parts["heldout"]

    def offered(row):
        return tuple(sorted(tool["function"]["name"] for tool in row["tools"]))

    assert not {offered(row) for row in train} & {offered(row) for row in held_out}
    requests = [row["messages"][0]["content"] for row in train + held_out]
    assert len(set(requests)) == len(requests)
    # Values of enums and booleans are few; all others are new.
    closed = {
        ("set_lights", "on"),
        ("play_music", "shuffle"),
        ("find_route", "mode"),
        ("get_weather", "unit"),
    }
    closed.add(("search_files", "kind"))
    seen = {pair for row in train for pair in texts(row)}
    again = {pair for row in held_out for pair in texts(row) if pair[0] not in closed} & seen
    assert not again
    assert not any({"book_table", "translate"} & set(offered(row)) for row in train)
    assert sum("book_table" in offered(row) for row in held_out) >= 10


@pytest.mark.real_model
@pytest.mark.skipif(
    not os.environ.get("VOX_TEST_LONG"), reason="builds the demo model's vocabulary; VOX_TEST_LONG=1 runs it"
)
def test_the_demo_model_reads_the_rows_as_the_server_asks_for_them_and_they_are_short(tmp_path):
    vocabulary = parse_vocabulary(read_gguf_header(demo_gguf()).metadata, "demo")
    for name, made in (("tokenizer", tokenizer_json), ("tokenizer_config", tokenizer_config)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made(vocabulary)))
    tokenizer = Tokenizer.load(tmp_path)
    choice = choose_template(tokenizer)
    assert choice.name == "plain-turns"
    lengths = {}
    with choice.open(tokenizer) as template:
        for part in ("train", "heldout"):
            rows = read_rows(shipped_data("tool-calls", part))
            encoded = encode_rows(rows, tokenizer, template, 512)
            encoded.check()
            assert not encoded.warnings
            sizes = sorted(len(example.token_ids) for example in encoded.examples)
            lengths[part] = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
            [question, *_] = questions(rows)
            prompt = template.render(question.messages, tools=question.tools)
            ids = tokenizer.encode_markup(prompt.text, prompt.positions)
            example = encoded.examples[0]
            assert list(example.token_ids[: len(ids)]) == ids
            assert example.loss_mask.index(1) == len(ids)
            assert example.token_ids[-1] in tokenizer.eos_ids
    assert lengths == {"train": (98, 125, 165), "heldout": (95, 122, 159)}
