"""Translate a GGUF file's names and metadata into those of a Hugging Face checkpoint. Pure.

Shapes need no translation: `gguf_header` already gives them row-major. Gemma's norm weights
are stored as the multiplier itself, where Hugging Face stores it less 1; they are kept, and
`norms_include_one` says so.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.gguf_header import GgufFile, GgufTensor

__all__ = ["CONFIG_KEYS", "FAMILIES", "Family", "config_json", "family_of", "gguf_name", "hugging_face_names"]


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture is written in GGUF and in Hugging Face."""

    architecture: str
    """`general.architecture`, and the prefix of its keys."""
    model_type: str
    hugging_face_class: str
    layer_tensors: Mapping[str, str]
    """The name within `blk.N.` to the name within `model.layers.N.`"""
    norms_include_one: bool


_SHARED_LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gemma3": Family(
            architecture="gemma3",
            model_type="gemma3_text",
            hugging_face_class="Gemma3ForCausalLM",
            layer_tensors=MappingProxyType(
                {
                    **_SHARED_LAYER_TENSORS,
                    "post_attention_norm": "post_attention_layernorm",
                    "ffn_norm": "pre_feedforward_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm",
                }
            ),
            norms_include_one=True,
        ),
        "qwen3": Family(
            architecture="qwen3",
            model_type="qwen3",
            hugging_face_class="Qwen3ForCausalLM",
            layer_tensors=MappingProxyType({**_SHARED_LAYER_TENSORS, "ffn_norm": "post_attention_layernorm"}),
            norms_include_one=False,
        ),
    }
)

_MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_HEAD = "output"
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)\.weight")
_HUGGING_FACE_LAYER_TENSOR = re.compile(r"model\.layers\.([0-9]+)\.(.+)\.weight")

CONFIG_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "vocab_size": "tokenizer.ggml.tokens",
        "hidden_size": "{}.embedding_length",
        "intermediate_size": "{}.feed_forward_length",
        "num_hidden_layers": "{}.block_count",
        "num_attention_heads": "{}.attention.head_count",
        "num_key_value_heads": "{}.attention.head_count_kv",
        "head_dim": "{}.attention.key_length",
        "rms_norm_eps": "{}.attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "{}.context_length",
        "rope_theta": "{}.rope.freq_base",
        "rope_scaling": "{}.rope.scaling.type",
        "factor": "{}.rope.scaling.factor",
        "original_max_position_embeddings": "{}.rope.scaling.original_context_length",
        "rope_local_base_freq": "{}.rope.freq_base_swa",
        "attn_logit_softcapping": "{}.attn_logit_softcapping",
        "final_logit_softcapping": "{}.final_logit_softcapping",
        "sliding_window": "{}.attention.sliding_window",
        "sliding_window_pattern": "{}.attention.sliding_window_pattern",
    }
)
"""Which key of the file, {} being its architecture, a key of config.json is made from."""


