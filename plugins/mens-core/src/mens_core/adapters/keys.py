"""The names of an adapter's tensors, and its digest.

Names are those that PEFT gives them, so that its readers find every tensor. The digest is defined
in docs/numerics.md: it is over the tensors, not over a file that holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

__all__ = ["adapter_digest", "parameter_key"]

_PREFIX = "base_model.model."
_DECODER = "model."
_HEAD = "lm_head."


def parameter_key(parameter: str) -> str:
    """Return the key of a parameter ("layers.0.self_attn.q_proj.lora_A")."""
    decoder = "" if parameter.startswith(_HEAD) else _DECODER
    return f"{_PREFIX}{decoder}{parameter}.weight"


def adapter_digest(tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return the SHA-256 over the tensors in bytewise order of their keys.

    Each one is its key, a line end, its shape ("8 640"), a line end, and its little-endian
    float32 values, row by row.
    """
    digest = hashlib.sha256()
    for key, values in sorted(tensors.items(), key=lambda item: item[0].encode()):
        digest.update(f"{key}\n{' '.join(map(str, values.shape))}\n".encode())
        digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()
