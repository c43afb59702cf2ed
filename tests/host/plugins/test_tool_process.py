"""Interrupted installers: they end with all that they have started, before anything is cleaned up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fixtures.processes import still_alive

COMMAND = """
import pathlib, subprocess, sys
import vox_host.cli as cli
from vox_host.installation.tools import run_tool
from vox_host.installation.store import staging
home = pathlib.Path(sys.argv[1])
program = '''
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
time.sleep(0.2)
pathlib.Path(sys.argv[1], "started").write_text(str(child.pid))
time.sleep(60)
'''
class App:
    def __call__(self, *_, **__):
        with staging(home):
            run_tool([sys.executable, "-c", program, home], "x", environment={}, report=print)
cli._build = lambda _: App()
sys.argv = ["vox-host", "plugin"]
cli.main()
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_tool_ends_with_its_children_and_the_staging_folder_goes(tmp_path, number, status):
    process = subprocess.Popen([sys.executable, "-c", COMMAND, tmp_path], env=os.environ)
    started = tmp_path / "started"
    deadline = time.monotonic() + 30
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(number)
    assert process.wait(20) == status
    assert still_alive(family, within_s=0.5) == []
    assert [path.name for path in tmp_path.iterdir() if "staging" in path.name] == []
