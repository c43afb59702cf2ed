"""A model folder's tokenizer as the keys of GGUF's metadata: the way back of `models.gguf_tokenizer`. Pure.

A SentencePiece vocabulary has scores in GGUF, and tokenizer.json a list of merges. What counts of
the scores is their order, which is that of the merges: a piece gets minus the place of the first
merge that makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vox_host.errors import ModelError
from vox_host.exporting.gguf_write import Array, UInt32, Value
from vox_host.models.gguf_tokenizer import BYTE, CONTROL, NORMAL, QWEN2_WORDS, SPACE, UNUSED, USER_DEFINED

__all__ = ["vocabulary_keys"]

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
_PREFIX = "tokenizer.ggml."


def vocabulary_keys(
    tokenizer: Mapping[str, Any],
    *,
    size: int,
    special: Mapping[str, int | None],
    ends: Sequence[int],
    adds: tuple[bool, bool],
    template: str | None,
) -> dict[str, Value]:
    """Return the `tokenizer.*` keys.

    Args:
        tokenizer: the content of tokenizer.json.
        size: rows of the embedding; ids without a token become unused ones.
        special: ids of "bos", "unknown" and "padding"; None where there is none.
        ends: every id that ends an answer, the model's own first; at most three are written.
        adds: whether the first token, and the last, are added to a text.

    Raises:
        ModelError: `gguf-tokenizer`: it is of a kind that GGUF has no word for, or none known here.
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise _unknown("its model is not BPE")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [f"[unused{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, BYTE if token in _BYTES else NORMAL
    for added in tokenizer.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    keys: dict[str, Value]
    if model.get("byte_fallback") and _replaces_spaces(tokenizer.get("normalizer")):
        keys = {
            f"{_PREFIX}model": "llama",
            f"{_PREFIX}scores": Array("float32", _scores(tokens, kinds, merges)),
            f"{_PREFIX}add_space_prefix": False,
        }
        # Those are looked for in the text as it is, before its spaces become pieces.
        tokens = [
            token.replace(SPACE, " ") if kind == USER_DEFINED else token
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    elif _is_qwen2(tokenizer.get("pre_tokenizer")):
        keys = {
            f"{_PREFIX}model": "gpt2",
            f"{_PREFIX}pre": "qwen2",
            f"{_PREFIX}merges": Array("string", merges),
        }
    else:
        raise _unknown("it is neither SentencePiece with byte pieces nor Qwen's byte-level one")
    keys |= {
        f"{_PREFIX}tokens": Array("string", tokens),
        f"{_PREFIX}token_type": Array("int32", kinds),
        f"{_PREFIX}add_bos_token": adds[0],
        f"{_PREFIX}add_eos_token": adds[1],
    }
    named = {**special, **dict(zip(("eos", "eot", "eom"), ends, strict=False))}
    keys |= {f"{_PREFIX}{name}_token_id": UInt32(i) for name, i in named.items() if i is not None}
    if template is not None:
        keys["tokenizer.chat_template"] = template
    return keys


def _scores(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str]) -> list[float]:
    made: dict[str, int] = {}
    for place, merge in enumerate(merges):
        made.setdefault(merge.replace(" ", ""), place)
    # Pieces that nothing makes are never looked for; they come last.
    return [
        float(-made.get(token, len(merges))) if kind == NORMAL else -1000.0 if kind == USER_DEFINED else 0.0
        for token, kind in zip(tokens, kinds, strict=True)
    ]


def _replaces_spaces(normalizer: Any) -> bool:
    return bool(normalizer == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE})


def _is_qwen2(pre_tokenizer: Any) -> bool:
    parts = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    if not isinstance(parts, list) or len(parts) != 2:
        return False
    words = parts[0].get("pattern", {}).get("Regex") if parts[0].get("type") == "Split" else None
    return bool(words == QWEN2_WORDS and parts[1].get("type") == "ByteLevel")


def _unknown(why: str) -> ModelError:
    return ModelError(
        "gguf-tokenizer",
        f"tokenizer.json can't be put into GGUF: {why}; nothing was written",
        remedy="Export with --to hf, and convert that folder with the tool of your choice.",
    )
