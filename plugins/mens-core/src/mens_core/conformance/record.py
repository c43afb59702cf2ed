"""Write the expected digests of the cases: `python -m mens_core.conformance.record LANE [--training]`.

LANE names a callable without arguments that returns an `Ops`, or a `TrainingOps` for the cases of
training, as "module:callable". It must be the scalar reference, which defines the bits; any other
lane would make itself the judge of itself. The file is written next to this one, and goes into the
repository with the change of the numerics that asked for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from mens_core.conformance.cases import CASES
from mens_core.conformance.cases_training import TRAINING_CASES, TRAINING_VECTORS
from mens_core.conformance.quick import VECTORS, digests
from mens_core.numerics import NUMERICS_VERSION

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Record the digests that a lane makes."""
    parser = argparse.ArgumentParser(prog="python -m mens_core.conformance.record", description=__doc__)
    parser.add_argument("lane", help="the scalar reference, as module:callable")
    parser.add_argument("--training", action="store_true", help="the cases of training, not the quick ones")
    parser.add_argument("--to", type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    module, _, callable_name = options.lane.partition(":")
    # Unchecked: the lane is whatever the caller names.
    ops: Any = getattr(importlib.import_module(module), callable_name)()
    made = digests(ops, TRAINING_CASES) if options.training else digests(ops, CASES)
    to = options.to or Path(__file__).with_name(TRAINING_VECTORS if options.training else VECTORS)
    written = {"numerics_version": NUMERICS_VERSION, "made_by": options.lane, "cases": made}
    _replace(to, (json.dumps(written, indent=1) + "\n").encode())
    sys.stdout.write(f"{len(made)} cases written to {to}\n")
    return 0


def _replace(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".new")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
