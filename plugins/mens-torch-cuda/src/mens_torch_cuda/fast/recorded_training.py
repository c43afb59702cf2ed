"""A micro-batch's forward and backward as one CUDA graph, where the same lengths come again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mens_torch_cuda.fast.laid_out import LaidOut

__all__ = ["StepRecorder"]

_MOST_RECORDINGS = 2
"""Each keeps a step's memory; they share one pool."""
_MOST_SEEN = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    graph: Any
    laid: LaidOut
    loss: torch.Tensor


class StepRecorder:
    """Records a shape of micro-batch the second time it comes.

    What a recording reads and writes beside its index arrays stays where it is: weights, the adapter's
    rounding, its gradients. Tables of angles that grow move, so their sizes belong to the shape.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._kept: OrderedDict[tuple[int, ...], _Recording] = OrderedDict()
        runtime: Any = torch.cuda
        self._stream = runtime.Stream(device)
        self._pool = runtime.graph_pool_handle()
        self.held_bytes = 0
        """Memory of recordings, which steps that run without one can't use."""

    def is_due(self, shape: tuple[int, ...]) -> bool:
        """Whether a micro-batch of this shape is to be recorded, or is."""
        if shape in self._kept or shape in self._seen:
            return True
        self._seen[shape] = None
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return False

    def run(
        self, shape: tuple[int, ...], laid: LaidOut, work: Callable[[LaidOut], torch.Tensor]
    ) -> torch.Tensor:
        """Do what `work` does; the loss is good until the next run."""
        recording = self._kept.get(shape)
        if recording is None:
            recording = self._kept[shape] = self._record(laid, work)
            while len(self._kept) > _MOST_RECORDINGS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(shape)
        recording.laid.flat.copy_(laid.flat)
        recording.graph.replay()
        return recording.loss

    def _record(self, laid: LaidOut, work: Callable[[LaidOut], torch.Tensor]) -> _Recording:
        laid = LaidOut.over(laid.flat.clone(), laid.first, laid.rows.bounds, laid.trained)
        # The memory of steps that ran without a recording is not of its pool.
        torch.cuda.empty_cache()
        runtime: Any = torch.cuda
        before = runtime.memory_reserved(self._device)
        graph = runtime.CUDAGraph()
        # Capturing launches nothing, so no gradient is added twice.
        with runtime.graph(graph, pool=self._pool, stream=self._stream):
            loss = work(laid)
        self.held_bytes += runtime.memory_reserved(self._device) - before
        return _Recording(graph, laid, loss)
