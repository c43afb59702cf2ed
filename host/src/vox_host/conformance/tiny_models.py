"""The suite's models: whole architectures in a few thousand weights, the same bytes on every machine.

Weights are Philox words turned into floats by exact steps, so nothing is shipped and nothing is
rounded. They are large enough that each part of a model moves its logits.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["TINY_MODELS", "TinyModel", "matrix_values", "philox", "shapes_of", "write_model"]

Format = Literal["F32", "BF16", "q8_0", "q4_k"]

_SEED = 0x766F785F74696E79
_TIED = "embed_tokens.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class TinyModel:
    """A configuration, and how its matrices are stored."""

    name: str
    config: Mapping[str, Any]
    formats: Mapping[str, Format]
    """Format by the last part of a matrix's name; others are F32."""

    @property
    def vocab_size(self) -> int:
        size: int = self.config["vocab_size"]
        return size


_SHARED: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 193,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "float32",
}
_QWEN3: Mapping[str, Any] = {
    **_SHARED,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_GEMMA3: Mapping[str, Any] = {
    **_SHARED,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 7,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window": 20,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 24,
    "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}

TINY_MODELS: tuple[TinyModel, ...] = (
    TinyModel(name="qwen3", config=MappingProxyType(dict(_QWEN3)), formats={}),
    TinyModel(
        name="gemma3",
        config=MappingProxyType(dict(_GEMMA3)),
        formats={"gate_proj": "BF16", "up_proj": "BF16", "down_proj": "BF16"},
    ),
    TinyModel(
        name="qwen3-quantised",
        config=MappingProxyType(
            {
                **_QWEN3,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            }
        ),
        formats={
            **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), "q8_0"),
            "down_proj": "q4_k",
        },
    ),
)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    quantised: tuple[Format, tuple[int, int]] | None = None


def write_model(model: TinyModel, folder: Path) -> str:
    """Write `model` into the new folder `folder` as a model folder; return its digest."""
    folder.mkdir(parents=True)
    tensors = list(_tensors(model))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        offsets = [at, at + len(tensor.data)]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    weights = len(text).to_bytes(8, "little") + text + b"".join(tensor.data for tensor in tensors)
    files = {
        "config.json": json.dumps(dict(model.config), indent=1, sort_keys=True).encode(),
        "model.safetensors": weights,
    }
    quantised = {t.name: t.quantised for t in tensors if t.quantised is not None}
    if quantised:
        entries = {name: {"format": f, "shape": list(shape)} for name, (f, shape) in quantised.items()}
        metadata = {"version": 1, "tensors": entries, "norms_include_one": False}
        files["quant-metadata.json"] = json.dumps(metadata, indent=1, sort_keys=True).encode()
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        (folder / name).write_bytes(content)
        digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def _tensors(model: TinyModel) -> Iterator[_Tensor]:
    for number, (name, shape) in enumerate(shapes_of(model.config)):
        stored = name if name == "lm_head.weight" else f"model.{name}"
        if len(shape) == 1:
            yield _Tensor(stored, "F32", shape, _norm(model, number, shape[0]))
            continue
        rows, columns = shape
        part = name.split(".")[-2]
        weight_format = model.formats.get(part, "F32")
        if weight_format in ("q8_0", "q4_k"):
            data = _blocks(weight_format, number, rows * columns)
            yield _Tensor(stored, "U8", (len(data),), data, (weight_format, (rows, columns)))
        else:
            # About 1.4 / sqrt(columns); the embedding small, so that the first norms feel their eps.
            exponent = -6 if name == _TIED and not model.config["tie_word_embeddings"] else -1
            exponent = -2 if name == _TIED and model.config["tie_word_embeddings"] else exponent
            yield _Tensor(
                stored, weight_format, shape, _floats(weight_format, number, rows * columns, exponent)
            )


def shapes_of(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names as both families have them, Gemma 3's four norms included."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    is_gemma = config["model_type"] == "gemma3_text"
    yield _TIED, (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        yield f"{at}.input_layernorm.weight", (width,)
        for part, shape in (
            ("q_proj", (queries, width)),
            ("k_proj", (keys, width)),
            ("v_proj", (keys, width)),
            ("o_proj", (width, queries)),
        ):
            yield f"{at}.self_attn.{part}.weight", shape
        yield f"{at}.self_attn.q_norm.weight", (head,)
        yield f"{at}.self_attn.k_norm.weight", (head,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
        if is_gemma:
            yield f"{at}.pre_feedforward_layernorm.weight", (width,)
            yield f"{at}.post_feedforward_layernorm.weight", (width,)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
    yield "norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def _norm(model: TinyModel, number: int, count: int) -> bytes:
    # 22 random bits in [0.5, 1.5), less the 1 that Gemma's checkpoints leave out: both exact.
    less = 1.0 if model.config["model_type"] == "gemma3_text" else 0.0
    values = [0.5 + (word >> 10) * 2.0**-22 - less for word in _words(number, count)]
    return struct.pack(f"<{count}f", *values)


def matrix_values(number: int, count: int) -> bytes:
    """Return the float32 numbers in (-1/4, 1/4) that belong to a number."""
    return _floats("F32", number, count, -2)


def _floats(weight_format: Format, number: int, count: int, exponent: int) -> bytes:
    """Numbers in (-2^exponent, 2^exponent) with significands that the format holds exactly."""
    bits = 24 if weight_format == "F32" else 8
    half = 1 << (bits - 1)
    values = [((word >> (32 - bits)) - half) * 2.0 ** (exponent - bits + 1) for word in _words(number, count)]
    data = struct.pack(f"<{count}f", *values)
    if weight_format == "F32":
        return data
    return b"".join(data[at + 2 : at + 4] for at in range(0, len(data), 4))


def _blocks(weight_format: Format, number: int, count: int) -> bytes:
    """Random blocks of GGML whose float16 scales are small and positive."""
    size, length, scales, high = (32, 34, (0,), 0x08) if weight_format == "q8_0" else (256, 144, (0, 2), 0x04)
    total = count // size * length
    data = bytearray(struct.pack(f"<{-(-total // 4)}I", *_words(number, -(-total // 4)))[:total])
    for at in range(0, total, length):
        for place in scales:
            # Exponent fixed, fraction random: about 2^-13 for q8_0 and 2^-14 for q4_k, as codes are large.
            data[at + place + 1] = high | (data[at + place + 1] & 0x03)
    return bytes(data)


def _words(number: int, count: int) -> list[int]:
    made: list[int] = []
    for block in range(-(-count // 4)):
        made += philox(_SEED, (block, number, 0, 0))
    return made[:count]


def philox(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return four 32-bit words of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
