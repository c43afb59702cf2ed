"""vox-host merge: fold an adapter into its base, as a model of its own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.cli.adapter_options import AdapterOptions, Opened
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_json, print_line, print_progress, print_warning
from vox_host.cli.stopping import BEGINS_AGAIN, stoppable, told_when_stopped
from vox_host.counted import agreeing, counted
from vox_host.errors import UsageError
from vox_host.exporting.merged_folder import write_merged_folder
from vox_host.exporting.merging import Form
from vox_host.models.catalogue import check_name
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.importing import import_model
from vox_host.models.source import License
from vox_host.quoted import quoted
from vox_host.runs.inside import refuse_inside_run
from vox_host.whole_folder import refuse_target, whole_folder
from vox_plugin_api.merge_messages import MergeResult

__all__ = ["NOTHING_WRITTEN", "register", "report_merge", "stands_text"]

NOTHING_WRITTEN = f"nothing was written, {BEGINS_AGAIN}"


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("merge", help="Fold an adapter into its base model, as a model of its own.")(grouped(merge))


@stoppable(NOTHING_WRITTEN)
def merge(
    *,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, or a folder with an adapter.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write the model to this new folder; `model import` takes it."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Put the model into the store under this name.")
    ] = None,
    options: AdapterOptions,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fold an adapter into its base model. Serving RUN itself never folds: this makes another model."""
    if out is None and name is None:
        raise UsageError(
            "usage",
            "nothing says where the merged model goes; nothing was done",
            remedy="Give --out or --name.",
        )
    if out is not None:
        refuse_target(out)
        refuse_inside_run(out, "nothing was written")
    with options.open(run) as opened:
        _merge_opened(opened, out, name, as_json=json)


def _merge_opened(opened: Opened, out: Path | None, name: str | None, *, as_json: bool) -> None:
    if name is not None and (opened.catalogue.models_dir / check_name(name)).exists():
        raise UsageError(
            "model-exists",
            f"the store has a model named {name!r}; nothing was done",
            remedy=f"Choose another name, or `vox-host model remove {name}` first.",
        )
    say: Callable[[str], None] = (lambda _: None) if as_json else print_progress
    stored = None if name is None else opened.catalogue.models_dir / name
    with told_when_stopped(lambda: stands_text(out, stored)):
        merged, facts = _merge(opened, out, name, say)
        for warning in merged.warnings:
            print_warning(warning)
        if as_json:
            print_json(facts)
            return
        report_merge(merged)
        if out is not None:
            print_line(f"The merged model is in {out}: `vox-host model import {quoted(out)}` takes it.")
        if name is not None:
            print_line(f"The merged model is {name} in the store: `vox-host serve --model {name}`.")


def _merge(
    opened: Opened, out: Path | None, name: str | None, say: Callable[[str], None]
) -> tuple[MergeResult, dict[str, Any]]:
    if out is not None:
        with whole_folder(out) as folder:
            merged = _write(opened, folder, say)
        facts = _facts(opened, merged) | {"out": str(out)}
        return merged, facts | (_import(opened, out, name) if name is not None else {})
    # On the store's own disk, where there must be room for the model anyway.
    opened.catalogue.models_dir.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".merging-", dir=opened.catalogue.models_dir))
    try:
        merged = _write(opened, aside, say)
        return merged, _facts(opened, merged) | _import(opened, aside, name or "")
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def report_merge(merged: MergeResult) -> None:
    """Say in a line what became of the matrices."""
    zero = len(merged.unchanged)
    updates = f"{counted(zero, 'update')} {agreeing(zero, 'is', 'are')}"
    idle = f", {updates} zero and changed nothing" if zero else ""
    untied = "; the output matrix is no longer the embedding" if merged.is_untied else ""
    print_line(f"{counted(len(merged.matrices), 'matrix', 'matrices')} merged{idle}{untied}.")


def stands_text(out: Path | None, stored: Path | None = None) -> str:
    """Return what a command that was stopped leaves, in a clause; neither was there before it."""
    if stored is not None and stored.exists():
        return f"{stored.name} is in the store, and only the rest was not shown"
    if out is not None and out.exists():
        return f"{out} is whole, and what comes after it was not done"
    return NOTHING_WRITTEN


def _write(opened: Opened, folder: Path, say: Callable[[str], None]) -> MergeResult:
    form: Form = "checkpoint"
    return asyncio.run(write_merged_folder(opened.job(say), folder, form))


def _import(opened: Opened, folder: Path, name: str) -> dict[str, Any]:
    source = HuggingFaceSource(folder)
    if folder.parent == opened.catalogue.models_dir:
        # Made aside and gone when this ends: what was merged is what it came from.
        source.called = opened.source.name
    # The base's terms are the merged model's, and were accepted when the base was imported.
    source.license = License(opened.base.license, opened.base.license_terms)
    imported = import_model(
        source, opened.catalogue, name=name, accept_license=True, progress=lambda *_: None
    )
    return {"name": imported.model.name, "digest": imported.model.digest}


def _facts(opened: Opened, merged: MergeResult) -> dict[str, Any]:
    return {
        "base": opened.base.name,
        "adapter": str(opened.source.folder),
        **merged.model_dump(mode="json"),
    }
