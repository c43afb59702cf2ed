"""Which rows are trained on and which are held out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fixtures.tiny_home import add_tiny_model
from fixtures.training_home import write_rows
from vox_host.errors import UsageError
from vox_host.models.tokenizer import Tokenizer
from vox_host.training.data import choose_template
from vox_host.training.dataset import Dataset, encode_dataset, parse_holdout, read_dataset


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(add_tiny_model(tmp_path_factory.mktemp("home")))


def encoded(tokenizer: Tokenizer, data: Path, holdout=None, *, seed: int = 0) -> Dataset:
    return encode_dataset(
        read_dataset(data, holdout),
        tokenizer,
        None,
        holdout=holdout,
        max_length=64,
        answers="all",
        seed=seed,
    )


def lines(examples) -> set[int]:
    return {example.line for example in examples}


@pytest.mark.parametrize(("rows", "held_out"), [(19, 0), (20, 2), (59, 5), (1000, 64)])
def test_a_tenth_is_held_out_where_nobody_chose_and_nothing_of_a_few_rows(
    tokenizer, tmp_path, rows, held_out
):
    dataset = encoded(tokenizer, write_rows(tmp_path / "rows.jsonl", rows))
    assert (len(dataset.train), len(dataset.held_out)) == (rows - held_out, held_out)
    assert lines(dataset.train).isdisjoint(lines(dataset.held_out))


def test_what_is_held_out_depends_on_the_seed_alone(tokenizer, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    first, again, other = (lines(encoded(tokenizer, data, 8, seed=seed).held_out) for seed in (1, 1, 2))
    assert len(first) == 8
    assert first == again != other


def test_a_file_of_its_own_is_held_out_whole_and_rows_in_both_are_named(tokenizer, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", 12)
    beside = tmp_path / "beside.jsonl"
    fresh = {"prompt": "and what of this?", "completion": " nothing"}
    beside.write_text(json.dumps(fresh) + "\n" + data.read_text().splitlines()[4] + "\n")
    dataset = encoded(tokenizer, data, parse_holdout(str(beside)))
    assert (len(dataset.train), len(dataset.held_out)) == (12, 2)
    (warning,) = dataset.warnings
    assert "1 of the 2 held-out rows are also trained on (line 2 is the first)" in warning


def test_holdout_is_a_number_or_a_file_and_must_leave_something(tokenizer, tmp_path):
    assert parse_holdout(None) is None
    assert parse_holdout("0") == 0
    assert parse_holdout("rows.jsonl") == Path("rows.jsonl")
    with pytest.raises(UsageError, match="--holdout"):
        parse_holdout("-1")
    with pytest.raises(UsageError, match="leaves nothing to train on: there are 12 rows;"):
        encoded(tokenizer, write_rows(tmp_path / "rows.jsonl", 12), 12)


def test_rows_need_a_template_where_they_are_conversations(tokenizer, tmp_path):
    data = tmp_path / "rows.jsonl"
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    data.write_text(json.dumps(row) + "\n")
    files = read_dataset(data, None)
    assert files.needs_template
    assert not read_dataset(write_rows(tmp_path / "plain.jsonl"), None).needs_template
    template = choose_template(tokenizer)
    dataset = encode_dataset(files, tokenizer, template, holdout=None, max_length=64, answers="all", seed=0)
    (example,) = dataset.train
    text = b"".join(tokenizer.token_bytes(token) for token in example.token_ids)
    assert b"User:\nhi\nAssistant:\nhello" in text


def test_a_holdout_that_is_neither_a_number_nor_a_file_names_the_option(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    with pytest.raises(UsageError, match=r"^--holdout 4x: there is no such file, and it is no whole number"):
        read_dataset(data, parse_holdout("4x"))
