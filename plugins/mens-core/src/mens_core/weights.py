"""From the tensors of a checkpoint to the weights of a model, every tensor accounted for.

`plan_weights` looks at headers only: it decides which tensor serves which purpose and what is
left over; missing tensors, wrong shapes and formats are errors that name them. `Weights` hands
planned tensors to a lane. What is not planned is never read, except the few numbers of an
`inv_freq` (`inv_freq.py`).
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mens_core.config import ModelConfig
from mens_core.models.linear import Linear
from mens_core.ops import Format, Matrix, Ops, StoredTensor, Tensor
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint

__all__ = ["EMBEDDING", "HEAD", "PlannedTensor", "WeightPlan", "Weights", "expected_shapes", "plan_weights"]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
_FORMATS: Mapping[str, Format] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_QUANTISED: Mapping[str, Format] = {
    "q8_0": "q8_0",
    "q5_0": "q5_0",
    "q4_0": "q4_0",
    "q4_k": "q4_k",
    "q5_k": "q5_k",
    "q6_k": "q6_k",
}
_LAYER_NORMS: Mapping[str, Sequence[str]] = {
    "qwen3": ("input_layernorm", "post_attention_layernorm"),
    "gemma3": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
# Prefixes of the decoder's and of the head's names. A text tower has two layouts in use.
_PLAIN: Sequence[tuple[str, str]] = (("model.", ""),)
_TOWER: Sequence[tuple[str, str]] = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
)
_LISTED = 10
"""Names that a message spells out before it counts the rest."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the checkpoint and the format it is stored in."""

    name: str
    """In the checkpoint."""
    format: Format
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlan:
    """What becomes of each tensor of a checkpoint."""

    tensors: Mapping[str, PlannedTensor]
    """By our name: "embed_tokens.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"."""
    prefix: str
    """Before the decoder's names in the checkpoint."""
    norms_plus_one: bool
    """The lane adds 1 to norm weights as it loads them."""
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
        for norm in _LAYER_NORMS[config.family]:
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


def plan_weights(config: ModelConfig, checkpoint: Checkpoint) -> WeightPlan:
    """Decide what each tensor is for.

    Raises:
        BackendError: `weights-missing`, `weights-shape` or `weights-format`, naming every tensor.
    """
    prefix, head_prefix = _choose_prefix(config, checkpoint)
    head = head_prefix + HEAD
    shapes = {prefix + name: shape for name, shape in expected_shapes(config).items()}
    sources = {prefix + name: name for name in expected_shapes(config)}
    notes: list[str] = []

    embedding = prefix + EMBEDDING
    has_head, has_embedding = head in checkpoint, embedding in checkpoint
    if not config.tie_word_embeddings:
        shapes[head], sources[head] = (config.vocab_size, config.hidden_size), HEAD
    elif not has_embedding and has_head:
        shapes[head] = shapes.pop(embedding)
        sources[head] = sources.pop(embedding)
        notes.append(f"{embedding} is missing; {head} is used for both, since tie_word_embeddings is true")
    elif has_head:
        notes.append(f"{head} is not used: tie_word_embeddings is true, so the embedding is the head")

    unused = tuple(sorted(set(checkpoint) - set(shapes)))
    _refuse_missing(sorted(set(shapes) - set(checkpoint)), unused, head)
    planned = {name: _stored_as(checkpoint, name) for name in shapes}
    _refuse_wrong_shapes(config, planned, shapes, sources)
    notes += _notes_on_unused(unused, prefix, head)
    return WeightPlan(
        tensors={sources[name]: tensor for name, tensor in planned.items()},
        prefix=prefix,
        norms_plus_one=config.norm_plus_one and not checkpoint.quant_metadata.norms_include_one,
        used=tuple(sorted(planned)),
        unused=unused,
        parameters=sum(prod(tensor.shape) for tensor in planned.values()),
        notes=tuple(notes),
    )


