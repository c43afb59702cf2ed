"""Copies of base weights in an adapter's file, which PEFT saves beside an update of embedding or head.

They are no update, and are not used. But an adapter lies on the weights that it was trained with: a
copy that isn't the base's, value by value, is one of another base, or of a table that was resized or
trained.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mens_core.adapters.file import float_rows
from mens_core.ops import Format, Matrix, Ops, is_quantised
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint

__all__ = ["BaseTable", "compare_copies"]

_PART_BYTES = 16 << 20
_SMALLEST = np.float32(2.0**-126)


@dataclass(frozen=True, slots=True)
class BaseTable:
    """A matrix of the base, as it was loaded."""

    weight: Matrix
    format: Format


def compare_copies(
    path: Path, copies: Mapping[str, str], table_of: Callable[[str], BaseTable], ops: Ops
) -> Generator[None, None, tuple[str, ...]]:
    """Hold every copy against the base, yielding after each part; return what the user should know.

    Args:
        copies: the key in the file of each, by the layer's name; of the base's shape.
        table_of: the base's matrix of a layer.

    Raises:
        BackendError: `adapter-base`: a value differs.
    """
    warnings = []
    checkpoint = Checkpoint.open(path)
    for layer, key in sorted(copies.items()):
        table, (rows, columns) = table_of(layer), checkpoint[key].shape
        if is_quantised(table.format):
            warnings.append(
                f"the adapter's file holds {layer} as it was trained with; the base's is quantised, so that "
                "the two were not compared"
            )
            continue
        step = max(1, _PART_BYTES // (4 * columns))
        for first in range(0, rows, step):
            ids = np.arange(first, min(first + step, rows), dtype=np.int32)
            ours = ops.to_host(ops.embed(table.weight, ids, None, name=layer))
            theirs = float_rows(checkpoint, key, first, len(ids))
            # What is subnormal counts as zero wherever a weight is read.
            theirs = np.where(np.abs(theirs) < _SMALLEST, np.float32(0), theirs)
            wrong = np.flatnonzero((ours != theirs).any(axis=1))
            if wrong.size:
                raise _another_base(path, key, layer, first + int(wrong[0]))
            yield
        checkpoint.release(key)
    checkpoint.close()
    return tuple(warnings)


def _another_base(path: Path, key: str, layer: str, row: int) -> BackendError:
    return BackendError(
        "adapter-base",
        f"{path} holds a copy of {layer} ({key}) that is not this base's: row {row} differs first; nothing "
        "was loaded",
        facts={"file": str(path), "tensor": key, "row": row},
        remedy="Load the base that the adapter was trained with. If its tokens were resized or trained, "
        "merge the adapter with PEFT (`merge_and_unload`), and import the merged model.",
    )
