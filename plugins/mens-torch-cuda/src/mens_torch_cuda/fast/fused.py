"""The kernels of kernels/fused.cu on torch tensors; elementwise.py says what each computes.

They are there once `use` was called for a GPU. A call takes them where shapes and layout are theirs: rows of
whole 16 bytes, heads of 8, 16, 32, 64, 128 or 256 numbers.
"""

from __future__ import annotations

import ctypes
import os
from importlib import resources
from typing import Any

import torch

from mens_torch_cuda.compiler import Nvrtc, cache_folder, compile_kernels
from vox_plugin_api.backend import BackendError

__all__ = [
    "gate",
    "gate_backward",
    "heads",
    "heads_backward",
    "is_used",
    "loss",
    "norm",
    "norm_backward",
    "use",
]

_OPTIONS = ("--std=c++17", "--use_fast_math")
_MOST_COLUMNS = 8192
_THREADS = 256
_HEAD_WIDTHS = (8, 16, 32, 64, 128, 256)

_MOST_SHARING = 8
_GROUPS_AT_ONCE = 528
"""Blocks of a launch that keep a large GPU busy."""
_KERNELS = (
    "fast_norm",
    "fast_norm_backward",
    "fast_heads",
    "fast_heads_backward",
    "fast_append",
    "fast_decode_1",
    "fast_decode_2",
    "fast_decode_4",
    "fast_decode_8",
    "fast_decode_sum",
    "fast_gate",
    "fast_gate_backward",
    "fast_loss",
    "fast_row_product",
)

_functions: dict[str, Any] = {}


def use(capability: tuple[int, int]) -> None:
    """Compile the kernels for this GPU, or find them compiled, and load them.

    Raises:
        BackendError: `kernels-not-built`, `kernels-not-loaded`.
    """
    from cuda.bindings import driver

    source = resources.files("mens_torch_cuda").joinpath("fast/kernels/fused.cu").read_text("utf-8")
    kernels = compile_kernels(source, _OPTIONS, capability, Nvrtc(), cache_folder(os.environ), is_exact=False)
    torch.zeros(1, device="cuda")  # torch's context is the one that they are loaded into
    code, module = driver.cuModuleLoadData(kernels.cubin)
    if int(code) != 0:
        raise BackendError(
            "kernels-not-loaded",
            f"the NVIDIA driver refused fast mode's kernels ({code}); nothing was loaded",
            facts={"error": str(code)},
            remedy="Update the NVIDIA driver, or use canonical numerics (--numerics canonical).",
        )
    for name in _KERNELS:
        code, function = driver.cuModuleGetFunction(module, name.encode())
        if int(code) != 0:
            raise AssertionError(f"{name} is not in the module: {code}")
        _functions[name] = function
    _functions["module"] = module  # as long as its functions


