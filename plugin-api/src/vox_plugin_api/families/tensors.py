"""Which tensors a config implies, and which tensors of a checkpoint serve for them.

Headers only: `plan_tensors` decides which tensor serves which purpose and what is left over;
missing tensors, wrong shapes and formats are errors that name them. No weight is read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from vox_plugin_api.checkpoint import FORMATS, Checkpoint, Format
from vox_plugin_api.families.model_config import ModelConfig
from vox_plugin_api.strict_json import CheckpointError

__all__ = [
    "EMBEDDING",
    "HEAD",
    "PlannedTensor",
    "StoredAs",
    "TensorPlan",
    "adapted_shapes",
    "expected_shapes",
    "plan_tensors",
    "stored_tensors",
]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
# Prefixes of the decoder's and of the head's names. A text tower has two layouts in use.
_PLAIN: Sequence[tuple[str, str]] = (("model.", ""),)
_TOWER: Sequence[tuple[str, str]] = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
)
_LISTED = 10
"""Names that a message spells out before it counts the rest."""


@dataclass(frozen=True, slots=True)
class StoredAs:
    """What a header says of one tensor."""

    format: str
    """A `Format` where it is one that is read; else the file's own word ("F64")."""
    shape: tuple[int, ...]
    """Logical: of quantised blocks, [rows, columns] of the matrix."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the checkpoint and the format it is stored in."""

    name: str
    """In the checkpoint."""
    format: Format
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """What becomes of each tensor of a checkpoint."""

    tensors: Mapping[str, PlannedTensor]
    """By our name: "embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"."""
    prefix: str
    """Before the decoder's names in the checkpoint."""
    used: tuple[str, ...]
    unused: tuple[str, ...]
    parameters: int
    notes: tuple[str, ...]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return our name and the shape of every tensor of the decoder; the head is not among them."""
    width, ffn = config.hidden_size, config.intermediate_size
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, width)}
    for i in range(config.layers):
        layer = f"layers.{i}."
        for norm in config.layer_norms:
            shapes[f"{layer}{norm}.weight"] = (width,)
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (query, width),
            f"{layer}self_attn.k_proj.weight": (key, width),
            f"{layer}self_attn.v_proj.weight": (key, width),
            f"{layer}self_attn.o_proj.weight": (width, query),
            f"{layer}self_attn.q_norm.weight": (config.head_dim,),
            f"{layer}self_attn.k_norm.weight": (config.head_dim,),
            f"{layer}mlp.gate_proj.weight": (ffn, width),
            f"{layer}mlp.up_proj.weight": (ffn, width),
            f"{layer}mlp.down_proj.weight": (width, ffn),
        }
    shapes["norm.weight"] = (width,)
    return shapes


def adapted_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every layer that takes a low-rank update, by its name without ".weight".

    Those of `embed_tokens` are the width and the tokens: an update of it is looked up by token.
    """
    suffix = ".weight"
    shapes = {
        name.removesuffix(suffix): (shape[0], shape[1])
        for name, shape in expected_shapes(config).items()
        if len(shape) == 2 and name != EMBEDDING
    }
    shapes[HEAD.removesuffix(suffix)] = (config.vocab_size, config.hidden_size)
    shapes[EMBEDDING.removesuffix(suffix)] = (config.hidden_size, config.vocab_size)
    return shapes


def stored_tensors(checkpoint: Checkpoint) -> dict[str, StoredAs]:
    """Return what the headers of `checkpoint` say of each tensor, quantised matrices as such."""
    quantised = checkpoint.quant_metadata.tensors
    return {
        name: StoredAs(quantised[name].format, quantised[name].shape)
        if name in quantised
        else StoredAs(FORMATS.get(entry.dtype, entry.dtype), entry.shape)
        for name, entry in checkpoint.items()
    }


def plan_tensors(
    config: ModelConfig,
    stored: Mapping[str, StoredAs],
    *,
    source: str,
    spell: Callable[[str], str] = str,
) -> TensorPlan:
    """Decide what each tensor is for.

    Args:
        stored: the tensors there are, by Hugging Face's names.
        source: the file or folder they are in, for messages.
        spell: how a name reads in a message, where the source has names of its own.

    Raises:
        CheckpointError: `weights-ambiguous`, `weights-missing`, `weights-shape` or `weights-format`,
            naming every tensor.
    """
    prefix, head_prefix = _choose_prefix(config, stored, source)
    head = head_prefix + HEAD
    expected = expected_shapes(config)
    shapes = {prefix + name: shape for name, shape in expected.items()}
    ours = {prefix + name: name for name in expected}
    notes: list[str] = []

    embedding = prefix + EMBEDDING
    has_head, has_embedding = head in stored, embedding in stored
    if not config.tie_word_embeddings:
        shapes[head], ours[head] = (config.vocab_size, config.hidden_size), HEAD
    elif not has_embedding and has_head:
        shapes[head] = shapes.pop(embedding)
        ours[head] = ours.pop(embedding)
        notes.append(
            f"{spell(embedding)} is missing; {spell(head)} is used for both, since tie_word_embeddings is "
            "true"
        )
    elif has_head:
        notes.append(f"{spell(head)} is not used: tie_word_embeddings is true, so the embedding is the head")

    unused = tuple(sorted(set(stored) - set(shapes)))
    missing = sorted(set(shapes) - set(stored))
    if missing:
        raise _missing(missing, unused, head, source, spell)
    planned = {name: _planned(name, stored[name], source, spell) for name in shapes}
    _refuse_wrong_shapes(config, planned, shapes, source, spell)
    notes += _notes_on_unused(unused, prefix, head)
    return TensorPlan(
        tensors={ours[name]: tensor for name, tensor in planned.items()},
        prefix=prefix,
        used=tuple(sorted(planned)),
        unused=unused,
        parameters=sum(prod(tensor.shape) for tensor in planned.values()),
        notes=tuple(notes),
    )


