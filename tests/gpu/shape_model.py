"""Writes a model of Qwen3-0.6B's shape whose weights any machine can draw again (Philox).

A pool of a million numbers is drawn once; each tensor reads it round and round from a place of its own. The
pool's length is odd and shares no factor with a row's, so that no two rows of a matrix are alike.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.philox import STREAM_VECTORS, philox_words
from vox_plugin_api.families import ModelConfig, expected_shapes, parse_config

__all__ = ["QWEN3_06B", "STORED_AS", "TensorBytes", "drawn_tensors", "write_shape"]

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
_POOL = 1_000_003
_BLOCK = 32
STORED_AS: Mapping[str, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "U8"}
"""The dtype of a format in a safetensors header."""


def write_shape(
    folder: Path,
    weight_format: str,
    *,
    layers: int = 28,
    seed: int = 6,
    shape: Mapping[str, Any] = QWEN3_06B,
) -> Path:
    """Write config and weights as "bf16", "f16" or "q8_0"; return the folder."""
    settings = {**shape, "num_hidden_layers": layers}
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    quantised: dict[str, Any] = {}
    for name, drawn in drawn_tensors(parse_config(settings), weight_format, seed):
        dims = list(drawn.shape) if drawn.format != "q8_0" else [drawn.nbytes]
        tensors[name] = (STORED_AS[drawn.format], dims, drawn.whole().tobytes())
        if drawn.format == "q8_0":
            quantised[name] = {"format": "q8_0", "shape": list(drawn.shape)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    if quantised:
        text = json.dumps({"version": 1, "tensors": quantised})
        (folder / "quant-metadata.json").write_text(text, "utf-8")
    _write_safetensors(folder / "model.safetensors", tensors)
    return folder


@dataclass(frozen=True, slots=True, eq=False)
class TensorBytes:
    """A tensor as a piece of bytes that is read round and round."""

    format: Any
    shape: tuple[int, ...]
    piece: npt.NDArray[np.uint8]
    nbytes: int

    def whole(self) -> npt.NDArray[np.uint8]:
        """All bytes."""
        return np.concatenate([self.piece] * -(-self.nbytes // len(self.piece)))[: self.nbytes]


def drawn_tensors(
    config: ModelConfig, weight_format: str, seed: int = 6, *, only: Container[str] | None = None
) -> Iterator[tuple[str, TensorBytes]]:
    """Every tensor of a model by its name in a checkpoint; `only` these, if it is given."""
    words = philox_words(seed, STREAM_VECTORS, 1, _POOL)
    pool = (words.astype(np.float64) / 2**31 - 1).astype(np.float32)
    shapes = expected_shapes(config)
    names = {name: "model." + name for name in shapes}
    if not config.tie_word_embeddings:
        shapes = {**shapes, "lm_head.weight": (config.vocab_size, config.hidden_size)}
        names["lm_head.weight"] = "lm_head.weight"
    for number, (name, shape) in enumerate(shapes.items()):
        dims = tuple(shape)
        if only is not None and names[name] not in only:
            continue
        if len(dims) == 1:
            vector = (1 + pool[: dims[0]] / 8).view(np.uint8)
            yield names[name], TensorBytes("f32", dims, vector, vector.nbytes)
            continue
        drawn = np.roll(pool, -7919 * number) * np.float32(1.7 * dims[1] ** -0.5)
        if weight_format == "q8_0":
            piece, nbytes = _as_q8_0(drawn).reshape(-1), dims[0] * dims[1] // _BLOCK * 34
        else:
            narrowed = _as_bf16(drawn) if weight_format == "bf16" else drawn.astype(np.float16)
            piece, nbytes = narrowed.view(np.uint8), 2 * dims[0] * dims[1]
        yield names[name], TensorBytes(weight_format, dims, piece, nbytes)


def _as_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _as_q8_0(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Blocks [blocks, 34]: a float16 scale and 32 codes, of the whole blocks in x."""
    rows = x[: len(x) // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    scale = (np.abs(rows).max(axis=1, keepdims=True) / 127).astype(np.float16)
    codes = np.clip(np.rint(rows / scale.astype(np.float32)), -127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), codes.view(np.uint8)], axis=1)


def _write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            file.write(data)
