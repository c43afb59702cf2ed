"""vox-host model: import, list, show, verify, remove.

`list` and `show` read manifests and what `stat` says; what imports is loaded when it is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.byte_sizes import byte_size
from vox_host.cli.output import (
    print_json,
    print_line,
    print_progress,
    print_table,
    print_warning,
    render_error,
)
from vox_host.cli.stopping import BEGINS_AGAIN, COMPARED_IN_PART, SHOWN_IN_PART, stoppable, told_when_stopped
from vox_host.counted import agreeing, counted
from vox_host.errors import IntegrityError, VoxError
from vox_host.models.catalogue import Catalogue, check_name
from vox_host.models.installed import BrokenModel, InstalledModel
from vox_host.models.safetensors_write import Progress
from vox_host.models.verifying import verify_files
from vox_host.settings import load_settings, tool_environment

__all__ = ["register"]

model_app = typer.Typer(
    help="Import, list, show, verify and remove models.", no_args_is_help=True, rich_markup_mode=None
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ModelName = Annotated[str, typer.Argument(metavar="NAME", help="The model's name in the store.")]


def register(app: typer.Typer) -> None:
    """Add the group to the root command."""
    app.add_typer(model_app, name="model")


@model_app.command("import")
@stoppable(f"nothing was imported, {BEGINS_AGAIN}")
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A GGUF file, a Hugging Face folder, or a demo model.")
    ],
    name: Annotated[str | None, typer.Option(help="The name in the store; else the source's own.")] = None,
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="You have read the model's licence and accept it.")
    ] = False,
    wheels: Annotated[
        Path | None, typer.Option(help="A folder with a demo model's wheels, in place of fetching them.")
    ] = None,
    json: Json = False,
) -> None:
    """Import a model into the store: all of it, or nothing."""
    from vox_host.models.importing import check_import, import_model, open_source

    if name is not None:
        check_name(name)
    catalogue = Catalogue(load_settings().models_dir)
    opened = open_source(source, environment=tool_environment(), wheels_dir=wheels)
    # Whatever can be refused is refused before anyone is asked to read a licence.
    target = catalogue.models_dir / check_import(opened, catalogue, name=name)
    was_there = target.exists()
    for note in opened.notes:
        print_warning(note)
    print_line(f"Licence: {opened.license.id}. {opened.license.terms}", error=True)
    if accept_license:
        print_line("Accepted with --accept-license.", error=True)
    with told_when_stopped(lambda: _import_as_it_stands(target, was_there=was_there)):
        with _progress() as progress:
            imported = import_model(
                opened,
                catalogue,
                name=name,
                accept_license=accept_license,
                progress=progress,
            )
        if json:
            print_json(
                _facts(imported.model) | {"was_there": imported.was_there, "notes": list(opened.notes)}
            )
            return
        did = "was already imported" if imported.was_there else "is imported"
        print_line(
            f"{imported.model.name} {did}: {byte_size(imported.model.size_bytes)} in {imported.model.path}"
        )


@model_app.command("list")
@stoppable(SHOWN_IN_PART)
def list_models(json: Json = False) -> None:
    """List every model in the store, the broken ones too.

    State: ok (no file was touched since its last check), changed (some were: `model verify` reads
    them), unchecked (no check is on record), broken. No weight is read.
    """
    catalogue = Catalogue(load_settings().models_dir)
    entries = catalogue.list()
    if json:
        print_json({"store": str(catalogue.models_dir), "models": [_facts(entry) for entry in entries]})
        return
    if not entries:
        print_line(f"No model is in {catalogue.models_dir}.")
        print_line("vox-host model import SOURCE")
        return
    print_table(
        ("model", "architecture", "weights", "context", "license", "state"), [_row(e) for e in entries]
    )


@model_app.command()
@stoppable(SHOWN_IN_PART)
def show(
    name: ModelName,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its digest.")] = False,
    json: Json = False,
) -> None:
    """Show one model: where it is, where it came from, on what terms."""
    catalogue = Catalogue(load_settings().models_dir)
    model = catalogue.find(name)
    facts = _facts(model)
    if verify:
        _verify(model)
        # The check is on record now.
        facts = _facts(catalogue.find(name)) | {"verified": True}
    if json:
        print_json(facts)
        return
    for key, value in facts.items():
        if key in ("source", "merged_from") and value is not None:
            value = ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, dict))
        if isinstance(value, list):
            value = ", ".join(value)
        if value not in (None, ""):
            print_line(f"{key:<16} {value}")


@model_app.command()
@stoppable(COMPARED_IN_PART)
def verify(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this model.")] = None,
    json: Json = False,
) -> None:
    """Read every byte of models again and compare it with what was imported."""
    catalogue = Catalogue(load_settings().models_dir)
    if name is not None:
        report = [_verify(catalogue.find(name))]
    else:
        report = [_verify_or_say_why(entry) for entry in catalogue.list()]
    if json:
        print_json({"models": report})
    else:
        for row in report:
            if row["verified"]:
                files = f"{counted(row['files'], 'file')} {agreeing(row['files'], 'matches', 'match')}"
                print_line(f"{row['model']}: {files} sha256:{row['digest']}")
    if not all(row["verified"] for row in report):
        raise typer.Exit(IntegrityError.exit_code)


def _verify(model: InstalledModel) -> dict[str, Any]:
    with _progress() as progress:
        files = verify_files(model, progress)
    return {"model": model.name, "verified": True, "files": files, "digest": model.digest}


def _verify_or_say_why(entry: InstalledModel | BrokenModel) -> dict[str, Any]:
    """Verify one of many: what is wrong with it is printed, and the next one's turn comes."""
    error: VoxError
    if isinstance(entry, BrokenModel):
        error = entry.error
    else:
        try:
            return _verify(entry)
        except VoxError as raised:
            error = raised
    print_line(f"{entry.name}: {render_error(error)}", error=True)
    return {"model": entry.name, "verified": False, "error": error.as_dict()}


