"""vox-host export: an adapter, or the model it makes of its base, for other software."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from vox_host.cli.adapter_options import AdapterOptions, Opened
from vox_host.cli.merge import NOTHING_WRITTEN, report_merge, stands_text
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_json, print_line, print_progress, print_warning
from vox_host.cli.stopping import stoppable, told_when_stopped
from vox_host.errors import ModelError, UsageError
from vox_host.exporting.gguf_adapter import write_gguf_adapter
from vox_host.exporting.gguf_model import write_gguf_model
from vox_host.exporting.merged_folder import write_merged_folder
from vox_host.exporting.peft_export import write_peft_folder
from vox_host.exporting.terms import write_terms
from vox_host.runs.inside import refuse_inside_run
from vox_host.whole_folder import Making, refuse_target, whole_folder
from vox_plugin_api.checkpoint import CheckpointError, read_json_object
from vox_plugin_api.families import ModelConfig, parse_config
from vox_plugin_api.merge_messages import MergeResult

__all__ = ["register"]

_FORMS = ("peft", "hf", "gguf")
Say = Callable[[str], None]


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("export", help="Write an adapter, or the merged model, for other software.")(grouped(export))


@stoppable(NOTHING_WRITTEN)
def export(
    *,
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, or a folder with an adapter.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="peft: the adapter as PEFT has it. hf: the merged model as transformers loads it. gguf: the "
            "adapter as llama.cpp loads it beside its base (--lora).",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A new folder; default: beside RUN: RUN-peft, RUN-hf or RUN-gguf."),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="With --to gguf: the merged model, as one file.")
    ] = False,
    options: AdapterOptions,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write an adapter, or the model that it makes of its base, for other software."""
    if to not in _FORMS:
        raise UsageError("usage", f"--to is one of {', '.join(_FORMS)}; found {to!r}")
    if merged and to != "gguf":
        what = "hf is always merged" if to == "hf" else "peft is the adapter on its own"
        raise UsageError("usage", f"--merged is for --to gguf; {what}; nothing was done")
    if options.dtype != "auto" and (to == "peft" or (to == "gguf" and not merged)):
        raise UsageError(
            "usage",
            f"--dtype {options.dtype} is of a merged model; --to {to} copies the adapter's own tensors, and "
            "nothing was done",
            remedy="Leave --dtype out, or write the merged model: --to hf, or --to gguf --merged.",
        )
    making = Making()
    if out is None:
        out = _beside(Path(run), to)
        making = Making(if_there=lambda _: "Name another folder: --out DIR.")
    if Path(run).is_dir():
        # Else what is wrong with RUN is to be said first.
        refuse_target(out, making)
        refuse_inside_run(out, "nothing was written")
    with options.open(run) as opened:
        _export_opened(opened, out, making, to, is_merged=merged, as_json=json)


def _export_opened(
    opened: Opened, out: Path, making: Making, to: str, *, is_merged: bool, as_json: bool
) -> None:
    say: Say = (lambda _: None) if as_json else print_progress
    with told_when_stopped(lambda: stands_text(out)):
        with whole_folder(out, making) as folder:
            result = _write(opened, folder, to, is_merged=is_merged, say=say)
            if to != "hf":  # which is a model folder, and has them
                what = "The merged model" if is_merged else "The adapter"
                base = f"{opened.base.name} (sha256:{opened.base.digest})"
                write_terms(
                    opened.base, folder, f"{what} {opened.source.name} of {base}, written by vox-host."
                )
            files = sorted(path.name for path in folder.iterdir())
        for warning in result.warnings if result is not None else ():
            print_warning(warning)
        if as_json:
            facts = {"to": to, "out": str(out), "base": opened.base.name, "files": files}
            print_json(facts | ({"merged": result.model_dump(mode="json")} if result is not None else {}))
            return
        if result is not None:
            report_merge(result)
        print_line(f"{out}: {', '.join(files)}")
        print_line(
            f"The base model's terms apply ({opened.base.license}): README.md there says where they are."
        )


def _beside(run: Path, to: str) -> Path:
    """The folder that is written where none is named: the run's own name, and what it is for."""
    place = run if run.name not in ("", "..") else run.resolve()
    return place.with_name(f"{place.name}-{to}")


def _write(opened: Opened, folder: Path, to: str, *, is_merged: bool, say: Say) -> MergeResult | None:
    """Fill the folder; return what was merged, if anything was."""
    if to == "peft":
        is_tower = _config(opened).is_text_tower
        write_peft_folder(opened.source, folder, lambda *_: None, is_text_tower=is_tower)
        return None
    if to == "hf":
        return asyncio.run(write_merged_folder(opened.job(say), folder, "hugging-face"))
    config = _config(opened)
    stem = opened.source.name
    if is_merged:
        target = folder / f"{stem}.gguf"
        return asyncio.run(write_gguf_model(opened.job(say), config, folder, target))
    write_gguf_adapter(opened.source, opened.base, config, folder / f"{stem}-lora.gguf", lambda *_: None)
    return None


def _config(opened: Opened) -> ModelConfig:
    path = opened.base.path / "config.json"
    try:
        return parse_config(read_json_object(path), source=str(path))
    except CheckpointError as error:
        raise ModelError(
            error.code,
            f"{error.message}; nothing was written",
            facts=list(error.facts.items()),
            remedy=error.remedy,
        ) from None
