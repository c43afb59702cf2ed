"""What lies between the products: norms, rotation, gates, loss. bfloat16 in and out, float32 within.

Each is written here by its definition, on any device of torch; where fused.py's kernels fit, they compute it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from mens_torch_cuda.fast import fused

__all__ = [
    "add_norm",
    "append",
    "gate",
    "gate_backward",
    "heads",
    "heads_backward",
    "loss",
    "norm",
    "norm_backward",
]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of rows [N, D]; `weight` is float32, and the result rounded once."""
    if fused.is_used(x):
        return fused.norm(x, weight, eps)
    return _norm(x, weight, eps)


def add_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend, and the norm of that."""
    if fused.is_used(x):
        return fused.add_norm(x, addend, weight, eps)
    total = x + addend
    return total, _norm(total, weight, eps)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of `norm` with respect to x, plus `residual` where there is one."""
    if fused.is_used(x):
        return fused.norm_backward(dy, x, weight, eps, residual)
    dx = _norm_backward(dy, x, weight, eps)
    return (dx if residual is None else residual + dx).to(x.dtype)


def heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Heads [N, heads, C], normed and rotated by their rows' angles, rounded once.

    Args:
        cosines: [positions reached, C / 2] in float32; sines likewise.
        positions: [N]
    """
    if fused.has_heads(x):
        return fused.heads(x, weight, eps, cosines, sines, positions)
    wide = _norm(x.float(), weight, eps)
    return _rotate(wide, cosines[positions], sines[positions]).to(x.dtype)


def heads_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
    dx: torch.Tensor,
) -> None:
    """Write the gradient of `heads` with respect to x into dx, which is laid out as x is."""
    if fused.has_heads(x):
        fused.heads_backward(dy, x, weight, eps, cosines, sines, positions, dx)
        return
    turned = _rotate(dy.float(), cosines[positions], -sines[positions])
    dx.copy_(_norm_backward(turned, x, weight, eps))


def gate(gate_up: torch.Tensor, *, is_silu: bool) -> torch.Tensor:
    """act(gate) * up, for rows [N, 2 I] that hold gate and up side by side; act is SiLU or tanh GELU."""
    if fused.is_used(gate_up[:, :8]) and gate_up.shape[1] % 16 == 0:
        return fused.gate(gate_up, is_silu=is_silu)
    first, up = gate_up.float().chunk(2, 1)
    return (_bent(first, is_silu) * up).to(gate_up.dtype)


def gate_backward(dy: torch.Tensor, gate_up: torch.Tensor, *, is_silu: bool) -> torch.Tensor:
    """Gradient of `gate` [N, I] with respect to gate_up: [N, 2 I]."""
    if fused.is_used(gate_up[:, :8]) and gate_up.shape[1] % 16 == 0:
        return fused.gate_backward(dy, gate_up, is_silu=is_silu)
    first, up = gate_up.float().chunk(2, 1)
    by = dy.float() * up
    if is_silu:
        share = torch.sigmoid(first)
        dgate = by * (share + first * share * (1 - share))
    else:
        dgate = torch.ops.aten.gelu_backward(by, first, approximate="tanh")
    return torch.cat([dgate, dy.float() * _bent(first, is_silu)], 1).to(gate_up.dtype)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Store k and v [N, G, C] at their blocks and offsets [N] of keys and values [blocks, G, 128, C]."""
    if fused.has_heads(k) and fused.has_heads(v):
        fused.append(k, v, keys, values, blocks, offsets)
        return
    keys[blocks, :, offsets] = k
    values[blocks, :, offsets] = v


def loss(
    logits: torch.Tensor, targets: torch.Tensor, *, backward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses [L] of float32 logits [L, V] and, where asked, their gradient in bfloat16."""
    if fused.is_used(logits[:, :8]) and logits.shape[1] % 4 == 0:
        return fused.loss(logits, targets, backward=backward)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    if not backward:
        return losses, None
    gradient = torch.softmax(logits, 1)
    gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
    return losses, gradient.to(torch.bfloat16)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def _norm_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    by = dy.float() * weight
    normed = wide * scale
    return scale * (by - normed * (by * normed).mean(-1, keepdim=True))


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """The halves of each head by its row's angles, in float32."""
    first, second = x.chunk(2, -1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


def _bent(x: torch.Tensor, is_silu: bool) -> torch.Tensor:
    return functional.silu(x) if is_silu else functional.gelu(x, approximate="tanh")