@model_app.command()
@stoppable(lambda name, **_: _removal_as_it_stands(name))
def remove(name: ModelName, json: Json = False) -> None:
    """Delete one model from the store, broken or not."""
    path = Catalogue(load_settings().models_dir).remove(name)
    if json:
        print_json({"removed": name, "path": str(path)})
        return
    print_line(f"{name} is removed; it was in {path}")


def _import_as_it_stands(target: Path, *, was_there: bool) -> str:
    if was_there:
        return f"{target.name} was in the store before, and nothing was changed"
    if target.exists():
        return f"{target.name} is imported, and only the rest was not shown"
    return f"nothing was imported, {BEGINS_AGAIN}"


def _removal_as_it_stands(name: str) -> str:
    if (load_settings().models_dir / name).exists():
        return f"{name} is still in the store, {BEGINS_AGAIN}"
    return f"{name} is not in the store any more; the next import or removal sweeps what is left of it"


def _facts(entry: InstalledModel | BrokenModel) -> dict[str, Any]:
    if isinstance(entry, BrokenModel):
        return {
            "name": entry.name,
            "path": str(entry.path),
            "state": "broken",
            "code": entry.code,
            "problem": entry.problem,
            "missing": list(entry.missing),
            "facts": dict(entry.error.facts),
        }
    return {
        "name": entry.name,
        "path": str(entry.path),
        "state": entry.state,
        "touched": list(entry.touched),
        "architecture": entry.architecture,
        "context_length": entry.context_length,
        "size_bytes": entry.size_bytes,
        "license": entry.license,
        "license_terms": entry.license_terms,
        "digest": entry.digest,
        "imported_at": entry.imported_at,
        "source": entry.source,
        "merged_from": entry.merged_from.model_dump() if entry.merged_from is not None else None,
    }


def _row(entry: InstalledModel | BrokenModel) -> tuple[str, ...]:
    if isinstance(entry, BrokenModel):
        return (entry.name, "-", "-", "-", "-", f"broken: {entry.problem}")
    context = str(entry.context_length or "-")
    return (
        entry.name,
        entry.architecture,
        byte_size(entry.size_bytes),
        context,
        entry.license,
        _state(entry),
    )


def _state(model: InstalledModel) -> str:
    if model.state == "ok":
        return "ok"
    files = (
        f"{model.touched[0]} and {len(model.touched) - 1} more"
        if len(model.touched) > 1
        else model.touched[0]
    )
    said = "changed since the last check" if model.state == "changed" else "unchecked"
    return f"{said}: {files}; vox-host model verify {model.name}"


_LONG_STEP_BYTES = 16 << 20
"""A shorter step is over before its quarters could tell anything."""


def _tell_in_lines() -> Progress:
    """Return a callback that prints one line per step, or one per quarter where the step is long."""
    told: dict[str, int] = {}

    def tell(step: str, done: int, total: int) -> None:
        quarter = 4 * done // total if total else 4
        if quarter <= told.get(step, -1) or (total < _LONG_STEP_BYTES and quarter < 4):
            return
        told[step] = quarter
        if total >= _LONG_STEP_BYTES:
            print_progress(f"{step} {25 * quarter}% of {byte_size(total)}")
        else:
            # A step of one has no bytes to count.
            print_progress(f"{step} {byte_size(total)}" if total > 1 else step)

    return tell


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a progress callback: a moving bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _tell_in_lines()
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done)

        yield draw
