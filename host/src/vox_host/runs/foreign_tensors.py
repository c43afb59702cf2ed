"""Which parameter each tensor of an adapter made elsewhere is. Reads a header, no tensor.

Names differ by who saved them: with PEFT's `base_model.model.` or without, with the adapter's own
name (`lora_A.default.weight`) or without, and below the prefixes that text models have within
larger ones. The part from `layers.` on, `lm_head` or `embed_tokens` is what all have in common.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vox_host.errors import ModelError
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER, adapter_keys
from vox_plugin_api.safetensors_file import TensorEntry, read_safetensors_header
from vox_plugin_api.strict_json import CheckpointError

__all__ = ["FLOAT_DTYPES", "check_pairs", "file_digest", "layer_of_module", "read_header"]

FLOAT_DTYPES = ("F32", "F16", "BF16")

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_ENDS = ("lm_head", EMBEDDING_LAYER)
_LAYER = re.compile(r"layers\.(?:0|[1-9][0-9]{0,5})(?:\.[A-Za-z0-9_]+)+")


def layer_of_module(module: str) -> str | None:
    """Return our name of a layer ("layers.0.mlp.up_proj", "lm_head", "embed_tokens"), or None."""
    for prefix in _PREFIXES:
        layer = module.removeprefix(prefix)
        if module.startswith(prefix) and (layer in _ENDS or _LAYER.fullmatch(layer)):
            return layer
    return None


def read_header(path: Path) -> Mapping[str, TensorEntry]:
    """Return the tensors of a safetensors file.

    Raises:
        ModelError: it is none, or damaged.
    """
    try:
        return read_safetensors_header(path).entries
    except CheckpointError as error:
        raise ModelError(
            error.code,
            f"{error.message}; nothing was loaded",
            facts=list(error.facts.items()),
            remedy=error.remedy,
        ) from None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        ModelError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(
            "adapter-unreadable",
            f"{path} can't be read: {error.strerror}; nothing was loaded",
            remedy="Allow this user to read it.",
        ) from None


def check_pairs(
    path: Path, found: Iterable[tuple[str, str, TensorEntry]], rank_of: Callable[[str], int]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Pair A with B, and hold their shapes against the ranks.

    Args:
        found: layer, part ("A" or "B") and tensor.
        rank_of: the rank of a layer.

    Returns:
        Our keys to those in the file, and the layers in the bytewise order of their keys.

    Raises:
        ModelError: `adapter-tensors`, naming every tensor that is lost, there twice, misshapen or no float.
    """
    parts: dict[str, dict[str, TensorEntry]] = {}
    problems = []
    for layer, part, entry in found:
        if part in parts.setdefault(layer, {}):
            problems.append(f"{entry.name} and {parts[layer][part].name} are both lora_{part} of {layer}")
            continue
        parts[layer][part] = entry
        place, rank = (0 if part == "A" else 1), rank_of(layer)
        if entry.dtype not in FLOAT_DTYPES:
            problems.append(f"{entry.name} is {entry.dtype}; wanted {', '.join(FLOAT_DTYPES)}")
        if len(entry.shape) != 2 or entry.shape[place] != rank:
            wanted = f"[{rank}, columns]" if part == "A" else f"[rows, {rank}]"
            problems.append(f"{entry.name} is {list(entry.shape)}; with rank {rank} it would be {wanted}")
    for layer, pair in parts.items():
        for part, other in (("A", "B"), ("B", "A")):
            if part in pair and other not in pair:
                problems.append(f"{layer} has lora_{part} ({pair[part].name}) and no lora_{other}")
    if not parts:
        problems.append("it holds no tensor of an adapter")
    if problems:
        raise ModelError(
            "adapter-tensors",
            f"{path} is not the adapter of its configuration: {_some(problems)}; nothing was loaded",
            facts=[("file", str(path)), ("problems", problems[:100])],
            remedy="Save the adapter again; this file is of another one, or cut.",
        )
    layers = sorted(parts, key=lambda layer: adapter_keys(layer)[0].encode())
    names = {layer: (parts[layer]["A"].name, parts[layer]["B"].name) for layer in layers}
    return {
        key: name for layer in layers for key, name in zip(adapter_keys(layer), names[layer], strict=True)
    }, tuple(layers)


def _some(problems: list[str]) -> str:
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
