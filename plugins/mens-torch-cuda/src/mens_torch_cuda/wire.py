"""Tensors between the ranks of a training, through torch.distributed: as bytes, from one rank to one other.

NCCL carries them from GPU to GPU, gloo through the memory of the host. No operation of torch.distributed that
adds is used: what order it would add in is not ours to say.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import distributed

from mens_core.grid_tensors import GridTensor
from mens_core.ops import Tensor
from mens_core.peers.wire import Place
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError

_dist: Any = distributed

__all__ = ["STORE", "TorchWire"]

STORE = "store"
"""File in the place of a training through which torch's processes find each other."""
_PATIENCE_S = 120.0
"""For a rank that was told to send or to receive."""
_POLL_S = 0.0002


class TorchWire:
    """A `Wire`. One per process, since torch has one default group."""

    def __init__(
        self, place: Place, ops: TrainingOps, look: Callable[[], None], *, kind: Literal["nccl", "gloo"]
    ) -> None:
        """Meet the other ranks; `look` is called while one is waited for.

        Raises:
            BackendError: `peer-lost`: they did not all come.
        """
        self._ops = ops
        self._look = look
        self._is_nccl = kind == "nccl"
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if self._is_nccl else {}
        try:
            _dist.init_process_group(
                kind,
                store=_dist.FileStore(str(place.folder / STORE), place.ranks),
                rank=place.rank,
                world_size=place.ranks,
                timeout=datetime.timedelta(seconds=_PATIENCE_S),
                **options,
            )
            met = [self._new(4) for _ in range(place.ranks)]
            self._wait([_dist.all_gather(met, self._new(4), async_op=True)])
            self._open_ways(place)
        except (RuntimeError, ValueError) as problem:
            self.close(is_whole=False)
            raise _lost(problem) from None

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send to a rank that receives as many of the same shapes."""
        self._exchange(_dist.isend, [self._bytes_of(tensor) for tensor in tensors], to)

    def receive(self, shapes: Sequence[tuple[int, ...]], source: int) -> list[Tensor]:
        """Return what a rank sends."""
        buffers = [self._new(4 * int(np.prod(shape))) for shape in shapes]
        self._exchange(_dist.irecv, buffers, source)
        return [self._tensor_of(buffer, shape) for buffer, shape in zip(buffers, shapes, strict=True)]

    def close(self, *, is_whole: bool) -> None:
        """Let the group go; where a rank is gone, what still waits for it on the GPU is given up."""
        if not _dist.is_initialized():
            return
        with contextlib.suppress(RuntimeError, AttributeError):
            if self._is_nccl and not is_whole:
                group: Any = _dist.group.WORLD
                group._get_backend(torch.device("cuda")).abort()
        with contextlib.suppress(RuntimeError):
            _dist.destroy_process_group()

    # --- bytes -----------------------------------------------------------------------------------

    def _new(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cuda" if self._is_nccl else "cpu")

    def _bytes_of(self, tensor: Tensor) -> torch.Tensor:
        if self._is_nccl:
            there = cast(GridTensor, tensor)
            buffer: torch.Tensor = there.buffer
            return buffer.narrow(0, 0, 4 * int(np.prod(there.shape)))
        values = np.array(self._ops.to_host(tensor), "<f4")
        return torch.from_numpy(values.reshape(-1).view(np.uint8))

    def _tensor_of(self, buffer: torch.Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._is_nccl:
            return GridTensor(buffer, shape)
        return self._ops.from_host(buffer.numpy().view("<f4").astype(np.float32, copy=False).reshape(shape))

    # --- transfers -------------------------------------------------------------------------------

    def _open_ways(self, place: Place) -> None:
        """Send between rank 0 and each other one, both ways.

        NCCL connects two ranks when they first send to one another, whatever went through the whole group
        before, and the host waits inside that call where the other one is gone: that belongs to the start.
        """
        others = range(1, place.ranks) if place.rank == 0 else [0]
        for rank in others:
            ways = (_dist.isend, _dist.irecv) if place.rank == 0 else (_dist.irecv, _dist.isend)
            for way in ways:
                self._exchange(way, [self._new(4)], rank)

    def _exchange(self, way: Callable[..., Any], buffers: Sequence[torch.Tensor], rank: int) -> None:
        try:
            self._wait(_dist.batch_isend_irecv([_dist.P2POp(way, buffer, rank) for buffer in buffers]))
        except RuntimeError as problem:
            raise _lost(problem) from None

    def _wait(self, works: Sequence[Any]) -> None:
        """Wait, on the host too: a GPU would wait for ever for a rank that is gone."""
        if not self._is_nccl:
            for work in works:
                work.wait()
            return
        until = time.monotonic() + _PATIENCE_S
        for work in works:
            while not work.is_completed():
                self._look()
                if time.monotonic() > until:
                    raise RuntimeError(f"not done within {_PATIENCE_S:g} s")
                time.sleep(_POLL_S)
            work.wait()


_ENVIRONMENT = {
    # Ranks are processes of one machine: nothing need listen on its networks.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    # NCCL waits 0.1, 0.2, 0.3 ... s between its tries to reach a rank that is gone: 8 s in all, not 60.
    "NCCL_SOCKET_RETRY_CNT": "12",
    # For sums in the switch, which is what we must not have; it takes memory.
    "NCCL_NVLS_ENABLE": "0",
    # A rank that is gone is our error to tell, not torch's to end the process for.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


def _lost(problem: Exception) -> BackendError:
    said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    return BackendError(
        "peer-lost",
        f"tensors did not cross between the ranks of the training ({said})",
        facts={"said": said},
        remedy="The worker's log has the last lines of each rank.",
    )
