"""What takes a model of the store and no adapter says so of a run's folder."""

from __future__ import annotations

import pytest

from fixtures.runs import a_run
from fixtures.scripted_home import command_line, run_command, scripted_home
from vox_host.app.named_model import find_stored_model
from vox_host.errors import UsageError
from vox_host.models.catalogue import Catalogue


def test_an_adapter_s_folder_is_told_from_a_name_and_what_there_is_instead_is_said(tmp_path):
    home = scripted_home(tmp_path, {})
    catalogue = Catalogue(home / "models")
    folder = tmp_path / "my runs" / "t1"
    folder.parent.mkdir()
    a_run(folder)
    with pytest.raises(UsageError) as caught:
        find_stored_model(catalogue, str(folder), what="training on")
    error = caught.value
    assert error.code == "adapter-not-taken"
    assert error.message == f"--model {folder}: training on an adapter is not offered; nothing was started"
    assert f"`vox-host merge '{folder}' --name NAME`" in (error.remedy or "")
    assert find_stored_model(catalogue, "tiny", what="training on").name == "tiny"
    with pytest.raises(UsageError, match="cannot name a model"):
        find_stored_model(catalogue, str(tmp_path / "nothing"), what="training on")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("parity", "--plugin", "any"), b"comparing plugins on an adapter is not offered"),
        (("train", "--data", "rows.jsonl", "--out", "new"), b"training on an adapter is not offered"),
    ],
)
def test_both_commands_say_it_and_neither_help_promises_more(tmp_path, arguments, says):
    home = scripted_home(tmp_path, {})
    run = a_run(tmp_path / "t1")
    command, environment = command_line(tmp_path, home)
    done = run_command(command, environment, *arguments, "--model", str(run.path))
    assert done.returncode == 2
    assert b"error[adapter-not-taken]" in done.stderr and says in done.stderr
    helped = run_command(command, environment, arguments[0], "--help").stdout.decode()
    plain = " ".join(helped.replace("│", " ").split())
    assert "the folder of a run" not in plain and "adapter has to be merged first" in plain
