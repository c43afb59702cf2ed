"""The self-test of a lane: every operator once or more, compared by digest, in milliseconds.

The expected digests, `quick.json`, are written by `record` from the scalar reference and by
nothing else. A file that is absent, empty or of other rules fails the test: no lane serves
because nothing was compared.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases import CASES
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import Ops
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import SelfTestResult

__all__ = ["compare", "digests", "place_of", "read_vectors", "self_test"]

VECTORS = "quick.json"

_Lane = TypeVar("_Lane", bound=Ops)


def self_test(make_ops: Callable[[], Ops]) -> SelfTestResult:
    """Run the quick cases on a lane and compare them with the shipped digests."""
    return compare(digests(make_ops(), CASES), read_vectors())


def digests(ops: _Lane, cases: Mapping[str, Callable[[_Lane], Iterator[npt.NDArray[Any]]]]) -> dict[str, str]:
    """Return the SHA-256 of what each case makes, by the case's name.

    Raises:
        BackendError: `self-test-failed`, if an operator raises, naming the case.
    """
    made: dict[str, str] = {}
    for name, case in cases.items():
        ops.take_faults()
        digest = hashlib.sha256()
        try:
            for array in case(ops):
                digest.update(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes())
        except Exception as error:
            place = place_of(error)
            raise BackendError(
                "self-test-failed",
                f"self-test case {name!r} raised {type(error).__name__}: {error}{place}",
                facts={"case": name, "exception": f"{type(error).__name__}: {error}"},
            ) from error
        for fault in ops.take_faults():
            digest.update(f"{fault.name} {list(fault.rows)}\n".encode())
        made[name] = digest.hexdigest()
    return made


def place_of(error: Exception) -> str:
    """Return " (FILE, line N, in NAME)" of the lane's code that raised; the log gets the traceback."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parents[1].as_posix()
    # What a lane calls (numpy, say) raises too, but the lane's own line is what its author looks for.
    lane = [
        f for f in frames if not f.filename.startswith(ours) and "/site-packages/numpy/" not in f.filename
    ]
    if not (lane or frames):
        return ""
    last = (lane or frames)[-1]
    return f" ({last.filename}, line {last.lineno}, in {last.name})"


def read_vectors(name: str = VECTORS) -> bytes:
    """Return the content of the shipped vectors; empty if there are none."""
    file = resources.files("mens_core.conformance").joinpath(name)
    return file.read_bytes() if file.is_file() else b""


def compare(found: dict[str, str], vectors: bytes) -> SelfTestResult:
    """Name every case whose digest is not the expected one, or has no counterpart."""
    written = json.loads(vectors) if vectors else {}
    expected: dict[str, str] = written.get("cases", {})
    failed = [
        name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)
    ]
    if written.get("numerics_version") != NUMERICS_VERSION:
        failed.append(f"vectors of numerics {written.get('numerics_version')}, not {NUMERICS_VERSION}")
    return SelfTestResult(
        numerics_version=NUMERICS_VERSION,
        cases=len(expected),
        failed=failed,
        vectors_digest=hashlib.sha256(vectors).hexdigest(),
    )
