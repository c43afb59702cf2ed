"""Dropout by a generator of its own for each update: the same values when a layer runs a second time."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["dropped"]


def dropped(x: torch.Tensor, rate: float, key: tuple[int, ...]) -> torch.Tensor:
    """x with each element 0 by chance `rate`, else over 1 - rate; chance follows from `key` and x's shape."""
    words = hashlib.sha256(",".join(map(str, key)).encode()).digest()
    generator = torch.Generator(device=x.device).manual_seed(int.from_bytes(words[:8], "little") >> 1)
    stays = torch.rand(x.shape, generator=generator, device=x.device) >= rate
    return torch.where(stays, x / (1 - rate), torch.zeros((), dtype=x.dtype, device=x.device))
