"""Compare the rotary frequencies that a checkpoint carries with those its config implies.

They are never used: a stored table may be rounded, stale or of another scaling, and the
synthesised one is exact. A difference is worth a note, since one of the two is wrong.
"""

from __future__ import annotations

import re

import numpy as np

from mens_core.rotary import frequencies
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families.model_config import AttentionKind, ModelConfig

__all__ = ["compare_inv_freq"]

_RELATIVE_TOLERANCE = {"F32": 1e-5, "F16": 1e-2, "BF16": 1e-2}
"""What rounding in storage explains. float16 is coarse below 2^-14, where it is subnormal."""
_SMALLEST = {"F32": 0.0, "F16": 2.0**-14, "BF16": 0.0}
_LAYER = re.compile(r"layers\.(\d+)\.")


def compare_inv_freq(config: ModelConfig, checkpoint: Checkpoint) -> list[str]:
    """Return one note that says how the stored frequencies compare; none stored: no note."""
    names = sorted(name for name in checkpoint if name.endswith("inv_freq"))
    different = [problem for name in names if (problem := _difference(config, checkpoint, name))]
    if different:
        return [
            f"stored rotary frequencies differ from the config's, which are used: {'; '.join(different[:5])}"
        ]
    if names:
        return [f"{len(names)} stored inv_freq agree with the config and are not used"]
    return []


def _difference(config: ModelConfig, checkpoint: Checkpoint, name: str) -> str | None:
    entry = checkpoint[name]
    # turns * 2^128 to radians; float64 is plenty for a comparison.
    ours = np.array([f * 2.0**-128 for f in frequencies(config.ropes[_kind(config, name)])]) * (2 * np.pi)
    if entry.dtype not in _RELATIVE_TOLERANCE or entry.shape != ours.shape:
        return f"{name} is {entry.dtype} {list(entry.shape)}, expected {len(ours)} floats"
    stored = _as_float64(checkpoint.data(name), entry.dtype)
    with np.errstate(invalid="ignore"):
        error = np.abs(stored - ours) / np.maximum(ours, _SMALLEST[entry.dtype])
    if np.all(error <= _RELATIVE_TOLERANCE[entry.dtype]):
        return None
    worst = int(np.argmax(error))  # a NaN counts as the largest
    return f"{name}[{worst}] is {stored[worst]:.6g}, the config's {ours[worst]:.6g}"


def _kind(config: ModelConfig, name: str) -> AttentionKind:
    if "local" in name or "sliding" in name:
        return "sliding"
    layer = _LAYER.search(name)
    if layer and int(layer[1]) < config.layers:
        return config.attention_kinds[int(layer[1])]
    return "full"


def _as_float64(data: memoryview, dtype: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(data, np.float32 if dtype == "F32" else np.float16).astype(np.float64)
