"""The head and its loss in pieces: logits of a few rows at once, in float32, never of all."""

from __future__ import annotations

import torch

from mens_torch_cuda.fast import elementwise as ew
from mens_torch_cuda.fast.decoder import Decoder
from mens_torch_cuda.fast.ops import wide_product

__all__ = ["LOGIT_BYTES", "losses_and_gradient", "pieces"]

LOGIT_BYTES = 1 << 29
"""Logits of one piece, in float32."""


def pieces(rows: int, vocabulary: int) -> int:
    """Rows of one piece."""
    return max(1, min(rows, LOGIT_BYTES // (4 * vocabulary)))


def losses_and_gradient(
    decoder: Decoder, hidden: torch.Tensor, targets: torch.Tensor, *, backward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses [L] of hidden rows [L, D] and, where asked, the gradient of their sum [L, D]."""
    together = pieces(len(hidden), decoder.head.weight.shape[0])
    losses, gradients = [], []
    for x, target in zip(torch.split(hidden, together), torch.split(targets, together), strict=True):
        loss, gradient = _piece(decoder, x, target, backward=backward)
        losses.append(loss)
        gradients.append(gradient)
    found = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(losses), torch.cat(found) if backward else None


def logits_of(decoder: Decoder, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits before the softcap, in float32; what the head read, and u."""
    normed, update = ew.norm(x, decoder.final_norm, decoder.eps), decoder.head.update
    logits = wide_product(normed, decoder.head.weight)
    u = None
    if update is not None:
        u = decoder.head.reduced(normed)
        logits += u @ update.b.t()
    return logits, normed, u


def _piece(
    decoder: Decoder, x: torch.Tensor, targets: torch.Tensor, *, backward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits, normed, u = logits_of(decoder, x)
    bent = None
    if decoder.softcap is not None:
        bent = torch.tanh(logits / decoder.softcap)
        logits = decoder.softcap * bent
    losses, gradient = ew.loss(logits, targets, backward=backward)
    if gradient is None:
        return losses, None
    if bent is not None:
        gradient = (gradient * (1 - bent.square())).to(x.dtype)
    dnormed = decoder.head.backward(gradient, normed, u)
    if dnormed is None:
        raise AssertionError("the head's input has a gradient")
    return losses, ew.norm_backward(dnormed, x, decoder.final_norm, decoder.eps)
