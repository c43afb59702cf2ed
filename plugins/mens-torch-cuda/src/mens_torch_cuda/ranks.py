"""A training on several GPUs: which rank has which, and ranks that torchrun has started."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any

from mens_core.peers.meeting import PLACE_VARIABLE
from mens_core.peers.wire import Place

__all__ = ["dismiss", "gpu_of_rank", "launched", "serve_trainings"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WAIT = datetime.timedelta(hours=1)
"""For rank 0 to begin a training."""


def gpu_of_rank(rank: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows a rank its GPU alone: the one of that number among those seen here."""
    seen = environment.get(_VISIBLE)
    return {_VISIBLE: str(rank) if seen is None else seen.split(",")[rank].strip()}


class _Torchrun:
    """Where this process stands among those that torchrun started, and how many trainings it has told of."""

    told = 0

    @staticmethod
    def is_there(environment: Mapping[str, str]) -> bool:
        return "TORCHELASTIC_RUN_ID" in environment and int(environment.get("WORLD_SIZE", "1")) > 1

    @staticmethod
    def store() -> Any:
        from torch import distributed

        torch_distributed: Any = distributed
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return torch_distributed.TCPStore(*where, is_master=False, timeout=_WAIT)

    @classmethod
    def tell(cls, folder: str) -> None:
        cls.store().set(f"vox-place-{cls.told}", folder)
        cls.told += 1


def launched(place: Place) -> bool:
    """Tell the ranks that torchrun started beside this one where to come; False: it started none."""
    if not _Torchrun.is_there(os.environ):
        return False
    _Torchrun.tell(str(place.folder))
    return True


def serve_trainings(entry: str) -> int:
    """Take part, in a process that torchrun started, in every training of rank 0; return the exit status."""
    from mens_core.peers.child import serve

    os.environ.update(gpu_of_rank(int(os.environ["LOCAL_RANK"]), os.environ))
    store, number = _Torchrun.store(), 0
    while folder := store.get(f"vox-place-{number}").decode():
        os.environ[PLACE_VARIABLE] = folder
        status = serve(entry)
        if status != 0:
            return status
        number += 1
    return 0


def dismiss() -> None:
    """Let the ranks that torchrun started end: rank 0 begins no further training."""
    if _Torchrun.is_there(os.environ):
        _Torchrun.tell("")
