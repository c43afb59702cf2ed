"""A model's tokenizer with merges across words, and its chat templates: small enough to read."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, trainers

from vox_host.chat.template import ChatTemplate
from vox_host.models.tokenizer import ChatTemplateSource, Tokenizer
from vox_host.training.data import encode_rows, read_rows

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def merging_core() -> tokenizers.Tokenizer:
    """BPE of SentencePiece's kind, without a pre-tokenizer: tokens may span words and lines."""
    core = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=False))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        show_progress=False,
        special_tokens=["<pad>", "</s>", "<s>", "<|im_start|>", "<|im_end|>"]
        + [f"<0x{byte:02X}>" for byte in range(256)],
    )
    texts = [
        "assistant\n\nhello the end\n",
        "user\n  ab ba\n\n the\nhello",
        "a b: c\n\n\n{ab}: b a\n hello\n",
    ]
    core.train_from_iterator(texts * 50, trainer)
    state = json.loads(core.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if not token["content"].startswith("<0x")
    ]
    core = tokenizers.Tokenizer.from_str(json.dumps(state))
    core.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t in ("<pad>", "</s>", "<s>", "<|im_start|>", "<|im_end|>")
        ]
    )
    return core


@pytest.fixture(scope="session")
def merging():
    return Tokenizer(
        merging_core(),
        bos_id=2,
        eos_ids=frozenset({1, 4}),
        special_names={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=ChatTemplateSource(CHATML, "tokenizer_config.json"),
    )


@pytest.fixture(scope="module")
def open_template():
    """Return a function that makes a chat template as the server does. Each has a child, ended here."""
    made: dict[tuple[str, int], ChatTemplate] = {}

    def make(source: str, tokenizer: Tokenizer) -> ChatTemplate:
        key = (source, id(tokenizer))
        if key not in made:
            made[key] = ChatTemplate(
                source,
                name='model "m"',
                special_tokens=tokenizer.special_names,
                protect=tokenizer.special_tokens,
            )
        return made[key]

    yield make
    for template in made.values():
        template.close()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows, given as values or as lines, and returns the file."""

    def write_rows(*rows) -> object:
        path = tmp_path / "rows.jsonl"
        lines = [
            row
            if isinstance(row, bytes)
            else row.encode()
            if isinstance(row, str)
            else json.dumps(row).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write_rows


@pytest.fixture
def encoded(write):
    """Return a function from rows to what they become."""

    def encode(rows, tokenizer, template=None, max_length=4096, **options):
        return encode_rows(read_rows(write(*rows)), tokenizer, template, max_length, **options)

    return encode
