"""Float32 tensors as the bytes of a safetensors file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError

__all__ = ["read_tensors", "safetensors_bytes"]

Floats = npt.NDArray[np.float32]


def safetensors_bytes(tensors: Mapping[str, Floats]) -> bytes:
    """Return the one file that holds `tensors`: keys in bytewise order, values one after the other."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces = []
    at = 0
    for key, values in sorted(tensors.items(), key=lambda item: item[0].encode()):
        piece = np.ascontiguousarray(values, "<f4").tobytes()
        header[key] = {
            "dtype": "F32",
            "shape": list(values.shape),
            "data_offsets": [at, at + len(piece)],
        }
        at += len(piece)
        pieces.append(piece)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Readers map the file and want the data on a multiple of 8.
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *pieces])


def read_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Floats]:
    """Read float32 tensors of exactly these keys and shapes.

    Raises:
        BackendError: the file can't be read (its own code), or `adapter-tensors`: a key is
            missing, is in nobody's place, or has another shape or format. All of them are named.
    """
    try:
        checkpoint = Checkpoint.open(path)
        _check(path, checkpoint, shapes)
        tensors = {
            key: np.frombuffer(checkpoint.data(key), "<f4").astype(np.float32).reshape(shape)
            for key, shape in shapes.items()
        }
        checkpoint.close()
    except CheckpointError as error:
        raise BackendError(error.code, error.message, facts=error.facts, remedy=error.remedy) from error
    infinite = [key for key, values in tensors.items() if not np.isfinite(values).all()]
    if infinite:
        raise BackendError(
            "adapter-tensors",
            f"{path} holds infinities or NaN in {', '.join(infinite[:5])}; nothing was taken from it",
            facts={"file": str(path), "not_finite": infinite[:100]},
        )
    return tensors


def _check(path: Path, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(set(shapes) - set(checkpoint))
    orphans = sorted(set(checkpoint) - set(shapes))
    wrong = [
        f"{key} is {entry.dtype} {list(entry.shape)}, expected F32 {list(shapes[key])}"
        for key, entry in checkpoint.items()
        if key in shapes and (entry.dtype, entry.shape) != ("F32", shapes[key])
    ]
    if missing or orphans or wrong:
        parts = [
            *([f"it lacks {len(missing)} tensors ({_some(missing)})"] if missing else []),
            *([f"{len(orphans)} have no place in this model ({_some(orphans)})"] if orphans else []),
            *wrong[:5],
        ]
        raise BackendError(
            "adapter-tensors",
            f"{path} does not fit: {'; '.join(parts)}. Nothing was taken from it",
            facts={
                "file": str(path),
                "missing": missing[:100],
                "orphans": orphans[:100],
                "wrong": wrong[:100],
            },
            remedy="Load the base model and the adapter configuration that it was trained with.",
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
