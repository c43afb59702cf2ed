"""Every path in a next command is one word to a shell."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import vox_host
from vox_host.app.training import check_out
from vox_host.cli.train_texts import go_on_text, print_end
from vox_host.errors import UsageError
from vox_host.quoted import quoted
from vox_host.runs.layout import RunDirectory

SOURCE = Path(vox_host.__file__).parent
COMMAND = re.compile(r"vox-host [a-z]+(?: [a-z]+)?(?: --[a-z-]+)* \{([^{}]+)\}")
PATHS = re.compile(r"(?:.*[._])?(?:path|out|run|inside|folder)(?:\.parent|\[0\])?")
"""As values are called that are paths; names of models and plugins need no quotes."""


def test_no_command_in_the_source_has_a_path_as_it_is():
    found = [
        (file.name, value)
        for file in sorted(SOURCE.rglob("*.py"))
        for value in COMMAND.findall(file.read_text())
        if PATHS.fullmatch(value)
    ]
    assert found == []


def test_a_path_with_a_space_comes_back_from_a_shell_whole(tmp_path, capsys):
    folder = tmp_path / "moved ü dir"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    run = RunDirectory(folder)
    ended = {"ended": "steps", "step": 4, "steps": 4, "seconds": 1.0, "tokens_per_s": 2.0}
    ended |= {"held_out_loss_before": None, "best_held_out_loss": None, "peak_memory_bytes": None}
    print_end(run, ended)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(shown)[-2:] == ["--model", str(folder)]
    assert shlex.split(go_on_text(run).split("`")[1])[-1] == str(folder)
    try:
        check_out(folder)
    except UsageError as error:
        assert f"--resume {quoted(folder)}`" in (error.remedy or "")
    else:
        raise AssertionError("nothing was refused")
