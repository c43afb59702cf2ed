from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vox_host.chat.text_stream import StopScanner, TextStream, Utf8Stream

CASES = Path(__file__).parents[2] / "cases"
INDEX = json.loads((CASES / "INDEX.json").read_text())


def rows_of(case_id: str) -> list:
    [case] = [c for c in INDEX if c["id"] == case_id]
    return json.loads((CASES / case["file"]).read_text())


def emitted(chunks: list[str], stops: list[str]) -> tuple[str, str | None]:
    scanner = StopScanner(stops)
    text = "".join(scanner.push(chunk) for chunk in chunks)
    if scanner.stopped_by is None:
        text += scanner.finish()
    return text, scanner.stopped_by


def by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself: the stop that ends first, the longest of those; what precedes it is the answer."""
    ends = sorted(
        (at + len(stop), -len(stop), stop)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at)
    )
    if not ends:
        return text, None
    end, minus_length, stop = ends[0]
    return text[: end + minus_length], stop


@pytest.mark.parametrize("row", rows_of("T2"), ids=lambda row: row["name"])
def test_t2_deltas_join_to_the_whole_decode_and_hold_no_needless_replacement(row):
    tokens = [bytes.fromhex(token) for token in row["tokens"]]
    stream = Utf8Stream()
    deltas = [stream.push(token) for token in tokens]
    tail = stream.finish()
    assert "".join(deltas) + tail == row["text"] == b"".join(tokens).decode("utf-8", "replace")
    assert tail in ("", "\ufffd")


def test_t2_a_bad_byte_is_replaced_at_once_and_an_unfinished_tail_once_at_the_end():
    stream = Utf8Stream()
    assert [stream.push(b"a"), stream.push(b"\xff"), stream.push(b"b")] == ["a", "\ufffd", "b"]
    assert [stream.push(b"\xf0\x9f"), stream.push(b"\x98"), stream.finish()] == ["", "", "\ufffd"]


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_every_cut_of_any_bytes_gives_the_whole_decode(data, cuts):
    edges = sorted({0, len(data), *(min(c, len(data)) for c in cuts)})
    stream = Utf8Stream()
    pieces = [stream.push(data[a:b]) for a, b in pairwise(edges)]
    assert "".join(pieces) + stream.finish() == data.decode("utf-8", "replace")


@pytest.mark.parametrize("row", rows_of("T3"), ids=lambda row: "".join(row["chunks"]))
def test_t3_text_ends_exactly_before_the_stop_for_every_chunking(row):
    whole = "".join(row["chunks"])
    for chunks in (row["chunks"], [whole], list(whole)):
        text, stop = emitted(chunks, row["stop"])
        assert text == row["text"]
        assert stop in row["stop"]


@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
def test_the_outcome_is_the_rule_whatever_the_chunking(text, stops, cuts):
    edges = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    expected = by_definition(text, stops)
    found = emitted(chunks, stops)
    assert found[0] == expected[0]
    assert (found[1] is None) == (expected[1] is None)


@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_what_is_held_back_could_still_begin_a_stop_and_nothing_else_is(text, stops):
    scanner = StopScanner(stops)
    shown = ""
    for n, character in enumerate(text, 1):
        shown += scanner.push(character)
        if scanner.stopped_by is not None:
            return
        held = text[len(shown) : n]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        longest = max(
            (k for k in range(n + 1) if any(s.startswith(text[n - k : n]) and k < len(s) for s in stops)),
        )
        assert len(held) == longest


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])


@given(
    text=st.text("aé😀", max_size=12),
    stops=st.lists(st.text("aé😀", min_size=1, max_size=3), max_size=2),
    tail=st.sampled_from([b"", b"\xf0\x9f", b"\xc3"]),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_the_texts_of_the_tokens_join_to_the_text_of_the_answer(text, stops, tail, sizes):
    data = text.encode() + tail
    stream: TextStream[int] = TextStream(stops)
    pieces, at = [], 0
    for n, size in enumerate(sizes):
        if at >= len(data) or stream.stopped_by is not None:
            break
        pieces.append(stream.push(data[at : at + size], n))
        at += size
    pieces.append(stream.finish())
    answer = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert "".join(token.text for token in tokens) == answer
    assert [token.entry for token in tokens] == list(range(len(tokens)))
    assert answer == by_definition(data.decode("utf-8", "replace"), stops)[0]
    for i in range(len(pieces)):
        # A token is handed out only with text that has been emitted.
        emitted_text = "".join(piece.text for piece in pieces[: i + 1])
        accounted = "".join(token.text for piece in pieces[: i + 1] for token in piece.tokens)
        assert emitted_text.startswith(accounted)
    if stream.stopped_by is None:
        assert len(tokens) == len(pieces) - 1
