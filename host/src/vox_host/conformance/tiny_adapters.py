"""Adapters of the suite's tiny models: the same bytes on every machine, drawn by Philox."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from vox_host.conformance.tiny_models import TinyModel, float_bytes, shapes_of
from vox_plugin_api import messages as m
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER, adapter_keys

__all__ = ["ALPHA", "EXCEPTIONS", "RANK", "write_adapter"]

RANK, ALPHA = 4, 8.0
EXCEPTIONS = {EMBEDDING_LAYER: m.RankAndAlpha(rank=3, alpha=5.0)}
"""The embedding has a rank and an alpha of its own."""
_FIRST_NUMBER = 5000
"""Beyond the numbers of the models' tensors, so that nothing is drawn twice."""


def write_adapter(model: TinyModel, path: Path, *, is_zero: bool = False) -> m.AdapterParams:
    """Write an adapter of every layer, both ends included, and return what a worker is told.

    Args:
        is_zero: its B is, as before the first step of a training.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes] = []
    key_map: dict[str, str] = {}
    at = 0
    for number, (layer, rows, columns) in enumerate(_layers(model)):
        key_a, key_b = adapter_keys(layer)
        drawn = _FIRST_NUMBER + 2 * number
        rank = EXCEPTIONS[layer].rank if layer in EXCEPTIONS else RANK
        a = float_bytes("F32", drawn, rank * columns, -2)
        b = bytes(4 * rows * rank) if is_zero else float_bytes("F32", drawn + 1, rows * rank, -3)
        for key, shape, data in ((key_a, [rank, columns], a), (key_b, [rows, rank], b)):
            # In the file they have names of its own, so that the map is used.
            key_map[key] = f"adapter.{len(pieces)}"
            header[key_map[key]] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
            pieces.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    content = b"".join([len(text).to_bytes(8, "little"), text, *pieces])
    path.write_bytes(content)
    return m.AdapterParams(
        file=str(path),
        digest=hashlib.sha256(content).hexdigest(),
        config=m.AdapterConfig(
            rank=RANK,
            alpha=ALPHA,
            targets=[layer for layer, *_ in _layers(model) if layer not in EXCEPTIONS],
            exceptions=EXCEPTIONS,
        ),
        key_map=key_map,
    )


def _layers(model: TinyModel) -> Iterator[tuple[str, int, int]]:
    for name, shape in shapes_of(model.config):
        if len(shape) == 2 and name not in ("embed_tokens.weight", "lm_head.weight"):
            yield (name.removesuffix(".weight"), *shape)
    yield "lm_head", model.vocab_size, model.config["hidden_size"]
    yield EMBEDDING_LAYER, model.config["hidden_size"], model.vocab_size
