"""What torch would submit the GPU's queue for, counted under the lane's unchanged Python.

torch adds kernels, fills and new memory to an open command buffer. It submits it, and waits, when bytes go
between the host and the GPU. The lane's calls into torch are seen one by one; one that is not known to be
either is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Submissions"]

_aten = torch.ops.aten
_QUEUED = {
    _aten.empty.memory_format,
    _aten.slice.Tensor,
    _aten.view.default,
    _aten.alias.default,
    _aten.detach.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
}
"""Memory, views of it, and fills: they wait for nothing."""


class Submissions(TorchDispatchMode):
    """Within it, every submission is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """Copies between host and GPU: torch submits for each, and waits."""
        self.copied: list[int] = []
        """Bytes of each."""
        self.made: list[int] = []
        """Bytes of each piece of memory that was asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is _aten.copy_.default:
            self.count += 1
            self.copied.append(args[0].nbytes)
        elif func is _aten.empty.memory_format:
            self.made.append(made.nbytes)
        elif func not in _QUEUED:
            raise AssertionError(f"{func}: it is not known whether torch submits the queue for it")
        return made