def _choose_prefix(config: ModelConfig, stored: Mapping[str, StoredAs], source: str) -> tuple[str, str]:
    """The layout that the checkpoint uses, among those that `text_config` allows."""
    candidates = _TOWER if config.is_text_tower else _PLAIN
    counts = [sum(name.startswith(prefix) for name in stored) for prefix, _ in candidates]
    best = max(range(len(candidates)), key=lambda i: counts[i])
    if sum(count > 0 for count in counts) > 1:
        names = " and ".join(repr(prefix) for prefix, _ in candidates)
        raise CheckpointError(
            "weights-ambiguous",
            f"{source} has tensors below {names}; which of them is the text model can't be told",
            facts={prefix: count for (prefix, _), count in zip(candidates, counts, strict=True)},
            remedy="Keep the tensors of one of them: a checkpoint that was converted halfway has both.",
        )
    return candidates[best]


def _missing(
    missing: Sequence[str], unused: Sequence[str], head: str, source: str, spell: Callable[[str], str]
) -> CheckpointError:
    lines = []
    for name in missing[:_LISTED]:
        near = difflib.get_close_matches(name, unused, n=1, cutoff=0.9)
        lines.append(f"{spell(name)} (there is {spell(near[0])}: misspelt?)" if near else spell(name))
    if head in missing:
        lines.append(f"without {spell(head)} the model has no head, unless tie_word_embeddings is true")
    return CheckpointError(
        "weights-missing",
        f"{source} lacks {len(missing)} of the tensors that the config implies: "
        f"{_shorten(lines, len(missing))}",
        facts={
            "missing": [spell(name) for name in missing[:200]],
            "not_recognised": [spell(name) for name in unused[:200]],
        },
        remedy="Fetch the checkpoint again, or correct config.json if it describes another model.",
    )


def _planned(name: str, stored: StoredAs, source: str, spell: Callable[[str], str]) -> PlannedTensor:
    for known in FORMATS.values():
        if stored.format == known:
            return PlannedTensor(name, known, stored.shape)
    hint = ", unless quant-metadata.json says what its blocks are" if stored.format == "U8" else ""
    raise CheckpointError(
        "weights-format",
        f"{source}: {spell(name)} is stored as {stored.format}, which is not read{hint}",
        facts={"tensor": spell(name), "found": stored.format, "supported": sorted(FORMATS)},
        remedy="Convert the checkpoint to F32, F16 or BF16, or import its GGUF file.",
    )


def _refuse_wrong_shapes(
    config: ModelConfig,
    planned: Mapping[str, PlannedTensor],
    shapes: Mapping[str, tuple[int, ...]],
    source: str,
    spell: Callable[[str], str],
) -> None:
    wrong = []
    is_head_dim_wrong = False
    for name, tensor in planned.items():
        if tensor.shape != shapes[name]:
            hint = ""
            if config.is_head_dim_derived and "self_attn" in name:
                hint, is_head_dim_wrong = f" (head_dim={config.head_dim} derived)", True
            wrong.append(
                f"{spell(name)} is {_brackets(tensor.shape)}; config implies {_brackets(shapes[name])}{hint}"
            )
    if wrong:
        advice = "; set head_dim" if is_head_dim_wrong else ""
        raise CheckpointError(
            "weights-shape",
            f"{source}: {_shorten(wrong, len(wrong))}{advice}",
            facts={"wrong": wrong[:200]},
            remedy="Set head_dim in config.json to the model's head width."
            if is_head_dim_wrong
            else "config.json and the weights are of different models: fetch both again.",
        )


def _notes_on_unused(unused: Sequence[str], prefix: str, head: str) -> list[str]:
    """Leftovers beside the text model are counted; leftovers within it are named."""
    within = [n for n in unused if n.startswith(prefix) and not n.endswith("inv_freq")]
    beside = [n for n in unused if not n.startswith(prefix) and n != head and not n.endswith("inv_freq")]
    notes = []
    if within:
        notes.append(f"tensors that are not used, {len(within)}: {_shorten(within, len(within))}")
    if beside:
        names = _shorten(beside, len(beside))
        notes.append(f"tensors outside {prefix!r} that were not read, {len(beside)}: {names}")
    return notes


def _shorten(names: Sequence[str], total: int) -> str:
    more = f" and {total - _LISTED} more" if total > _LISTED else ""
    return "; ".join(names[:_LISTED]) + more


def _brackets(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
