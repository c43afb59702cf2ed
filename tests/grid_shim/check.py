"""Every case of the grid kernels, and what running one on a lane gives to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from grid_shim.device import LaunchError
from grid_shim.shapes import SHAPES
from grid_shim.training_shapes import TRAINING_SHAPES
from mens_core.conformance.cases import CASES
from mens_core.conformance.suite import TRAINING_GROUPS, cases_of
from mens_core.kernel_source import Target, grid_source
from mens_core.training_ops import TrainingOps

__all__ = ["ALL", "SERVING", "apart", "caught", "changed", "results"]

SERVING: dict[str, Callable[[Any], Any]] = {
    **{f"quick/{name}": case for name, case in CASES.items()},
    **SHAPES,
}
ALL = {
    **SERVING,
    **{f"training/{name}": case for group in TRAINING_GROUPS for name, case in cases_of(group).items()},
    **TRAINING_SHAPES,
}


def results(case: Callable[[Any], Any], ops: TrainingOps) -> list[bytes]:
    """Return the bytes of every array, and the faults."""
    ops.take_faults()
    arrays = [np.asarray(array).tobytes() for array in case(ops)]
    faults = [f"{fault.name} {fault.rows}".encode() for fault in ops.take_faults()]
    assert arrays or faults, "the case compares nothing"
    return arrays + faults


def apart(case: Callable[[Any], Any], ops: TrainingOps, reference: TrainingOps) -> str | None:
    """Return where a case first differs between two lanes, with the bits there; None where it is equal."""
    found, expected = results(case, ops), results(case, reference)
    for number, (a, b) in enumerate(zip(found, expected, strict=False)):
        if a == b:
            continue
        if len(a) != len(b) or len(a) % 4:
            return f"result {number}: {a[:60]!r} beside {b[:60]!r}"
        words, others = np.frombuffer(a, "<u4"), np.frombuffer(b, "<u4")
        at = np.flatnonzero(words != others)
        first = at[0]
        return (
            f"result {number}, element {first} (of {len(at)} in {len(words)}): "
            f"{words[first]:08x} beside {others[first]:08x}"
        )
    return None if len(found) == len(expected) else f"{len(found)} results beside {len(expected)}"


def changed(target: Target, *replacements: tuple[str, str]) -> str:
    """Return the source with each text, which must be there, replaced by another."""
    source = grid_source(target)
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


def caught(name: str, ops: TrainingOps, expected: Callable[[str], list[bytes]]) -> bool:
    """Whether a case differs, or does what the shim forbids."""
    try:
        return results(ALL[name], ops) != expected(name)
    except LaunchError:
        return True
