"""The JSON file of `--out`: what it may replace is known before minutes of work, and a failure names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer

from vox_host.cli.output import print_json, report_error
from vox_host.errors import UsageError
from vox_host.named_file import TEXT_LIMIT_BYTES
from vox_host.stat_cache import write_aside
from vox_plugin_api.strict_json import CheckpointError, parse_json_object

__all__ = ["refuse_bad_target", "show_and_write"]


def refuse_bad_target(path: Path, what: str, is_ours: Callable[[Mapping[str, Any]], bool]) -> None:
    """Refuse a file that can't be written, or that is another's, before minutes of work.

    Args:
        what: the kind of file that the command writes, and would replace.
        is_ours: says of a JSON object whether it is of that kind.

    Raises:
        UsageError: `out-folder`: its folder does not exist, or it is no file; `out-exists`: it is there,
            and nothing that this command wrote, nor empty.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError(
            "out-folder",
            f"--out {path}: the folder does not exist; nothing was started",
            remedy="Make it first, or name another place.",
        )
    if path.is_symlink():
        # Written aside and renamed: the link would become a file, and what it names would stay as it was.
        raise UsageError(
            "out-folder",
            f"--out {path}: this is a symbolic link; nothing was started",
            remedy="Name the file itself.",
        )
    if path.exists() and not path.is_file():
        raise UsageError(
            "out-folder",
            f"--out {path}: this is no file; nothing was started",
            remedy="Name a file.",
        )
    if path.exists() and path.stat().st_size and not _is_ours(path, is_ours):
        raise UsageError(
            "out-exists",
            f"--out {path} exists and is no {what}; nothing was started, since no other file is "
            "ever replaced",
            remedy="Name another file, or move that one away.",
        )


def _is_ours(path: Path, is_ours: Callable[[Mapping[str, Any]], bool]) -> bool:
    try:
        if path.stat().st_size > TEXT_LIMIT_BYTES:
            return False
        return is_ours(parse_json_object(path.read_bytes(), source=str(path), code="out-exists"))
    except (OSError, CheckpointError):
        return False


def show_and_write(
    path: Path | None, facts: dict[str, Any], show: Callable[[], None], *, as_json: bool
) -> None:
    """Print facts and write them to `path`, if any, in one step; a full disk costs the file alone.

    What was computed is shown first. With `as_json` stdout has one document whatever happens: an error
    of the file is a field of it.

    Args:
        show: prints them for people.

    Raises:
        UsageError: `out-unwritten`, the file named.
        typer.Exit: the same with `as_json`, all told.
    """
    if not as_json:
        show()
        _write(path, facts)
        return
    try:
        _write(path, facts)
    except UsageError as error:
        print_json({**facts, "error": error.as_dict()})
        raise typer.Exit(report_error(error, debug=False, as_json=False)) from None
    print_json(facts)


def _write(path: Path | None, facts: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        write_aside(path.absolute(), json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n")
    except OSError as problem:
        raise UsageError(
            "out-unwritten",
            f"--out {path} can't be written: {problem.strerror}; what was found is printed, and only there",
            remedy="Make room, or name another file with --out, and run it again.",
        ) from None
