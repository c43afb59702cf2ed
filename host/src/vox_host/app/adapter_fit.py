"""Hold an adapter against a base model by names and shapes: by headers and config.json, not by values."""

from __future__ import annotations

from collections.abc import Mapping

from vox_host.counted import counted
from vox_host.errors import ModelError
from vox_host.models.installed import InstalledModel
from vox_host.models.verifying import verify_files
from vox_host.runs.foreign_tensors import read_header
from vox_host.runs.source import AdapterSource
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.checkpoint import CheckpointError, read_json_object
from vox_plugin_api.families import adapted_shapes, parse_config

__all__ = ["check_fit"]

_LISTED = 10
"""Tensors that the message spells out before it counts the rest."""


def check_fit(source: AdapterSource, base: InstalledModel) -> None:
    """Refuse an adapter that isn't one of `base`.

    A base of a family that is not described here, or whose config.json isn't right, is left to whoever
    loads it, which refuses both.

    Raises:
        ModelError: `adapter-tensors`: tensors of layers that the base hasn't, or of other sizes; ten are
            named in the message, a hundred in the facts. Or the file's own error where it is damaged.
        IntegrityError: it doesn't fit, and `base` is not what was imported.
    """
    try:
        config = parse_config(read_json_object(base.path / "config.json"))
    except CheckpointError:
        return
    shapes = adapted_shapes(config)
    orphans, wrong = _misfits(source, shapes)
    if not orphans and not wrong:
        return
    # It is the adapter's fault only if the base is what was imported: a damaged one is told as that. Where
    # the adapter fits, whoever loads the base reads its bytes anyway.
    verify_files(base, lambda *_: None, trust_unchanged=True)
    parts = []
    if orphans:
        lie = f"{counted(len(orphans), 'tensor')} of layers that the base hasn't"
        parts.append(f"{lie}: {_some(orphans)}")
    if wrong:
        parts.append(_some(wrong))
    kinds = sorted({name.split(".", 2)[2] for name in shapes if name.startswith("layers.")})
    last = f" to layers.{config.layers - 1}, each" if config.layers > 1 else ""
    has = f"layers.0{last} with {', '.join(kinds)}; lm_head and embed_tokens"
    raise ModelError(
        "adapter-tensors",
        f"{source.file} does not fit the base {base.name!r}: {'; '.join(parts)}. The base has {has}. "
        "Nothing was done",
        facts=[
            ("file", str(source.file)),
            ("base", base.name),
            ("orphans", orphans[:100]),
            ("wrong", wrong[:100]),
        ],
        remedy="Name the model that it was trained on: --base NAME.",
    )


def _misfits(source: AdapterSource, shapes: Mapping[str, tuple[int, int]]) -> tuple[list[str], list[str]]:
    """Return the names of tensors without a layer, and what is wrong with the size of others."""
    entries = read_header(source.file)
    orphans, wrong = [], []
    for layer, by in source.layers.items():
        for part, key in zip("AB", adapter_keys(layer), strict=True):
            name = source.key_map.get(key, key)
            if layer not in shapes:
                orphans.append(name)
                continue
            rows, columns = shapes[layer]
            expected = (by.rank, columns) if part == "A" else (rows, by.rank)
            entry = entries.get(name)
            # A rank that isn't the configuration's, and a tensor that is missing, are not the base's matter.
            side = 1 if part == "A" else 0
            if entry is not None and (len(entry.shape) != 2 or entry.shape[side] != expected[side]):
                wrong.append(
                    f"{name} is {list(entry.shape)}, expected {list(expected)} since the base's {layer} is "
                    f"[{rows}, {columns}]"
                )
    return orphans, wrong


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
