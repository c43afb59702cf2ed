"""Two sides of a comparison of the update operators: the scalar reference, and kernels.

A side is a lane of `UpdateOps`; instruction set and threads are set while it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.library import Library
from mens_cpu_ref.update_library import UPDATE_OPERATORS
from mens_cpu_ref.update_ops import UpdateOps


@dataclass(frozen=True)
class Side:
    """What a call made: bytes of every array, faults, and the codes that native functions returned."""

    library: Library
    isa: str | None
    """None: the scalar reference."""
    threads: int = 1

    def __call__(self, run: Callable[[UpdateOps], Any]) -> tuple[Any, ...]:
        codes: list[tuple[str, int]] = []
        with self._set():
            lane = UpdateOps(_watched(self.functions(), codes))
            arrays = list(_arrays(run(lane)))
            return arrays, lane.take_faults(), codes

    def functions(self) -> Mapping[str, Any]:
        if self.isa is None:
            return {**self.library.reference, **self.library.bind("ref_", UPDATE_OPERATORS)}
        return {**self.library.kernels, **self.library.bind("vox_", UPDATE_OPERATORS)}

    @contextmanager
    def _set(self) -> Iterator[None]:
        if self.isa is None:
            yield
            return
        self.library.force_isa(self.isa)
        self.library.set_threads(self.threads)
        try:
            yield
        finally:
            self.library.force_isa("")
            self.library.set_threads(1)


def assert_same_run(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    """Bytes of every array, faults and codes; the first value that differs is shown."""
    assert found[1:] == expected[1:]
    assert [a.shape for a in found[0]] == [a.shape for a in expected[0]]
    for a, b in zip(found[0], expected[0], strict=True):
        if a.tobytes() != b.tobytes():
            at = np.flatnonzero(a.ravel().view(np.uint32) != b.ravel().view(np.uint32))
            i = at[0]
            raise AssertionError(
                f"{len(at)} of {a.size} differ, first {i} of {a.shape}: {a.flat[i]!r}, expected {b.flat[i]!r}"
            )


def _watched(functions: Mapping[str, Any], codes: list[tuple[str, int]]) -> dict[str, Any]:
    def watch(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> int:
            code = function(*arguments)
            if name in UPDATE_OPERATORS:
                codes.append((name, code))
            return code

        return call

    return {name: watch(name, function) for name, function in functions.items()}


def _arrays(made: Any) -> Iterator[np.ndarray]:
    if isinstance(made, Rows):
        yield np.array(made.values)
    elif isinstance(made, (list, tuple)):
        for part in made:
            yield from _arrays(part)
    else:
        yield np.asarray(made, np.float32).reshape(1)
