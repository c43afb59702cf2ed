"""Write the expected digests of the quick cases: `python -m mens_core.conformance.record LANE`.

LANE names a callable without arguments that returns an `Ops`, as "module:callable". It must be
the scalar reference, which defines the bits; any other lane would make itself the judge of
itself. The file is written next to this one, and goes into the repository with the change of
the numerics that asked for it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

from mens_core.conformance.quick import VECTORS, digests
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import Ops

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Record the digests that a lane makes."""
    parser = argparse.ArgumentParser(prog="python -m mens_core.conformance.record", description=__doc__)
    parser.add_argument("lane", help="the scalar reference, as module:callable")
    parser.add_argument("--to", type=Path, default=Path(__file__).with_name(VECTORS))
    options = parser.parse_args(arguments)
    module, _, callable_name = options.lane.partition(":")
    ops: Ops = getattr(importlib.import_module(module), callable_name)()
    written = {"numerics_version": NUMERICS_VERSION, "made_by": options.lane, "cases": digests(ops)}
    _replace(options.to, (json.dumps(written, indent=1) + "\n").encode())
    sys.stdout.write(f"{len(written['cases'])} cases written to {options.to}\n")
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
