"""What is said of a stored tensor whose bytes do not make its shape."""

from __future__ import annotations

from mens_core.ops import StoredTensor
from vox_plugin_api.backend import BackendError

__all__ = ["wrong_size"]


def wrong_size(stored: StoredTensor, expected: int) -> BackendError:
    """Return the error; `expected`: the bytes that the shape needs, 0 where no number of bytes would do."""
    return BackendError(
        "tensor-size",
        f"tensor {stored.name!r} does not have the bytes its shape needs; no model was loaded",
        facts={
            "tensor": stored.name,
            "format": stored.format,
            "shape": list(stored.shape),
            "expected_bytes": expected,
            "found_bytes": stored.data.nbytes,
        },
        remedy="import the model again from its source",
    )
