"""Whether a folder's tensors are those that its config.json implies, as far as headers tell.

A plugin checks this, and more, when it loads a model; checked at import as well, a folder that
can't ever load is refused before anything of it is in the store. Pure: parsed JSON and tensor
headers in, one error out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.hf_sizes import Sizes, read_sizes
from vox_plugin_api.checkpoint import Checkpoint

__all__ = ["check_tensors", "expected_shapes"]

_NORMS = {
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "gemma3": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
# Prefixes of the decoder's names and of the head's. A text tower has two layouts in use.
_PLAIN = (("model.", ""),)
_TOWER = (("model.language_model.", ""), ("language_model.model.", "language_model."))
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_DTYPES = ("F32", "F16", "BF16")
_LISTED = 5
"""Problems that a message spells out before it counts the rest."""


def expected_shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the decoder by its name without prefix; the head is not one."""
    width, inner = sizes.hidden_size, sizes.intermediate_size
    query, key = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    of_a_layer: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS[sizes.family], (width,))
    of_a_layer |= {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (key, width),
        "self_attn.v_proj": (key, width),
        "self_attn.o_proj": (width, query),
        "self_attn.q_norm": (sizes.head_dim,),
        "self_attn.k_norm": (sizes.head_dim,),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (sizes.vocab_size, width), "norm.weight": (width,)}
    for i in range(sizes.layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in of_a_layer.items()}
    return shapes


def check_tensors(config: Mapping[str, Any], checkpoint: Checkpoint, source: Path) -> None:
    """Hold the tensors of `checkpoint` against the config.json at `source`.

    Raises:
        ModelError: tensors are missing, or of another shape or format than a plugin can load.
    """
    sizes = read_sizes(config, source)
    prefix, head = _layout(sizes, checkpoint, source)
    shapes = {prefix + name: shape for name, shape in expected_shapes(sizes).items()}
    embedding = prefix + _EMBEDDING
    if not sizes.tie_word_embeddings:
        shapes[head] = shapes[embedding]
    elif embedding not in checkpoint and head in checkpoint:
        shapes[head] = shapes.pop(embedding)  # tied: either name serves for both
    _refuse_missing(shapes, checkpoint, head)
    _refuse_other_formats(shapes, checkpoint)
    wrong = []
    for name, shape in shapes.items():
        quantised = checkpoint.quant_metadata.tensors.get(name)
        found = checkpoint[name].shape if quantised is None else quantised.shape
        if found != shape:
            wrong.append(f"{name} is {_spell(found)} where config.json implies {_spell(shape)}")
    if wrong:
        hint = ""
        if sizes.is_head_dim_derived and any("self_attn" in text for text in wrong):
            hint = f" (head_dim is not given; {sizes.head_dim} is hidden_size / num_attention_heads)"
        raise ModelError(
            "weights-shape",
            f"{checkpoint.path}: {_shorten(wrong)}{hint}; nothing was imported",
            facts=[("tensors", len(wrong))],
            remedy="Set head_dim in config.json to the width of the model's heads."
            if hint
            else "config.json and the weights are of different models: fetch both again.",
        )


def _layout(sizes: Sizes, checkpoint: Checkpoint, source: Path) -> tuple[str, str]:
    """Return the prefix of the decoder's names and the head's name, as the checkpoint spells them."""
    layouts = _TOWER if sizes.is_text_tower else _PLAIN
    counts = [sum(name.startswith(prefix) for name in checkpoint) for prefix, _ in layouts]
    if sum(count > 0 for count in counts) > 1:
        raise ModelError(
            "weights-ambiguous",
            f"{checkpoint.path} has tensors below {' and '.join(prefix for prefix, _ in layouts)}; which are "
            "the text model's can't be told; nothing was imported",
        )
    prefix, head_prefix = layouts[counts.index(max(counts))]
    return prefix, head_prefix + _HEAD


def _refuse_missing(shapes: Mapping[str, Any], checkpoint: Checkpoint, head: str) -> None:
    missing = [name for name in shapes if name not in checkpoint]
    if not missing:
        return
    unused = [name for name in checkpoint if name not in shapes]
    lines = []
    for name in missing[:_LISTED]:
        near = difflib.get_close_matches(name, unused, n=1, cutoff=0.9)
        lines.append(f"{name} (there is {near[0]}: misspelt?)" if near else name)
    why = f"; without {head} tie_word_embeddings would have to be true" if head in missing else ""
    raise ModelError(
        "weights-missing",
        f"{checkpoint.path} lacks {len(missing)} of the tensors that config.json implies: "
        f"{_shorten([*lines, *missing[_LISTED:]])}{why}; nothing was imported",
        remedy="Fetch the folder again, or correct config.json if it describes another model.",
    )


def _refuse_other_formats(shapes: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    for name in shapes:
        dtype = checkpoint[name].dtype
        if name not in checkpoint.quant_metadata.tensors and dtype not in _DTYPES:
            raise ModelError(
                "weights-format",
                f"{checkpoint.path}: {name} is stored as {dtype}, which is not read; nothing was imported",
                facts=[("read", ", ".join(_DTYPES))],
                remedy="Convert the weights to one of these, or import the model's GGUF file.",
            )


def _shorten(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more


def _spell(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
