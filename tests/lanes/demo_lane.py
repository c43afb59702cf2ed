"""The CPU lane on the demo model: every position's logits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lanes.tiny_models import open_model
from mens_core.models.model import Model
from mens_core.ops import BLOCK, Batch, Ops
from vox_host.models.catalogue import Catalogue
from vox_host.models.importing import import_model, open_source

__all__ = ["cpu_lane", "import_demo", "logits", "open_model"]

CHUNK = 256


def cpu_lane() -> Ops:
    """Return a fresh CPU lane; the native library must have been built."""
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library

    return CpuOps(load_library().kernels)


def import_demo(gguf: Path, folder: Path) -> Path:
    """Import the demo model into `folder` and return its directory."""
    import_model(
        open_source(str(gguf), environment=os.environ),
        Catalogue(folder),
        name="demo",
        accept_license=True,
        progress=lambda *_: None,
    )
    return folder / "demo"


def logits(model: Model, ops: Ops, token_ids: list[int]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (first position, logits of up to CHUNK positions)."""
    blocks = -(-len(token_ids) // BLOCK)
    cache = model.new_cache(blocks)
    table = np.arange(blocks, dtype=np.int32)[None]
    for start in range(0, len(token_ids), CHUNK):
        part = np.array(token_ids[start : start + CHUNK], np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        batch = Batch(part, rows + start, np.array([0, len(part)], np.int32), table, rows)
        result = model.forward(batch, cache)
        assert not result.faults
        yield start, ops.to_host(result.logits)
