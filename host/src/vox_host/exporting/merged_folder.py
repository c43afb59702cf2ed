"""Merged weights as a model folder: one that `vox-host model import` and transformers read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.exporting.merging import Form, MergeJob, fold
from vox_host.exporting.terms import write_terms
from vox_host.models.model_manifest import MERGED_FROM, MergedFrom
from vox_host.whole_folder import write_file
from vox_plugin_api.checkpoint import CheckpointError, read_json_object, read_safetensors_header
from vox_plugin_api.merge_messages import MergeResult

__all__ = ["write_merged_folder"]

_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


async def write_merged_folder(job: MergeJob, folder: Path, form: Form) -> MergeResult:
    """Fill the empty folder `folder`.

    Raises:
        VoxError: as `fold`.
        OSError: it can't be written.
    """
    weights = folder / "weights"
    merged = await fold(job, weights, form)
    for file in sorted(weights.iterdir()):
        file.rename(folder / file.name)
    weights.rmdir()
    base = job.base.path
    for name in _COPIED:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    if job.adapter.chat_template is not None:
        # What it was trained with is what it is asked with.
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        write_file(folder / "chat_template.jinja", job.adapter.chat_template.encode())
    config = merged_config(_base_config(base / "config.json"), merged, _widest(folder))
    write_file(folder / "config.json", _text(config))
    write_file(
        folder / MERGED_FROM,
        _text(MergedFrom(base_digest=merged.model_digest, adapter_digest=merged.adapter_digest).model_dump()),
    )
    what = (
        f"Merged by vox-host: {job.base.name} (sha256:{merged.model_digest}) with the adapter "
        f"{job.adapter.name} (sha256:{merged.adapter_digest})."
    )
    write_terms(job.base, folder, what)
    return merged


def merged_config(base: dict[str, Any], merged: MergeResult, dtype: str) -> dict[str, Any]:
    """Return the base's config.json as the merged weights need it."""
    config = dict(base)
    inner = config.get("text_config")
    levels = [config]
    if isinstance(inner, dict):
        config["text_config"] = dict(inner)
        levels.append(config["text_config"])
    for level in levels:
        if merged.is_untied:
            level["tie_word_embeddings"] = False
        for key in ("torch_dtype", "dtype"):
            if key in level or (key == "torch_dtype" and level is config):
                level[key] = dtype
    return config


def _base_config(path: Path) -> dict[str, Any]:
    try:
        return dict(read_json_object(path))
    except CheckpointError as error:
        raise ModelError(
            error.code, error.message, facts=list(error.facts.items()), remedy=error.remedy
        ) from None


def _widest(folder: Path) -> str:
    """The dtype that holds every matrix: readers cast all of a model to the one that config.json names."""
    matrices = [
        entry.dtype
        for entry in read_safetensors_header(folder / "model.safetensors").entries.values()
        if len(entry.shape) == 2
    ]
    if "F32" in matrices or {"F16", "BF16"} <= set(matrices):
        return "float32"
    return "float16" if "F16" in matrices else "bfloat16"


def _text(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()
