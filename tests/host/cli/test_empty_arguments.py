"""An empty argument is refused wherever it is given: as a path it would be the current folder."""

import importlib
import json

import pytest
import typer

from vox_host.cli import _MAY_BE_EMPTY, COMMANDS, run


def every_value():
    """(the words of a command, one of its options or None for its argument) of all that take a value."""
    found = []
    for name, (module, _) in COMMANDS.items():
        app = typer.Typer()
        app.callback()(lambda: None)
        importlib.import_module(module).register(app)
        group = typer.main.get_command(app).commands[name]
        for words, command in [((name, sub), c) for sub, c in getattr(group, "commands", {}).items()] or [
            ((name,), group)
        ]:
            for parameter in command.params:
                if getattr(parameter, "is_bool_flag", False) or parameter.name == "help":
                    continue
                found.append((words, parameter.opts[0] if parameter.opts[0].startswith("--") else None))
    return found


VALUES = every_value()


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("VOX_HOME", str(tmp_path / "home"))
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []
    assert not (tmp_path / "home").exists()


def test_the_options_that_name_paths_are_among_them():
    options = {option for _, option in VALUES}
    assert {
        "--record",
        "--path",
        "--out",
        "--wheels",
        "--find-links",
        "--constraint",
        "--prompt-file",
    } <= options
    assert (("model", "import"), None) in VALUES
    assert len(VALUES) > 50


@pytest.mark.parametrize(
    ("words", "option"), [v for v in VALUES if v[1] not in _MAY_BE_EMPTY], ids=lambda v: str(v)
)
def test_every_value_is_refused_when_empty(words, option, capsys):
    for given in ([f"{option}="], [option, ""]) if option else ([""],):
        assert run([*words, *given, "--json"]) == 2
        captured = capsys.readouterr()
        error = json.loads(captured.out)["error"]
        what = option or f"argument {len(words) + 1}"
        assert error["message"] == f"{what} is empty; nothing was done"
        assert "unset variable" in error["remedy"]


def test_a_text_of_ones_own_may_be_empty(capsys):
    run(["generate", "--model", "absent", "--prompt", ""])
    assert "error[model-not-found]" in capsys.readouterr().err
