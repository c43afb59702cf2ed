"""Float32 tensors as the bytes of a safetensors file, and back."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError

__all__ = ["float_rows", "read_tensors", "safetensors_bytes", "safetensors_pieces"]

Floats = npt.NDArray[np.float32]


def safetensors_bytes(tensors: Mapping[str, Floats]) -> bytes:
    """Return the one file that holds `tensors`: keys in bytewise order, values one after the other."""
    shapes = {key: values.shape for key, values in tensors.items()}
    return b"".join(safetensors_pieces(shapes, tensors.__getitem__))


def safetensors_pieces(
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Floats]
) -> Iterator[bytes]:
    """Yield the same file in pieces: its header, then each tensor, of which `read` is asked in its turn."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    keys = sorted(shapes, key=str.encode)
    at = 0
    for key in keys:
        end = at + 4 * math.prod(shapes[key])
        header[key] = {"dtype": "F32", "shape": list(shapes[key]), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Readers map the file and want the data on a multiple of 8.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for key in keys:
        yield np.ascontiguousarray(read(key), "<f4").tobytes()


def read_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    key_map: Mapping[str, str] | None = None,
    dtypes: Sequence[str] = ("F32",),
    others: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Floats]:
    """Read tensors of exactly these keys and shapes, each as float32, which holds it exactly.

    Args:
        key_map: our keys to the file's; None: they are the same.
        dtypes: what the file may hold: F32, F16, BF16.
        others: shapes of what it holds beside them, by its own keys; not read here.

    Raises:
        BackendError: the file can't be read (its own code), or `adapter-tensors`: a key is
            missing, is in nobody's place, or has another shape or format. All of them are named.
    """
    names = {key: key for key in shapes} if key_map is None else key_map
    try:
        checkpoint = Checkpoint.open(path)
        _check(path, checkpoint, shapes, names, dtypes, others or {})
        tensors = {
            key: _floats(checkpoint.data(names[key]), checkpoint[names[key]].dtype).reshape(shape)
            for key, shape in shapes.items()
        }
        checkpoint.close()
    except CheckpointError as error:
        raise BackendError(error.code, error.message, facts=error.facts, remedy=error.remedy) from error
    infinite = [names[key] for key, values in tensors.items() if not np.isfinite(values).all()]
    if infinite:
        raise BackendError(
            "adapter-tensors",
            f"{path} holds infinities or NaN in {', '.join(infinite[:5])}; nothing was taken from it",
            facts={"file": str(path), "not_finite": infinite[:100]},
        )
    return tensors


def float_rows(checkpoint: Checkpoint, key: str, first: int, count: int) -> Floats:
    """Return rows of a matrix of floats, as float32, which holds them exactly: [count, columns]."""
    entry = checkpoint[key]
    width = entry.nbytes // entry.shape[0]
    data = checkpoint.data(key)[first * width : (first + count) * width]
    return _floats(data, entry.dtype).reshape(count, entry.shape[1])


def _floats(data: memoryview, dtype: str) -> Floats:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def _check(
    path: Path,
    checkpoint: Checkpoint,
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    dtypes: Sequence[str],
    others: Mapping[str, tuple[int, ...]],
) -> None:
    missing = sorted(names.get(key, key) for key in shapes if names.get(key) not in checkpoint)
    missing += sorted(key for key in others if key not in checkpoint)
    taken = {names[key] for key in shapes if key in names} | set(others)
    # Also what the map has a place for and this model has not.
    orphans = sorted({*checkpoint, *names.values()} - taken)
    counts = Counter([*names.values(), *others])
    doubled = sorted(name for name, count in counts.items() if count > 1)
    wrong = []
    for key, shape in (*((names.get(key, key), shape) for key, shape in shapes.items()), *others.items()):
        entry = checkpoint.get(key)
        if entry is not None and (entry.dtype not in dtypes or entry.shape != shape):
            expected = f"{' or '.join(dtypes)} {list(shape)}"
            wrong.append(f"{entry.name} is {entry.dtype} {list(entry.shape)}, expected {expected}")
    if missing or orphans or wrong or doubled:
        parts = [
            *([f"missing: {len(missing)} of {len(shapes)} tensors ({_some(missing)})"] if missing else []),
            *([f"without a place in this model: {len(orphans)} ({_some(orphans)})"] if orphans else []),
            *([f"named for two places: {len(doubled)} ({_some(doubled)})"] if doubled else []),
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
