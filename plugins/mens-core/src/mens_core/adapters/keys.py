"""The digest of an adapter, and the names of its tensors.

The digest is defined in docs/numerics.md: it is over the tensors, not over a file that holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vox_plugin_api.adapter_keys import parameter_key

__all__ = ["adapter_digest", "parameter_key"]


def adapter_digest(tensors: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Return the SHA-256 over the tensors in bytewise order of their keys.

    Each one is its key, a line end, its shape ("8 640"), a line end, and its little-endian
    float32 values, row by row.
    """
    digest = hashlib.sha256()
    for key, values in sorted(tensors.items(), key=lambda item: item[0].encode()):
        digest.update(f"{key}\n{' '.join(map(str, values.shape))}\n".encode())
        digest.update(np.ascontiguousarray(values, "<f4").reshape(-1).data)
    return digest.hexdigest()
