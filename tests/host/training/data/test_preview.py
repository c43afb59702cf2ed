from __future__ import annotations

import io

from rich.console import Console

from fixtures.scripted_service import byte_tokenizer
from vox_host.training.data import preview, render_preview


def test_a_preview_joins_to_the_text_and_tells_what_is_learned(encoded):
    tokenizer = byte_tokenizer()
    [example] = encoded([{"prompt": "é: ", "completion": "ü"}], tokenizer).examples
    pieces = preview(example, tokenizer)
    assert [(piece.text, piece.is_trained) for piece in pieces] == [("<s>é: ", False), ("ü</s>", True)]
    assert [i for piece in pieces for i in piece.token_ids] == list(example.token_ids)


def test_what_is_learned_has_a_colour_of_its_own_and_no_row_commands_the_terminal(encoded):
    tokenizer = byte_tokenizer()
    [example] = encoded([{"prompt": "a [b] \x1b[31m", "completion": "b\x07\n"}], tokenizer).examples
    text = render_preview(preview(example, tokenizer))
    assert text.plain == "<s>a [b] \\x1b[31mb\\x07\n</s>"
    assert [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)] == [
        "b\\x07\n</s>"
    ]
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system="standard").print(text)
    assert "\x1b[31m" not in out.getvalue() and "\x1b[1;32m" in out.getvalue()
