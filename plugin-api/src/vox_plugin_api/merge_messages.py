"""The messages of merging (capability "adapters"): an adapter folded into the weights of its base.

What comes out is another model. Its bytes depend on the base, the adapter, `form` and `dtype`
alone (docs/numerics.md, section 13.4): not on lane, threads or memory.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vox_plugin_api.messages import AdapterParams, Digest, Message

__all__ = ["MergeParams", "MergeResult"]


class MergeParams(Message):
    """Write the weights of `model_dir` with the adapter in them. No model needs to be loaded."""

    model_dir: str
    model_digest: Digest
    adapter: AdapterParams
    folder: str
    """Does not exist yet; it gets model.safetensors, and quant-metadata.json where there is need of one."""
    form: Literal["checkpoint", "hugging-face", "gguf"] = "checkpoint"
    """checkpoint: what isn't adapted is copied as it is. hugging-face: floats alone, norms as that library
    has them. gguf: norms in float32 as GGUF has them, and nothing beside the text model."""
    dtype: Literal["f32", "bf16"] | None = None
    """Of the matrices that are made; None: f32 where the base's are f32 or f16, else bf16."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None: as many as this process may use."""
    lane_options: dict[str, str] = Field(default_factory=dict)
    """As in `load_model`."""


class MergeResult(Message):
    """What was written. Compared between lanes."""

    model_digest: Digest
    """Of the base."""
    adapter_digest: Digest
    """Of the adapter's tensors."""
    numerics_version: int
    files: dict[str, Digest]
    """SHA-256 of each file in the folder."""
    matrices: list[str]
    """The layers that became others, in the order of the adapter's keys."""
    unchanged: list[str]
    """Adapted ones whose update is zero: they are as they were."""
    is_untied: bool
    """The output matrix is no longer the embedding: config.json must say so."""
    left_out: list[str]
    """Tensors of the base that are not in the result."""
    warnings: list[str] = Field(default_factory=list)
