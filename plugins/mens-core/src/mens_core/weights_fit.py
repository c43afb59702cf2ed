"""Whether a model fits into the GPU's free memory, told before a weight is read."""

from __future__ import annotations

from pathlib import Path

from vox_plugin_api.backend import BackendError

__all__ = ["RESERVE_BYTES", "check_fit", "weight_bytes"]

RESERVE_BYTES = 256 << 20
"""Left for activations, kernels and torch itself."""


def weight_bytes(model_dir: Path) -> int:
    """Return the bytes of a model folder's weights; they lie on the GPU as they lie in the file."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def check_fit(weights: int, *, free: int, total: int, device: str, remedy: str) -> None:
    """Refuse weights that can't fit beside what others hold; the KV cache comes after them.

    Raises:
        BackendError: `insufficient-memory`.
    """
    if weights + RESERVE_BYTES > free:
        raise BackendError(
            "insufficient-memory",
            f"the weights need {weights} bytes and {RESERVE_BYTES} beside them, and {device} has {free} of "
            f"{total} bytes free; nothing was loaded",
            facts={
                "needed_bytes": weights + RESERVE_BYTES,
                "weight_bytes": weights,
                "free_bytes": free,
                "total_bytes": total,
                "device": device,
            },
            remedy=remedy,
        )
