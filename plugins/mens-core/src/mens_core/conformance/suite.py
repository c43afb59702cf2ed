"""The groups of cases that a host may ask for, and the answer to its question.

What a case's outputs must be is not known here: the host compares them with what the scalar
reference made. So a lane can't be the judge of itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases import CASES, Case
from mens_core.conformance.cases_flushed import FLUSHED
from mens_core.conformance.definition import SUITE_VERSION, definition
from mens_core.conformance.extended import EXTENDED
from mens_core.conformance.quick import place_of
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import Ops
from vox_plugin_api.backend import BackendError, Reply
from vox_plugin_api.conformance_messages import (
    CaseFault,
    CaseOutput,
    ConformanceParams,
    ConformanceResult,
    ElementType,
)

__all__ = ["GROUPS", "TRAINING_GROUPS", "answer", "cases_of", "outputs_of"]

TRAINING_GROUPS = ("backward", "updates")
"""What only a lane of `TrainingOps` can answer."""
GROUPS = ("operators", *TRAINING_GROUPS)

_TYPES: Mapping[str, ElementType] = MappingProxyType({"<f4": "f32", "<i4": "i32", "<u8": "u64"})


def answer(make_ops: Callable[[], Ops], params: ConformanceParams) -> Reply:
    """Run the case that `params` names on a lane.

    Raises:
        BackendError: `unknown-group`, `unknown-case`, or `case-failed` if an operator raises.
    """
    facts = {"groups": list(GROUPS), "numerics_version": NUMERICS_VERSION, "suite_version": SUITE_VERSION}
    if params.group not in GROUPS:
        message = f"there is no group {params.group!r} of cases here; nothing was run"
        raise BackendError("unknown-group", message, facts=facts)
    case = cases_of(params.group).get(params.case)
    if case is None:
        message = f"the group {params.group!r} has no case {params.case!r} here; nothing was run"
        raise BackendError("unknown-case", message, facts=facts)
    ops = make_ops()
    ops.take_faults()
    try:
        arrays = list(outputs_of(case, ops))
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(
            "case-failed",
            f"case {params.case!r} raised {type(error).__name__}: {error}{place_of(error)}",
            facts={"case": params.case, "exception": f"{type(error).__name__}: {error}"},
        ) from error
    payloads = tuple(array.tobytes() for array in arrays)
    operator = params.case.split("/")[0]
    result = ConformanceResult(
        case=params.case,
        numerics_version=NUMERICS_VERSION,
        suite_version=SUITE_VERSION,
        definition=definition(case),
        outputs=[
            CaseOutput(
                operator=operator,
                shape=list(array.shape),
                dtype=_TYPES[array.dtype.str],
                digest=hashlib.sha256(payload).hexdigest(),
            )
            for array, payload in zip(arrays, payloads, strict=True)
        ],
        faults=[CaseFault(name=fault.name, rows=list(fault.rows)) for fault in ops.take_faults()],
    )
    return Reply(result, slices=payloads if params.with_bytes else ())


def cases_of(group: str) -> Mapping[str, Callable[[Any], Iterator[npt.NDArray[Any]]]]:
    """Return a group's cases by name; the part of a name before the first slash is the operator."""
    if group == "operators":
        return {**CASES, **EXTENDED, **FLUSHED}
    # Imported when they are asked for: a worker that serves loads nothing of training.
    from mens_core.conformance import cases_training_edges as edges
    from mens_core.conformance import cases_training_flushed as flushed
    from mens_core.conformance import cases_training_rounding as rounding

    if group == "backward":
        from mens_core.conformance.cases_backward import BACKWARD_CASES

        return {
            **BACKWARD_CASES,
            **edges.BACKWARD_EDGES,
            **rounding.BACKWARD_ROUNDING,
            **flushed.BACKWARD_FLUSHED,
        }
    from mens_core.conformance.cases_updates import UPDATE_CASES

    return {**UPDATE_CASES, **edges.UPDATE_EDGES, **rounding.UPDATE_ROUNDING, **flushed.UPDATE_FLUSHED}


def outputs_of(case: Case, ops: Ops) -> Iterator[npt.NDArray[Any]]:
    """Yield a case's outputs, little-endian and row by row, each copied before the next is made."""
    for array in case(ops):
        yield np.array(array, dtype=array.dtype.newbyteorder("<"), order="C")