def is_used(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are there and can read these tensors, whose rows are as wide as the first's."""
    width = tensors[0].shape[-1]
    return bool(_functions) and tensors[0].is_cuda and width % 8 == 0 and width <= _MOST_COLUMNS


def _launch(name: str, blocks: int, threads: int, *arguments: Any) -> None:
    """Arguments are tensors, None for a missing one, ints of 32 bits, `_Long`s and floats."""
    from cuda.bindings import driver

    values = [_as_c(argument) for argument in arguments]
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    stream = torch.cuda.current_stream().cuda_stream
    (code,) = driver.cuLaunchKernel(
        _functions[name], blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(places), 0
    )
    if int(code) != 0:
        raise BackendError(
            "cuda-failed",
            f"the NVIDIA driver reported {code} at {name}; the step was not done",
            facts={"error": str(code), "kernel": name},
            remedy="Restart the worker; if it happens again, look at the driver's log (dmesg, Xid).",
        )


class _Long(int):
    """A number of 64 bits."""


def _as_c(value: Any) -> Any:
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int64(value) if isinstance(value, _Long) else ctypes.c_int32(value)


def _row_threads(width: int) -> int:
    """Threads of a block that holds a row: eight numbers each, up to four times."""
    pieces = -(-width // 8)
    return min(_THREADS, max(32, -(-pieces // 32) * 32))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See elementwise.norm; x [N, D]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    rows, width = x.shape
    _launch("fast_norm", rows, _row_threads(width), x, None, weight, None, y, width, eps)
    return y


def add_norm(
    x: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + addend, and its norm; both [N, D]."""
    x, addend = x.contiguous(), addend.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    _launch("fast_norm", rows, _row_threads(width), x, addend, weight, total, y, width, eps)
    return total, y


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """See elementwise.norm_backward; all [N, D]."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    rows, width = x.shape
    of_residual = None if residual is None else residual.contiguous()
    _launch("fast_norm_backward", rows, _row_threads(width), dy, x, weight, of_residual, dx, width, eps)
    return dx


def has_heads(x: torch.Tensor) -> bool:
    """Whether x [N, heads, C] is a slice of rows whose heads lie side by side."""
    width = x.shape[2]
    return (
        bool(_functions)
        and x.is_cuda
        and width in _HEAD_WIDTHS
        and x.stride(2) == 1
        and (x.shape[1] == 1 or x.stride(1) == width)
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
    )


def heads(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Heads [N, heads, C] normed and rotated; angles [positions, C / 2]."""
    rows, many, width = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = -(-rows * many * width // (8 * _THREADS))
    _launch(
        "fast_heads", blocks, _THREADS, x, _Long(x.stride(0)), weight, cosines, sines, positions, y,
        rows, many, width, eps,
    )  # fmt: skip
    return y


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
    """The gradient of `heads`, into dx, which lies as x does."""
    if dy.stride(2) != 1 or dy.stride(0) % 4 or dy.stride(1) % 4 or dy.data_ptr() % 8:
        dy = dy.contiguous()
    rows, many, width = x.shape
    blocks = -(-rows * many * width // (8 * _THREADS))
    _launch(
        "fast_heads_backward", blocks, _THREADS, dy, _Long(dy.stride(0)), _Long(dy.stride(1)), x,
        _Long(x.stride(0)), weight, cosines, sines, positions, dx, _Long(dx.stride(0)), rows, many, width,
        eps,
    )  # fmt: skip


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """See elementwise.append."""
    rows, groups, width = k.shape
    pieces = rows * groups * width // 4
    _launch(
        "fast_append", -(-pieces // _THREADS), _THREADS, k, _Long(k.stride(0)), v, _Long(v.stride(0)), keys,
        values, blocks, offsets, _Long(pieces), groups, width,
    )  # fmt: skip


def has_decode(q: torch.Tensor, each: int, width: int) -> bool:
    """Whether the kernel takes heads of this width, so many to a key's head."""
    return bool(_functions) and q.is_cuda and width in (64, 128, 256) and each <= _MOST_SHARING


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    *,
    groups: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """See attention.decode_attention: parts of each sequence's blocks side by side, then their sum."""
    q = q.contiguous()
    sequences, across = tables.shape
    width = keys.shape[3]
    heads = q.shape[1] // width
    each = heads // groups
    sharing = next(size for size in (1, 2, 4, 8) if size >= each)
    parts = max(1, min(across, -(-_GROUPS_AT_ONCE // (sequences * groups))))
    room = torch.empty((sequences, heads, parts, width + 2), device=q.device)
    out = torch.empty_like(q)
    _launch(
        f"fast_decode_{sharing}", sequences * groups * parts, 128, q, keys, values, tables, positions, room,
        groups, each, width, across, parts, window or 0, float(scale), softcap or 0.0,
    )  # fmt: skip
    _launch("fast_decode_sum", sequences * heads, width, room, out, width, parts)
    return out


def has_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether this is a product of one row that nobody differentiates."""
    return (
        bool(_functions)
        and x.is_cuda
        and x.shape[0] == 1
        and x.shape[1] % 8 == 0
        and weight.is_contiguous()
        and x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    )


def row_product(x: torch.Tensor, weight: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """x W^T for x [1, columns]: [1, rows], in float32 where `wide`."""
    x = x.contiguous()
    rows, columns = weight.shape
    y = torch.empty((1, rows), dtype=torch.float32 if wide else x.dtype, device=x.device)
    half, whole = (None, y) if wide else (y, None)
    _launch("fast_row_product", -(-rows * 32 // _THREADS), _THREADS, x, weight, half, whole, rows, columns)
    return y


def gate(gate_up: torch.Tensor, *, is_silu: bool) -> torch.Tensor:
    """gate_up [N, 2 I], gate and up side by side, to [N, I]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    pieces = rows * width // 8
    _launch("fast_gate", -(-pieces // _THREADS), _THREADS, gate_up, y, _Long(pieces), width, int(is_silu))
    return y


def gate_backward(dy: torch.Tensor, gate_up: torch.Tensor, *, is_silu: bool) -> torch.Tensor:
    """The gradient of `gate`: [N, I] to [N, 2 I]."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    rows, width = dy.shape
    dx = torch.empty_like(gate_up)
    pieces = rows * width // 8
    _launch(
        "fast_gate_backward", -(-pieces // _THREADS), _THREADS, dy, gate_up, dx, _Long(pieces), width,
        int(is_silu),
    )  # fmt: skip
    return dx


def loss(
    logits: torch.Tensor, targets: torch.Tensor, *, backward: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Losses [L] of float32 logits [L, V], and softmax minus one at the target in bfloat16."""
    rows, width = logits.shape
    losses = torch.empty(rows, device=logits.device)
    gradient = torch.empty(logits.shape, dtype=torch.bfloat16, device=logits.device) if backward else None
    _launch("fast_loss", rows, 1024, logits, targets, losses, gradient, width)
    return losses, gradient
