"""The grid kernels as one self-contained text, for a compiler that is handed a string.

`kernels/grid` is written once for CUDA and Metal over the macros of `grid/target.h`. NVRTC and
Metal's compiler take source at run time and know no folder of ours, so the headers are joined here:
each once, where it is first included.
"""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath
from typing import Literal

__all__ = ["CUDA_OPTIONS", "GROUP", "Kernels", "Target", "grid_source"]

Target = Literal["cuda", "metal"]
Kernels = Literal["all", "serving", "training", "float_weights"]

GROUP = 128
"""Threads of a group, in every grid kernel (kGroup of args.h)."""

CUDA_OPTIONS = ("--fmad=false", "--ftz=true", "--prec-div=true", "--prec-sqrt=true", "--std=c++17")
"""What nvcc and NVRTC must be told: the ground rules of docs/numerics.md. Metal has them in the source."""

_INCLUDE = re.compile(r'#include "([^"]+)"')


def grid_source(target: Target, kernels: Kernels = "all") -> str:
    """Return the grid kernels for `target`; includes nothing but what the target's compiler brings.

    Args:
        kernels: a worker that does not train need not compile those of training; they may follow when
            training begins, with what they share with those that serve.
    """
    joined = _Joined(resources.files("mens_core").joinpath("kernels"))
    joined.take(PurePosixPath(f"grid/{kernels}.h"))
    return "\n".join([f"#define VOX_{target.upper()} 1", *joined.lines, ""])


class _Joined:
    def __init__(self, root: Traversable) -> None:
        self._root = root
        self._seen: set[PurePosixPath] = set()
        self.lines: list[str] = []

    def take(self, path: PurePosixPath) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        for line in self._root.joinpath(str(path)).read_text(encoding="utf-8").splitlines():
            included = _INCLUDE.fullmatch(line)
            if included is not None:
                self.take(_normal(path.parent / included[1]))
            elif line != "#pragma once":
                self.lines.append(line)


def _normal(path: PurePosixPath) -> PurePosixPath:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)
