"""A model of any shape whose weights are drawn where they are used: nothing is written, nothing is sent.

The numbers are those of `shape_model.write_shape`: a pool drawn by Philox, read round and round by each
tensor. On a GPU the pool is sent once a tensor and repeated there; on a CPU lane the same bytes are made in
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.shape_model import QWEN3_06B, TensorBytes, drawn_tensors
from mens_core.grid_weights import GridMatrix
from mens_core.models.layers import Head, rotary_tables
from mens_core.models.linear import Linear
from mens_core.models.load import _LAYERS
from mens_core.models.model import Model
from mens_core.ops import Ops, StoredTensor
from vox_plugin_api.families import ModelConfig, parse_config

__all__ = ["QWEN3_8B", "drawn_model", "weight_bytes_of"]

QWEN3_8B: dict[str, Any] = {
    **QWEN3_06B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_BLOCK = 32


class _Drawn:
    """Stands in for `mens_core.weights.Weights`."""

    def __init__(self, tensors: dict[str, TensorBytes], ops: Ops, on_device: Any) -> None:
        self._tensors = tensors
        self._ops = ops
        self._on_device = on_device

    def matrix(self, name: str) -> Any:
        drawn = self._tensors[f"model.{name}.weight" if name != "lm_head" else "lm_head.weight"]
        if self._on_device is None:
            data = memoryview(drawn.whole())
            return self._ops.load_matrix(StoredTensor(name, drawn.format, drawn.shape, data))
        rows, columns = drawn.shape
        block = _BLOCK if drawn.format == "q8_0" else 0
        buffer = self._on_device(drawn.piece, drawn.nbytes)
        ops: Any = self._ops
        return ops.take_matrix(GridMatrix(drawn.format, rows, columns, block, buffer))

    def linear(self, name: str) -> Linear:
        drawn = self._tensors[f"model.{name}.weight" if name != "lm_head" else "lm_head.weight"]
        return Linear(name, self.matrix(name), drawn.shape)

    def norm(self, name: str) -> Any:
        drawn = self._tensors[f"model.{name}.weight"]
        return self._ops.load_vector(StoredTensor(name, drawn.format, drawn.shape, memoryview(drawn.whole())))


def drawn_model(
    ops: Ops, shape: Mapping[str, Any], weight_format: str, *, layers: int, on_device: Any = None
) -> Model:
    """Return a model over `ops`; `on_device(piece, nbytes)` repeats bytes in the device's memory."""
    config = parse_config({**shape, "num_hidden_layers": layers})
    weights: Any = _Drawn(dict(drawn_tensors(config, weight_format)), ops, on_device)
    tables = rotary_tables(config, ops)
    family = _LAYERS[config.family]
    made = [family.load(config, weights, i, tables[kind]) for i, kind in enumerate(config.attention_kinds)]
    return Model(config, ops, Head.load(config, weights), tuple(made))


def weight_bytes_of(config: ModelConfig, weight_format: str) -> tuple[int, int]:
    """Bytes of all weights, and of those that a token reads: all but an embedding that is only that."""
    tensors = dict(drawn_tensors(config, weight_format))
    every = sum(drawn.nbytes for drawn in tensors.values())
    is_tied = "lm_head.weight" not in tensors
    return every, every - (0 if is_tied else tensors["model.embed_tokens.weight"].nbytes)


def repeated_on_gpu(piece: npt.NDArray[np.uint8], nbytes: int) -> Any:
    """`piece` round and round, as a buffer of `CudaDevice`."""
    import torch

    source = torch.from_numpy(piece).cuda()
    return source.repeat(-(-nbytes // len(piece)))[:nbytes]
