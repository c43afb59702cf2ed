"""Quantised blocks to float32, by GGML's formulas, many blocks at once. Pure, on any device of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

__all__ = ["BLOCKS", "BlockFormat"]

Bytes = torch.Tensor
"""uint8 [blocks, bytes of a block]."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one block lies in a file."""

    weights: int
    nbytes: int
    widen: Callable[[Bytes], torch.Tensor]
    """[blocks, nbytes] to float32 [blocks, weights]."""


def _half(blocks: Bytes, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Bytes) -> torch.Tensor:
    """[.., n] bytes to [.., 2 n]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth_bits(blocks: Bytes, at: int) -> torch.Tensor:
    """The 32 bits of four bytes, the lowest first: [blocks, 32]."""
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    return (blocks[:, at : at + 4, None] >> shifts & 1).flatten(1)


def _q8_0(blocks: Bytes) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: Bytes) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q5_0(blocks: Bytes) -> torch.Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def _scales_and_mins(packed: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes of a K-quant to eight scales and eight minima of six bits."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], 1)
    mins = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], 1)
    return scales.float(), mins.float()


def _k_blocks(blocks: Bytes, codes: torch.Tensor) -> torch.Tensor:
    """d * scale * code - dmin * min, for codes [blocks, 8, 32]."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    d, dmin = _half(blocks, 0) * scales, _half(blocks, 2) * mins
    return (d[:, :, None] * codes.float() - dmin[:, :, None]).flatten(1)


def _q4_k(blocks: Bytes) -> torch.Tensor:
    return _k_blocks(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Bytes) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, device=blocks.device, dtype=torch.uint8)[:, None]
    return _k_blocks(blocks, low | (blocks[:, 16:48][:, None] >> shifts & 1) << 4)


def _q6_k(blocks: Bytes) -> torch.Tensor:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = torch.stack([low & 15, low >> 4], 2)  # [blocks, half, nibble, 2, 32]
    shifts = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3  # [blocks, half, 4, 32]
    codes = (low.reshape(-1, 2, 4, 32) | high << 4).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return ((_half(blocks, 208) * scales)[:, :, None] * codes.reshape(-1, 16, 16)).flatten(1)


BLOCKS: Mapping[str, BlockFormat] = {
    "q8_0": BlockFormat(32, 34, _q8_0),
    "q5_0": BlockFormat(32, 22, _q5_0),
    "q4_0": BlockFormat(32, 18, _q4_0),
    "q4_k": BlockFormat(256, 144, _q4_k),
    "q5_k": BlockFormat(256, 176, _q5_k),
    "q6_k": BlockFormat(256, 210, _q6_k),
}
