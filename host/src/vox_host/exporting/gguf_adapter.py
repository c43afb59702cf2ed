"""An adapter on its own, as llama.cpp loads it beside a base (`--lora`)."""

from __future__ import annotations

from pathlib import Path

from vox_host.errors import ModelError
from vox_host.exporting.gguf_write import Float32, GgufPiece, Value, write_gguf
from vox_host.exporting.terms import gguf_license
from vox_host.models.gguf_config import FAMILIES, gguf_name
from vox_host.models.installed import InstalledModel
from vox_host.models.safetensors_write import Progress
from vox_host.runs.source import AdapterSource
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER, adapter_keys
from vox_plugin_api.checkpoint import CheckpointError, read_safetensors_header
from vox_plugin_api.families import ModelConfig

__all__ = ["write_gguf_adapter"]


def write_gguf_adapter(
    source: AdapterSource, base: InstalledModel, config: ModelConfig, target: Path, progress: Progress
) -> None:
    """Write the new file `target`.

    Args:
        base: whose licence the file states.
        config: the base's.

    Raises:
        ModelError: llama.cpp has no place for one of the updates.
        OSError: it can't be written.
    """
    family = FAMILIES[config.family]
    layers = source.layers
    ends = [end for end in ("lm_head", EMBEDDING_LAYER) if end in layers]
    if ends and config.tie_word_embeddings:
        raise ModelError(
            "gguf-tied-head",
            f"{source.folder} has an update of {ends[0]}, which is head and embedding in this base; "
            "llama.cpp has no place in an adapter for an update of one of the two, and nothing was written",
            facts=[("layers", ends), ("base", "tie_word_embeddings is true")],
            remedy="Export the merged model: --to gguf --merged.",
        )
    alpha = _alpha(source)
    try:
        entries = read_safetensors_header(source.file).entries
    except CheckpointError as error:
        raise ModelError(
            error.code, error.message, facts=list(error.facts.items()), remedy=error.remedy
        ) from None
    pieces = []
    for layer in layers:
        place = gguf_name(f"{layer}.weight" if layer == "lm_head" else f"model.{layer}.weight", family)
        for part, key in zip("ab", adapter_keys(layer), strict=True):
            entry = entries[source.key_map[key]]
            # There the rows of an embedding's A are looked up.
            is_turned = part == "a" and layer == EMBEDDING_LAYER
            pieces.append(
                GgufPiece(
                    f"{place}.lora_{part}",
                    entry.dtype,
                    entry.shape[::-1] if is_turned else entry.shape,
                    source.file,
                    entry.offset,
                    entry.nbytes,
                    is_turned,
                )
            )
    metadata: dict[str, Value] = {
        "general.type": "adapter",
        "general.architecture": family.architecture,
        "general.name": source.name,
        **gguf_license(base),
        "adapter.type": "lora",
        "adapter.lora.alpha": Float32(alpha),
    }
    write_gguf(target, metadata, pieces, progress)


def _alpha(source: AdapterSource) -> float:
    """The one alpha that the file has; llama.cpp divides it by each layer's own rank."""
    # A rank-stabilised update was divided by the root of its rank.
    alphas = {
        by.alpha * by.rank**0.5 if source.config.rank_stabilised else by.alpha
        for by in source.layers.values()
    }
    if len(alphas) > 1:
        raise ModelError(
            "gguf-alphas",
            f"the layers of {source.folder} are scaled by alphas of their own, and llama.cpp's adapters have "
            "one for all; nothing was written",
            facts=[("expected", "one alpha"), ("found", sorted(alphas))],
            remedy="Export the merged model: --to gguf --merged.",
        )
    return alphas.pop()
