"""Decode steps as CUDA graphs: one per shape, replayed over index arrays that stay where they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from mens_core.ops import Batch, ServedStep
from mens_torch_cuda.fast.attention import FastKvCache, Places

__all__ = ["MOST_ROWS", "Recorder", "filled_up"]

MOST_ROWS = 64
_MOST_RECORDINGS = 32

Run = Callable[[ServedStep, Places, FastKvCache], tuple[torch.Tensor | None, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: Any
    flat: torch.Tensor
    logits: torch.Tensor
    flags: torch.Tensor
    kept: tuple[Any, ...]
    """What the key names by identity, so that no other object takes its place."""


class Recorder:
    """Records a shape of step the second time it comes; the one used longest ago goes first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: OrderedDict[tuple[Any, ...], _Recording] = OrderedDict()
        self._seen: dict[tuple[Any, ...], Any] = {}
        runtime: Any = torch.cuda
        self._stream = runtime.Stream(device)
        self._pool = runtime.graph_pool_handle()

    @staticmethod
    def takes(batch: Batch) -> bool:
        """Whether it is a decode step: one row per sequence, all of them wanted."""
        rows = len(batch.positions)
        return 0 < rows <= MOST_ROWS and len(batch.block_tables) == rows == len(batch.logit_rows)

    def forget(self) -> None:
        """Drop all recordings: something that they read has moved."""
        self._kept.clear()

    def run(
        self, run: Run, step: ServedStep, batch: Batch, cache: FastKvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `run` returns for the batch's rows."""
        rows = len(batch.positions)
        filled = filled_up(batch, cache.spare)
        key = (id(step), id(cache), len(filled.positions), filled.block_tables.shape[1])
        recording = self._kept.get(key)
        if recording is None:
            if key not in self._seen:
                self._seen[key] = (step, cache)
                return self._cut(run(step, Places.of(filled, self._device), cache), rows)
            recording = self._record(run, step, filled, cache)
            self._kept[key] = recording
            while len(self._kept) > _MOST_RECORDINGS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        recording.flat.copy_(torch.from_numpy(Places.flat(filled)))
        recording.graph.replay()
        return self._cut((recording.logits, recording.flags), rows)

    def _record(self, run: Run, step: ServedStep, batch: Batch, cache: FastKvCache) -> _Recording:
        flat = torch.from_numpy(Places.flat(batch)).to(self._device)
        places = Places.over(batch, flat)
        runtime: Any = torch.cuda
        self._stream.wait_stream(runtime.current_stream())
        with runtime.stream(self._stream):
            run(step, places, cache)  # what libraries set up the first time is set up outside the graph
        runtime.current_stream().wait_stream(self._stream)
        graph = runtime.CUDAGraph()
        with runtime.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits, flags = run(step, places, cache)
        if logits is None:
            raise AssertionError("a decode step has logits")
        return _Recording(graph, flat, logits, flags, (step, cache))

    @staticmethod
    def _cut(made: tuple[torch.Tensor | None, torch.Tensor], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits, flags = made
        if logits is None:
            raise AssertionError("a decode step has logits")
        return logits[:rows], flags.view(3, -1)[:, :rows].flatten()


def filled_up(batch: Batch, spare: int) -> Batch:
    """The same decode step with rows and table width that many steps share; new rows use the spare block."""
    rows, width = batch.block_tables.shape
    many = next(size for size in (1, 2, 4, *range(8, MOST_ROWS + 1, 8)) if size >= rows)
    wide = 1 << (width - 1).bit_length()
    tables = np.full((many, wide), -1, np.int32)
    tables[:rows, :width] = batch.block_tables
    tables[rows:, 0] = spare
    pad = np.zeros(many - rows, np.int32)
    return replace(
        batch,
        token_ids=np.concatenate([batch.token_ids, pad]),
        positions=np.concatenate([batch.positions, pad]),
        starts=np.arange(many + 1, dtype=np.int32),
        block_tables=tables,
        logit_rows=np.arange(many, dtype=np.int32),
    )
