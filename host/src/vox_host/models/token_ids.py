"""The token ids that a checkpoint's config files name, held against its vocabulary. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vox_plugin_api.families.fields import Fields

__all__ = ["check_token_ids"]

_KEYS = ("bos_token_id", "eos_token_id")


def check_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, config_source: str, generation_source: str
) -> None:
    """Refuse ids that no token can have: an end that is never met would never end an answer.

    Args:
        config: the content of config.json; its text_config, where there is one, has the vocabulary's size.
        generation: the content of generation_config.json; empty where there is none.

    Raises:
        CheckpointError: `config-invalid`: an id of the wrong type or outside the vocabulary, all named.
    """
    outer = Fields(config, source=config_source)
    inner = outer.child("text_config")
    text = outer if inner is None else inner
    size = text.data.get("vocab_size")
    vocabulary = size if type(size) is int else None
    for fields in dict.fromkeys((outer, text)):
        _check(fields, vocabulary)
    outer.raise_problems("config-invalid")
    settings = Fields(generation, source=generation_source)
    _check(settings, vocabulary)
    settings.raise_problems("config-invalid")


def _check(fields: Fields, vocabulary: int | None) -> None:
    for key in _KEYS:
        value = fields.data.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or i < 0 or (vocabulary is not None and i >= vocabulary) for i in ids):
            upper = "" if vocabulary is None else f" to {vocabulary - 1} (vocab_size is {vocabulary})"
            fields.problem(key, f"a token id, or a list of them, from 0{upper}")
