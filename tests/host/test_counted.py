"""One row, two rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import vox_host
from vox_host.counted import agreeing, counted

HOST = Path(vox_host.__file__).parent


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 rows"),
        (1, "1 row"),
        (2, "2 rows"),
        (1.0, "1 row"),
        (0.125, "0.125 rows"),
        (12345678, "12345678 rows"),
    ],
)
def test_a_number_and_its_thing(count, text):
    assert counted(count, "row") == text


def test_a_word_with_a_plural_of_its_own():
    assert [counted(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]


def test_the_verb_goes_with_it():
    assert [agreeing(n, "is", "are") for n in (0, 1, 1.0, 2)] == ["are", "is", "is", "are"]


NOUNS = (
    "answers|cases|epochs|examples|files|layers|matrices|parameters|prompts|requests|results|rows|sides|steps|"
    "threads|tokens|updates"
)
BY_HAND = re.compile(rf"\{{(?!counted\()[^{{}}]*\}} (?:[a-z-]+ )?(?:{NOUNS})\b")
NEVER_ONE = {
    # Limits, and what is beyond one.
    "{MAX_PROMPTS} prompts",
    "{answers} answers",
    "{tokens} tokens",
    "{count} tokens",
    # Of the recorded models, which have two layers and more.
    "{layers} layers",
    # No number at all.
    "{file} holds updates",
}


def test_no_text_of_the_host_counts_by_hand():
    """No "1 rows": `counted` knows better. A rate ("tokens/s") is no count."""
    found = {}
    for path in sorted(HOST.rglob("*.py")):
        text = path.read_text("utf-8")
        for hit in BY_HAND.finditer(text):
            if hit[0] not in NEVER_ONE and not text[hit.end() :].startswith("/s"):
                found.setdefault(path.name, []).append(hit[0])
    assert found == {}
