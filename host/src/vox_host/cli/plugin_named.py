"""The plugin that a command names, and the options that all of the group's commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from vox_host.discovery import discover
from vox_host.hardware.system import System
from vox_host.resolution import Candidate, named_plugin
from vox_host.settings import Settings

__all__ = ["Json", "PluginId", "find_in", "find_plugin"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PluginId = Annotated[str, typer.Argument(metavar="ID", help="The plugin's id.")]


def find_plugin(settings: Settings, plugin: str) -> Candidate:
    """Return the plugin of that id, installed or beside the host, broken or not.

    Raises:
        VoxError: there is none.
    """
    return find_in(discover(settings.plugins_dir), plugin)


def find_in(candidates: list[Candidate], plugin: str) -> Candidate:
    """Return the one of that id among `candidates`.

    Raises:
        VoxError: there is none.
    """
    return named_plugin(candidates, plugin, System().os)
