"""Hugging Face `transformers` models made truly float64.

`model.double()` is not enough: their RMSNorm, rotary embedding and softmax go through float32.
Those three are replaced here by the same formulas in float64; everything else is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    offset = 1.0 if type(module).__name__.startswith("Gemma3") else 0.0
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (module.weight + offset)


def _float64_frequencies(frequencies: torch.Tensor, theta: float) -> torch.Tensor:
    """Their float32 frequencies, recomputed in float64 where they are plain or linearly scaled."""
    count = len(frequencies)
    plain = theta ** -(torch.arange(count, dtype=torch.float64) / count)
    ratio = float(frequencies[0])  # 1 / factor; the first plain frequency is 1
    exact = plain * (1 / round(1 / ratio, 6))
    assert torch.allclose(exact.float(), frequencies, rtol=1e-6), "neither plain nor linear"
    return exact


def _rotary(module: Any, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    parameters = module.config.rope_parameters
    theta = (parameters if layer_type is None else parameters[layer_type])["rope_theta"]
    frequencies = _float64_frequencies(getattr(module, name).float(), theta)
    angles = position_ids[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


@contextmanager
def float64_parts(model: Any) -> Iterator[None]:
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim)
    kinds = {type(m) for m in model.modules() if type(m).__name__.endswith(("RMSNorm", "RotaryEmbedding"))}
    before = {kind: kind.forward for kind in kinds}
    for kind in kinds:
        kind.forward = _norm if kind.__name__.endswith("RMSNorm") else _rotary
    try:
        yield
    finally:
        torch.nn.functional.softmax = softmax
        for kind, forward in before.items():
            kind.forward = forward


def float64_logits(model: Any, token_ids: list[int]) -> np.ndarray:
    """Logits of every position by a `transformers` causal model with eager attention."""
    model = model.double().eval()
    with torch.no_grad(), float64_parts(model):
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
