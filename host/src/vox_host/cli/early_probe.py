"""The hardware probe of commands that open a model, started before their modules are imported.

It is a process of its own and takes as long as the imports do; one after the other, they would be
a tenth of the time to a short answer.
"""

from __future__ import annotations

import subprocess

from vox_host.hardware.probe import start_probe

__all__ = ["begin", "take"]

_begun: list[subprocess.Popen[bytes]] = []


def begin() -> None:
    """Start the probe."""
    _begun.append(start_probe())


def take() -> subprocess.Popen[bytes] | None:
    """Return the probe that runs, for `probe_machine`; None where none was begun."""
    return _begun.pop() if _begun else None
