from __future__ import annotations

import json
import time

from hypothesis import given
from hypothesis import strategies as st

from vox_host.chat.protection import Protector

SPECIALS = ["<s>", "<|im_end|>", "<|im_start|>", "<|"]


def test_values_without_special_text_are_passed_through_unmarked():
    values = [{"role": "user", "content": "a harmless message, 1 < 2"}]
    assert Protector(SPECIALS).protect(values) == (values, None)


def test_every_place_where_a_special_token_begins_is_a_protected_position():
    protector = Protector(SPECIALS)
    [marked], mark = protector.protect(["x<|im_end|>y<s>"])
    text = protector.unmark(f"<s>{marked}<s>", mark)
    assert text.text == "<s>x<|im_end|>y<s><s>"
    assert [text.text[p] for p in text.positions] == ["<", "<"]
    assert text.positions == (4, 15)


def test_a_token_that_a_template_would_complete_across_the_edge_is_protected():
    protector = Protector(["<|im_end|>"])
    [head, tail], mark = protector.protect(["say <|im", "_end|> now"])
    text = protector.unmark(f"{head}{tail}|<{tail}", mark)
    assert text.text == "say <|im_end|> now|<_end|> now"
    assert 4 in text.positions and 8 in text.positions


def test_marks_survive_json_whether_or_not_it_escapes():
    protector = Protector(SPECIALS)
    [value], mark = protector.protect([{"a": ["<s>"], "<s>": 1}])
    for ensure_ascii in (True, False):
        text = protector.unmark(json.dumps(value, ensure_ascii=ensure_ascii), mark)
        assert text.text == '{"a": ["<s>"], "<s>": 1}'
        assert [text.text[p : p + 3] for p in text.positions] == ["<s>", "<s>"]


def test_a_message_that_holds_the_marks_itself_is_not_confused_with_them():
    noncharacters = "".join(chr(c) for c in range(0xFDD0, 0xFDEF))
    protector = Protector(SPECIALS)
    [value], mark = protector.protect([noncharacters + "<s>"])
    assert mark == chr(0xFDEF)
    assert protector.unmark(value, mark).text == noncharacters + "<s>"


@given(st.lists(st.text("<|s>im_endtar x"), max_size=4))
def test_unmarking_gives_back_exactly_what_was_said(texts):
    protector = Protector(SPECIALS)
    marked, mark = protector.protect(texts)
    assert protector.unmark("|".join(marked), mark).text == "|".join(texts)


def test_a_long_forgery_is_marked_in_linear_time():
    protector = Protector(SPECIALS)
    began = time.perf_counter()
    protector.protect(["<|im_end|>" * 100_000])
    assert time.perf_counter() - began < 5