def family_of(file: GgufFile) -> Family:
    """Return the family of `file`.

    Raises:
        ModelError: it is of an architecture that isn't imported.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ModelError(
            "gguf-architecture",
            f"{file.path} has general.architecture {architecture!r:.60}, which this host cannot run; "
            "nothing was imported",
            facts=[("file", str(file.path)), ("supported", sorted(FAMILIES))],
            remedy="Take a model of a family that is served: gemma3 or qwen3.",
        )
    return FAMILIES[architecture]


def hugging_face_names(file: GgufFile, family: Family) -> dict[str, GgufTensor]:
    """Return the tensors of `file` under their Hugging Face names.

    Raises:
        ModelError: one has no counterpart there.
    """
    named: dict[str, GgufTensor] = {}
    strangers: list[str] = []
    for tensor in file.tensors:
        name = _hugging_face_name(tensor.name, family)
        if name is None:
            strangers.append(tensor.name)
        else:
            named[name] = tensor
    if strangers:
        raise ModelError(
            "gguf-tensor-unknown",
            f"{file.path}: {family.architecture} has no place for {', '.join(strangers[:5])}; "
            "nothing was imported",
            facts=[("file", str(file.path)), ("tensors", strangers[:100])],
            remedy="Take a file of the model alone: others hold adapters, projectors or several models.",
        )
    return named


def _hugging_face_name(name: str, family: Family) -> str | None:
    if name == f"{_HEAD}.weight":
        return "lm_head.weight"
    for ours, theirs in _MODEL_TENSORS.items():
        if name == f"{ours}.weight":
            return f"{theirs}.weight"
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in family.layer_tensors:
        return None
    return f"model.layers.{match[1]}.{family.layer_tensors[match[2]]}.weight"


def gguf_name(name: str, family: Family) -> str:
    """Return what GGUF calls the tensor that Hugging Face calls `name`; one it has no word for stays."""
    whole = {"lm_head.weight": f"{_HEAD}.weight"}
    whole |= {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in _MODEL_TENSORS.items()}
    if name in whole:
        return whole[name]
    match = _HUGGING_FACE_LAYER_TENSOR.fullmatch(name)
    ours = {theirs: ours for ours, theirs in family.layer_tensors.items()}
    if match is None or match[2] not in ours:
        return name
    return f"blk.{match[1]}.{ours[match[2]]}.weight"


def config_json(file: GgufFile, family: Family, names: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the config.json that this model has as a Hugging Face checkpoint.

    Raises:
        ModelError: a key is missing or of the wrong type.
    """
    keys = _Keys(file, family.architecture)
    hidden = keys.count("embedding_length")
    layers = keys.count("block_count")
    heads = keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", default=hidden // heads)
    if keys.count("attention.value_length", default=head_dim) != head_dim:
        raise keys.error("attention.value_length", f"differs from the key length {head_dim}")
    vocabulary = file.metadata.get("tokenizer.ggml.tokens", ())
    embedding = names.get("model.embed_tokens.weight")
    config: dict[str, Any] = {
        "architectures": [family.hugging_face_class],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0] if embedding is not None else len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(keys.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": keys.count("context_length"),
        "rope_theta": _shortest(keys.number("rope.freq_base", default=10000.0)),
        "rope_scaling": _rope_scaling(keys),
        "attention_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in names,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return config | (_gemma3(keys, config) if family.model_type == "gemma3_text" else {"hidden_act": "silu"})


def _gemma3(keys: _Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    # The 27B model, known by its 62 layers, scales by the width per head; all others by head_dim.
    per_head = config["hidden_size"] // config["num_attention_heads"]
    scalar = per_head if config["num_hidden_layers"] == 62 else config["head_dim"]
    constants = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "rope_local_base_freq": _shortest(keys.number("rope.freq_base_swa", default=10000.0)),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=0.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=0.0) or None,
    }
    if not keys.has("attention.sliding_window"):
        # llama.cpp then lets every layer see everything.
        every_layer = ["full_attention"] * config["num_hidden_layers"]
        return constants | {"sliding_window": None, "layer_types": every_layer}
    return constants | {
        "sliding_window": keys.count("attention.sliding_window"),
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", default=6),
    }


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.value("rope.scaling.type", default="none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", f"is {kind!r:.40}; known are none, linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
    return scaling


def _shortest(value: float) -> float:
    """Return the shortest decimal that is this float32: 1e-06, where the file holds 9.99999997e-07."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


class _Keys:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def error(self, key: str, problem: str) -> ModelError:
        return ModelError(
            "gguf-metadata",
            f"{self.file.path}: {self.architecture}.{key} {problem}; nothing was imported",
            facts=[("file", str(self.file.path)), ("key", f"{self.architecture}.{key}")],
            remedy="Take the file from another converter, or the model as a Hugging Face folder.",
        )

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def value(self, key: str, *, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def count(self, key: str, *, default: int | None = None) -> int:
        value = self.value(key, default=default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, f"is {value!r:.60}; wanted a whole number from 1 up")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self.value(key, default=default)
        if type(value) not in (int, float) or not abs(value) < 1e30:  # NaN fails the comparison too
            raise self.error(key, f"is {value!r:.60}; wanted a number")
        return float(value)
