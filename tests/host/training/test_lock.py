"""One trainer at a time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vox_host.errors import UsageError
from vox_host.training.lock import held_run

HOLD = """
import sys
from pathlib import Path
from vox_host.training.lock import held_run
with held_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_trainer_is_refused_and_a_killed_one_holds_nothing(tmp_path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError) as caught, held_run(tmp_path):
            pass
        assert caught.value.code == "run-busy"
        assert dict(caught.value.facts) == {"process": str(other.pid)}
        other.kill()
    with held_run(tmp_path):
        pass
