"""A merged model as one GGUF file.

What isn't adapted stays in its blocks. The file is read back as an import would: where that gives
another configuration or other tokens than the base has, GGUF can't say what this model is, and
there is no file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.exporting.gguf_vocabulary import vocabulary_keys
from vox_host.exporting.gguf_write import Float32, GgufPiece, UInt32, Value, write_gguf
from vox_host.exporting.merging import MergeJob, fold
from vox_host.exporting.terms import gguf_license
from vox_host.models.gguf_config import FAMILIES, gguf_name
from vox_host.models.gguf_import import GgufSource
from vox_host.models.tokenizer import Tokenizer
from vox_plugin_api.checkpoint import Checkpoint, read_json_object
from vox_plugin_api.families import ModelConfig, parse_config
from vox_plugin_api.families.rope import Rope, Yarn
from vox_plugin_api.merge_messages import MergeResult

__all__ = ["write_gguf_model"]

_NOT_COMPARED = {"architecture", "notes", "is_head_dim_derived", "stored_dtype", "is_text_tower"}
"""Of a configuration: how it was written rather than what it says."""


async def write_gguf_model(job: MergeJob, config: ModelConfig, folder: Path, target: Path) -> MergeResult:
    """Write the new file `target`, in the empty folder `folder`.

    Raises:
        VoxError: as `fold`, or `gguf-inexpressible`, `gguf-tokenizer`: GGUF has no word for this model.
        OSError: it can't be written.
    """
    weights = folder / "weights"
    merged = await fold(job, weights, "gguf")
    config = dataclasses.replace(
        config, tie_word_embeddings=config.tie_word_embeddings and not merged.is_untied
    )
    metadata = {**_metadata(job, config), **await asyncio.to_thread(_vocabulary, job, config)}
    pieces = _pieces(weights, config)
    await asyncio.to_thread(write_gguf, target, metadata, pieces, lambda *_: None)
    shutil.rmtree(weights)
    await asyncio.to_thread(_read_back, target, config)
    return merged


def _pieces(weights: Path, config: ModelConfig) -> list[GgufPiece]:
    checkpoint = Checkpoint.open(weights)
    quantised = checkpoint.quant_metadata.tensors
    family = FAMILIES[config.family]
    pieces = []
    for name, entry in checkpoint.items():
        # A text model within a larger one has a longer prefix.
        plain = "lm_head.weight" if name.endswith("lm_head.weight") else f"model.{_within_decoder(name)}"
        kind = quantised[name].format if name in quantised else entry.dtype
        shape = quantised[name].shape if name in quantised else entry.shape
        pieces.append(
            GgufPiece(gguf_name(plain, family), kind, shape, entry.file, entry.offset, entry.nbytes)
        )
    return pieces


def _within_decoder(name: str) -> str:
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _metadata(job: MergeJob, config: ModelConfig) -> dict[str, Value]:
    family = FAMILIES[config.family]
    rope = config.ropes["full"] if "full" in config.ropes else next(iter(config.ropes.values()))
    keys: dict[str, Value] = {
        "context_length": UInt32(config.context_length),
        "embedding_length": UInt32(config.hidden_size),
        "block_count": UInt32(config.layers),
        "feed_forward_length": UInt32(config.intermediate_size),
        "attention.head_count": UInt32(config.heads),
        "attention.head_count_kv": UInt32(config.kv_heads),
        "attention.key_length": UInt32(config.head_dim),
        "attention.value_length": UInt32(config.head_dim),
        "attention.layer_norm_rms_epsilon": Float32(config.rms_eps),
        "rope.freq_base": Float32(float(rope.theta)),
        **_scaling(rope),
    }
    if config.window is not None and "sliding" in config.attention_kinds:
        keys["attention.sliding_window"] = UInt32(config.window)
        keys["attention.sliding_window_pattern"] = UInt32(config.attention_kinds.index("full") + 1)
        keys["rope.freq_base_swa"] = Float32(float(config.ropes["sliding"].theta))
    if config.attention_softcap is not None:
        keys["attn_logit_softcapping"] = Float32(config.attention_softcap)
    if config.logit_softcap is not None:
        keys["final_logit_softcapping"] = Float32(config.logit_softcap)
    return {
        "general.architecture": family.architecture,
        "general.type": "model",
        "general.name": job.adapter.name,
        **gguf_license(job.base),
        **{f"{family.architecture}.{key}": value for key, value in keys.items()},
    }


def _scaling(rope: Rope) -> dict[str, Value]:
    match rope.scaling:
        case None:
            return {}
        case Yarn():
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": Float32(float(rope.scaling.factor)),
                "rope.scaling.original_context_length": UInt32(rope.scaling.original_context),
            }
        case factor:
            return {"rope.scaling.type": "linear", "rope.scaling.factor": Float32(float(factor))}


def _vocabulary(job: MergeJob, config: ModelConfig) -> dict[str, Value]:
    path = job.base.path
    tokenizer = Tokenizer.load(path)
    written = _optional(path / "tokenizer_config.json")
    content = read_json_object(path / "tokenizer.json")
    ids = {**content["model"]["vocab"], **{t["content"]: t["id"] for t in content.get("added_tokens") or ()}}

    def named(key: str) -> int | None:
        value = written.get(key)
        found = ids.get(value.get("content") if isinstance(value, dict) else value)
        return int(found) if found is not None else None

    bos, eos = named("bos_token"), named("eos_token")
    alone = tokenizer.encode("")
    ends = list(dict.fromkeys([*([eos] if eos is not None else []), *sorted(tokenizer.eos_ids)]))
    template = job.adapter.chat_template
    if template is None and tokenizer.chat_template is not None:
        template = tokenizer.chat_template.source
    return vocabulary_keys(
        content,
        size=config.vocab_size,
        special={"bos": bos, "unknown": named("unk_token"), "padding": named("pad_token")},
        ends=ends,
        adds=(bos is not None and bos in alone[:1], eos is not None and eos in alone[-1:]),
        template=template,
    )


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _read_back(target: Path, config: ModelConfig) -> None:
    source = GgufSource(target)
    found = parse_config(source.translation.config, source=str(target))
    wrong = [
        f"{field.name} is {getattr(config, field.name)}, and would be read as {getattr(found, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if field.name not in _NOT_COMPARED and getattr(found, field.name) != getattr(config, field.name)
    ]
    if wrong:
        target.unlink()
        raise ModelError(
            "gguf-inexpressible",
            f"GGUF can't say what this model is: {'; '.join(wrong)}; nothing was written",
            facts=[("differences", wrong)],
            remedy="Export with --to hf.",
        )
