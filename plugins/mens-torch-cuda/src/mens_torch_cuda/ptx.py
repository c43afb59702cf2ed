"""Reads a compiler's PTX for arithmetic that the rules do not allow (docs/numerics.md). Pure.

PTX is where a compiler's choices show: a product and a sum that the later stage may still fuse have no
rounding of their own (`mul.ftz.f32`), and every approximation has a name (`ex2.approx.ftz.f32`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["forbidden_instructions"]

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[A-Za-z0-9_:]+)*)\s")
_ENTRY = re.compile(r"\.entry\s+(\w+)")
_FLOAT = re.compile(r"\.(?:f16x2|f16|bf16x2|bf16|tf32|f32x2|f32|f64|e4m3|e5m2)\b")

_MOVES = re.compile(r"(?:ld|st|mov|selp)\.(?:[a-z_:]+\.)*(?:v[24]\.)?f32")
_ROUNDED = re.compile(r"(?:add|sub|mul|fma|div|sqrt|rcp)\.rn\.ftz\.f32")
_EXACT = re.compile(r"(?:min|max|neg|abs|setp\.[a-z]+)\.ftz\.f32")
_CONVERTED = re.compile(
    r"cvt\.(?:rn\.f32\.[su](?:8|16|32)|rn\.f32\.f16|f32\.f16|rzi\.(?:ftz\.)?[su](?:32|64)\.f32)"
)
_INTEGER_PRODUCT = re.compile(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.s32\.s8\.s8\.s32"
    r"|wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32\.s8\.s8"
)
"""Of the tensor cores: 32-bit sums of 8-bit products, exact in any order. With .satfinite it would not be."""
_WAITS = re.compile(r"wgmma\.(?:fence|commit_group|wait_group)\.sync\.aligned")
"""Around them: no arithmetic."""
_ALLOWED = (_MOVES, _ROUNDED, _EXACT, _CONVERTED)

_WITHOUT_FMA = (
    "vox_add",
    "vox_penalise",
    "vox_embed_",
    "vox_widen_",
    "vox_quantise_",
    "vox_kv_append",
    "vox_take_rows",
)
"""Kernels whose source has no fused operation: one in their code was put there by the compiler."""


def forbidden_instructions(ptx: str) -> Mapping[str, tuple[str, ...]]:
    """Return per kernel the instructions on floats that are not one correctly rounded, flushing operation.

    An empty mapping is a clean text. A text without any kernel is reported under the name "".
    """
    found: dict[str, dict[str, None]] = {}
    kernel, kernels = "", 0
    for line in ptx.splitlines():
        entry = _ENTRY.search(line)
        if entry is not None:
            kernel, kernels = entry[1], kernels + 1
            continue
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name = match[1]
        if _is_forbidden(name) or (name.startswith("fma.") and kernel.startswith(_WITHOUT_FMA)):
            found.setdefault(kernel, {})[name] = None
    if kernels == 0:
        return {"": ("no kernel",)}
    return {kernel: tuple(names) for kernel, names in found.items()}


def _is_forbidden(name: str) -> bool:
    if _INTEGER_PRODUCT.fullmatch(name) is not None or _WAITS.fullmatch(name) is not None:
        return False
    if ".approx" in name or ".full." in name or name.startswith(("mma.", "wgmma.", "wmma.")):
        return True
    if _FLOAT.search(name) is None:
        return False
    return not any(pattern.fullmatch(name) for pattern in _ALLOWED)
