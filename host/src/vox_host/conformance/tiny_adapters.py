"""Adapters of the tiny models: a few matrices of rank 2, the same bytes on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from vox_host.conformance.tiny_models import TinyModel, matrix_values, shapes_of
from vox_plugin_api import messages as m
from vox_plugin_api.adapter_keys import adapter_keys

__all__ = ["write_adapter"]

_CONFIG = m.AdapterConfig(rank=2, alpha=3.0, targets=["q_proj", "down_proj"])
_FIRST_NUMBER = 1 << 16
"""Of the random words: a model's tensors have the numbers below."""


def write_adapter(model: TinyModel, path: Path, *, changes_nothing: bool = False) -> m.AdapterParams:
    """Write an adapter of `model` to the new file `path`, and return how it is asked for.

    Args:
        changes_nothing: every B is zero, as before the first step of training.
    """
    header: dict[str, object] = {}
    data, names = b"", []
    for key, shape, values in _tensors(model, changes_nothing=changes_nothing):
        header[key] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(values)],
        }
        data += values
        names.append(key)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text + data
    path.write_bytes(content)
    return m.AdapterParams(
        file=str(path),
        digest=hashlib.sha256(content).hexdigest(),
        config=_CONFIG,
        key_map={name: name for name in names},
    )


def _tensors(model: TinyModel, *, changes_nothing: bool) -> Iterator[tuple[str, tuple[int, int], bytes]]:
    number = _FIRST_NUMBER
    for name, shape in shapes_of(model.config):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in _CONFIG.targets:
            continue
        rows, columns = shape
        for key, size in zip(
            adapter_keys(layer), ((_CONFIG.rank, columns), (rows, _CONFIG.rank)), strict=True
        ):
            count = size[0] * size[1]
            is_b = size[0] == rows
            number += 1
            yield key, size, bytes(4 * count) if is_b and changes_nothing else matrix_values(number, count)