class Weights:
    """Planned tensors on their way into one lane."""

    def __init__(self, plan: WeightPlan, checkpoint: Checkpoint, ops: Ops) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._ops = ops

    def matrix(self, name: str) -> Matrix:
        """Load the matrix called `name` ("layers.0.mlp.up_proj", without ".weight")."""
        tensor = self._plan.tensors[f"{name}.weight"]
        loaded = self._ops.load_matrix(self._stored(tensor))
        self._checkpoint.release(tensor.name)
        return loaded

    def linear(self, name: str) -> Linear:
        """Load the matrix called `name` as a linear layer of that name."""
        rows, columns = self._plan.tensors[f"{name}.weight"].shape
        return Linear(name, self.matrix(name), (rows, columns))

    def norm(self, name: str) -> Tensor:
        """Load the weight of the norm called `name`, with the family's 1 added if it lacks it."""
        tensor = self._plan.tensors[f"{name}.weight"]
        return self._ops.load_vector(self._stored(tensor), plus_one=self._plan.norms_plus_one)

    def _stored(self, tensor: PlannedTensor) -> StoredTensor:
        return StoredTensor(
            tensor.name,
            tensor.format,
            tensor.shape,
            self._checkpoint.data(tensor.name),
            functools.partial(self._checkpoint.release, tensor.name),
        )


def _choose_prefix(config: ModelConfig, checkpoint: Checkpoint) -> tuple[str, str]:
    """The layout that the checkpoint uses, among those that `text_config` allows."""
    candidates = _TOWER if config.is_text_tower else _PLAIN
    counts = [sum(name.startswith(prefix) for name in checkpoint) for prefix, _ in candidates]
    best = max(range(len(candidates)), key=lambda i: counts[i])
    if sum(count > 0 for count in counts) > 1:
        names = " and ".join(repr(prefix) for prefix, _ in candidates)
        raise BackendError(
            "weights-ambiguous",
            f"the checkpoint has tensors below {names}; which of them is the text model can't be told. "
            "Nothing was loaded.",
            facts={prefix: count for (prefix, _), count in zip(candidates, counts, strict=True)},
        )
    return candidates[best]


def _refuse_missing(missing: Sequence[str], unused: Sequence[str], head: str) -> None:
    if not missing:
        return
    lines = []
    for name in missing[:_LISTED]:
        near = difflib.get_close_matches(name, unused, n=1, cutoff=0.9)
        lines.append(f"{name} (the file has {near[0]}: misspelt?)" if near else name)
    if head in missing:
        lines.append(f"without {head} the model has no head, unless tie_word_embeddings is true")
    raise BackendError(
        "weights-missing",
        f"the checkpoint lacks {len(missing)} tensors: {_shorten(lines, len(missing))}. Nothing was loaded.",
        facts={"missing": list(missing[:200]), "not_recognised": list(unused[:200])},
        remedy="Fetch the checkpoint again, or correct config.json if it describes another model.",
    )


def _stored_as(checkpoint: Checkpoint, name: str) -> PlannedTensor:
    quantised = checkpoint.quant_metadata.tensors.get(name)
    if quantised is not None:
        return PlannedTensor(name, _QUANTISED[quantised.format], quantised.shape)
    entry = checkpoint[name]
    if entry.dtype not in _FORMATS:
        hint = ", unless quant-metadata.json says what its blocks are" if entry.dtype == "U8" else ""
        raise BackendError(
            "weights-format",
            f"{name} is stored as {entry.dtype}, which is not read{hint}. Nothing was loaded.",
            facts={"tensor": name, "found": entry.dtype, "supported": sorted(_FORMATS)},
            remedy="Convert the checkpoint to F32, F16 or BF16, or import its GGUF file.",
        )
    return PlannedTensor(name, _FORMATS[entry.dtype], entry.shape)


def _refuse_wrong_shapes(
    config: ModelConfig,
    planned: Mapping[str, PlannedTensor],
    shapes: Mapping[str, tuple[int, ...]],
    sources: Mapping[str, str],
) -> None:
    wrong = []
    is_head_dim_wrong = False
    for name, tensor in planned.items():
        if tensor.shape != shapes[name]:
            hint = ""
            if config.is_head_dim_derived and "self_attn" in sources[name]:
                hint, is_head_dim_wrong = f" (head_dim={config.head_dim} derived)", True
            wrong.append(f"{name} is {_spell(tensor.shape)}; config implies {_spell(shapes[name])}{hint}")
    if wrong:
        advice = "; set head_dim" if is_head_dim_wrong else ""
        raise BackendError(
            "weights-shape",
            f"{_shorten(wrong, len(wrong))}{advice}. Nothing was loaded.",
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
        notes.append(f"{len(within)} tensors are not used: {_shorten(within, len(within))}")
    if beside:
        notes.append(
            f"{len(beside)} tensors outside {prefix!r} were not read: {_shorten(beside, len(beside))}"
        )
    return notes


def _shorten(names: Sequence[str], total: int) -> str:
    more = f" and {total - _LISTED} more" if total > _LISTED else ""
    return "; ".join(names[:_LISTED]) + more


def _spell(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
