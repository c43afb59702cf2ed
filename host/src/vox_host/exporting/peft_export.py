"""An adapter on its own, as PEFT has it: adapter_config.json and adapter_model.safetensors.

Tensors are copied as they are; only their names become those that PEFT gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vox_host.errors import ModelError
from vox_host.models.safetensors_write import Piece, Progress, write_safetensors
from vox_host.runs.adapter_config import peft_text
from vox_host.runs.layout import ADAPTER_CONFIG, ADAPTER_MODEL, CHAT_TEMPLATE
from vox_host.runs.peft_config import read_peft_config
from vox_host.runs.source import AdapterSource
from vox_host.whole_folder import write_file
from vox_plugin_api.checkpoint import CheckpointError, read_safetensors_header

__all__ = ["write_peft_folder"]


_DECODER = "base_model.model.model."
_TOWER = "language_model."
"""What a text model within a larger one has before its layers' names."""


def write_peft_folder(
    source: AdapterSource, folder: Path, progress: Progress, *, is_text_tower: bool = False
) -> None:
    """Fill the empty folder `folder`.

    Args:
        is_text_tower: the base is the text model of a larger one, whose other layers have names that
            end alike.

    Raises:
        ModelError: the adapter changed since it was opened.
        OSError: it can't be written.
    """
    try:
        entries = read_safetensors_header(source.file).entries
    except CheckpointError as error:
        raise ModelError(
            error.code, error.message, facts=list(error.facts.items()), remedy=error.remedy
        ) from None
    pieces = [
        Piece(
            _placed(ours) if is_text_tower else ours,
            entries[theirs].dtype,
            entries[theirs].shape,
            entries[theirs].offset,
            entries[theirs].nbytes,
        )
        for ours, theirs in sorted(source.key_map.items(), key=lambda item: item[0].encode())
    ]
    write_safetensors(folder / ADAPTER_MODEL, source.file, pieces, step="copying", progress=progress)
    write_file(folder / ADAPTER_CONFIG, _config(source, is_text_tower=is_text_tower).encode())
    if source.chat_template is not None:
        write_file(folder / CHAT_TEMPLATE, source.chat_template.encode())


def _placed(key: str) -> str:
    return f"{_DECODER}{_TOWER}{key.removeprefix(_DECODER)}" if key.startswith(_DECODER) else key


def _config(source: AdapterSource, *, is_text_tower: bool) -> str:
    """As it was asked for, where that is a list of names alone; else each layer by its whole name."""
    targets: Sequence[str] | None = None
    if source.origin != "older" and not is_text_tower:
        asked = read_peft_config(source.file.parent / ADAPTER_CONFIG)
        if isinstance(asked.targets, tuple) and not asked.excluded and asked.layer_numbers is None:
            targets = asked.targets
    prefix = _TOWER if is_text_tower else ""
    names = {layer: layer if layer == "lm_head" else prefix + layer for layer in source.layers}
    return peft_text(
        source.config,
        targets=targets if targets is not None else list(names.values()),
        base=source.base_name,
        exceptions={names[layer]: by for layer, by in source.config.exceptions.items()},
    )
