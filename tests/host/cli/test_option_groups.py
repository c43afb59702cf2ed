"""Options defined once as a dataclass, and the commands that take them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

import pytest
import typer

from vox_host.cli.generate import chat, generate
from vox_host.cli.model_options import RunOptions
from vox_host.cli.option_groups import grouped
from vox_host.cli.serve import serve_model


@dataclass(frozen=True, kw_only=True)
class Loudness:
    volume: Annotated[int, typer.Option("--volume", min=0, max=10, help="How loud.")]
    is_muted: Annotated[bool, typer.Option("--mute", help="Not at all.")] = False


def call(*words: str) -> list[object]:
    got: list[object] = []

    def play(
        *,
        file: Annotated[str, typer.Option("--file")],
        loudness: Loudness,
        times: Annotated[int, typer.Option("--times")] = 1,
    ) -> None:
        """Play it."""
        got.extend((file, loudness, times))

    app = typer.Typer(add_completion=False)
    app.command()(grouped(play))
    app(list(words), standalone_mode=False)
    return got


def test_a_command_gets_its_group_as_one_value():
    assert call("--file", "a", "--volume", "3") == ["a", Loudness(volume=3), 1]
    assert call("--times", "2", "--mute", "--file", "a", "--volume", "10") == [
        "a",
        Loudness(volume=10, is_muted=True),
        2,
    ]


@pytest.mark.parametrize("words", [("--file", "a"), ("--file", "a", "--volume", "11")])
def test_a_field_without_default_is_required_and_bounds_hold(words):
    with pytest.raises(Exception, match=r"(?i)volume|less than or equal to 10"):
        call(*words)


def test_the_help_shows_the_group_where_it_stands(capsys):
    call("--help")
    shown = capsys.readouterr().out
    assert "Play it." in shown
    assert shown.index("--file") < shown.index("--volume") < shown.index("--mute") < shown.index("--times")


@pytest.mark.parametrize("command", [generate, chat, serve_model])
def test_every_command_that_runs_a_model_has_all_options_of_running_one(command):
    wanted = [field.name for field in fields(RunOptions)]
    assert list(grouped(command).__signature__.parameters)[-len(wanted) :] == wanted
