"""vox-host train: fine-tune an adapter, and go on with a run that was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from vox_host.app.training import (
    OpenTrainer,
    base_record,
    check_memory,
    check_out,
    create_run,
    open_trainer,
    put_beside,
    run_record,
    run_training,
)
from vox_host.app.training_setup import Moved, Prepared, TrainRequest, prepare, prepare_resumed
from vox_host.cli import early_probe
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_json, print_line, print_progress
from vox_host.cli.stopping import told_when_stopped
from vox_host.cli.train_options import (
    AdapterOptions,
    PaceOptions,
    SourceOptions,
    WhereOptions,
    asked,
    one_of,
    refuse_with_resume,
)
from vox_host.cli.train_report import LineReport, make_report
from vox_host.cli.train_stop import Stop, stop_on_signal
from vox_host.cli.train_texts import (
    facts_of,
    finished_text,
    go_on_text,
    last_checkpoint_text,
    print_end,
    settled_facts,
    show_memory,
    show_numerics,
    show_prepared,
    show_preview,
)
from vox_host.errors import UsageError
from vox_host.hardware.probe import probe_machine
from vox_host.runs.layout import RunDirectory
from vox_host.runs.open import refuse_special_files
from vox_host.settings import load_settings
from vox_host.training.bound import read_run_record
from vox_host.training.dataset import parse_holdout
from vox_host.training.drive import Outcome
from vox_host.training.finished import finished
from vox_host.training.lock import held_run
from vox_host.training.memory import peak_resident_bytes
from vox_host.training.metrics import LineFile
from vox_host.training.record import RunRecord
from vox_plugin_api import train_messages as t
from vox_plugin_api.messages import Numerics

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("train", help="Fine-tune an adapter on a file of rows.")(grouped(train))


def train(
    *,
    source: SourceOptions,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with this run, as it was begun.")
    ] = None,
    adapter: AdapterOptions,
    pace: PaceOptions,
    where: WhereOptions,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, help="CPU threads; changes no bit.  [default: all usable]"),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(
            "--devices",
            min=1,
            help="GPUs that share each step, the first ones this process sees; changes no bit.",
        ),
    ] = 1,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, load the model, and stop before the first step."),
    ] = False,
    preview_rows: Annotated[
        int,
        typer.Option(
            "--preview",
            min=0,
            help="Show this many rows as the model sees them, and stop. Starts no plugin, though one that "
            "trains has to be installed.",
        ),
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
) -> None:
    """Fine-tune an adapter. Ctrl-C finishes the step, saves, and says how to go on."""
    if dry_run and preview_rows:
        raise UsageError(
            "usage",
            "--preview shows rows and starts no plugin, --dry-run loads the model; they can't be given "
            "together, and nothing was started",
            remedy="Give one, then the other.",
        )
    writes = not dry_run and not preview_rows
    with told_when_stopped(lambda: _how_it_stands((resume or source.out) if writes else None)):
        if resume is not None:
            refuse_with_resume(source, adapter, pace, where)
            facts = _resume(
                resume,
                _Means(threads, devices),
                pace.micro_batch_size,
                Moved(source.data, None if source.holdout is None else Path(source.holdout)),
                dry_run=dry_run,
                rows=preview_rows,
                is_quiet=json,
            )
        else:
            facts = _begin(
                source,
                adapter,
                pace,
                where,
                _Means(threads, devices),
                dry_run=dry_run,
                rows=preview_rows,
                is_quiet=json,
            )
    if json:
        print_json(facts)
    if "signal" in facts:
        raise typer.Exit(128 + facts["signal"])


def _how_it_stands(run: Path | None) -> str:
    """Return how a run goes on that was stopped while nothing waited for a signal; None: it writes none."""
    if run is None or not run.is_dir():
        return "nothing was trained or written, and the same command begins again"
    return last_checkpoint_text(RunDirectory(run))


@dataclass(frozen=True, slots=True)
class _Means:
    """With what a run is computed today: no bit depends on it, so another day it may be other."""

    threads: int | None
    devices: int


def _begin(
    source: SourceOptions,
    adapter: AdapterOptions,
    pace: PaceOptions,
    where: WhereOptions,
    means: _Means,
    *,
    dry_run: bool,
    rows: int,
    is_quiet: bool,
) -> dict[str, Any]:
    needs_out = not dry_run and not rows
    missing = [
        f"--{name}"
        for name in ("model", "data", *(["out"] if needs_out else []))
        if getattr(source, name) is None
    ]
    if missing:
        raise UsageError(
            "usage",
            f"{', '.join(missing)} missing; nothing was started",
            remedy="vox-host train --model NAME --data FILE --out RUN, or vox-host train --resume RUN",
        )
    assert source.model is not None and source.data is not None
    if source.out is not None:
        check_out(source.out)
    settings = load_settings()
    machine = probe_machine(early_probe.take())
    request = TrainRequest(
        model=source.model,
        data=source.data,
        asked=asked(adapter, pace),
        preset=source.preset or "auto",
        holdout=parse_holdout(source.holdout),
        template=source.template,
        answers=one_of("--answers", source.answers or "all", ("all", "last")),
        plugin=where.plugin or "auto",
        numerics=None
        if where.numerics in (None, "any")
        else one_of("--numerics", where.numerics, (*get_args(Numerics), "any")),
        require_verified=where.require_verified,
    )
    prepared = prepare(settings, request, machine)
    show_prepared(prepared, is_quiet=is_quiet)
    if rows:
        return show_preview(prepared, rows, is_quiet=is_quiet)

    stop = Stop()

    async def run() -> dict[str, Any]:
        async with open_trainer(settings, prepared, threads=means.threads) as opened:
            memory = await check_memory(settings, machine, prepared, opened, devices=means.devices)
            show_numerics(opened.load, is_quiet=is_quiet)
            show_memory(memory, is_quiet=is_quiet)
            record = run_record(prepared, opened.load)
            if dry_run:
                return settled_facts(prepared, record, memory)
            assert source.out is not None
            created = create_run(source.out, prepared, record)
            with held_run(created.path):
                return await _drive(created, prepared, record, opened, memory, stop, is_quiet=is_quiet)

    facts = _run(run(), stop, source.out)
    if dry_run and not is_quiet:
        print_line("nothing was trained or written (--dry-run)")
    return facts


def _resume(
    path: Path,
    means: _Means,
    micro_batch_size: int | None,
    moved: Moved,
    *,
    dry_run: bool,
    rows: int,
    is_quiet: bool,
) -> dict[str, Any]:
    run = RunDirectory(path)
    # First: a lock in a folder that is no run would be litter.
    refuse_special_files(path)
    read_run_record(path)
    settings = load_settings()
    with held_run(path):
        machine = probe_machine(early_probe.take())
        prepared, record = prepare_resumed(
            settings, run, machine, micro_batch_size=micro_batch_size, moved=moved
        )
        if not dry_run and not rows:
            put_beside(path, prepared)
        show_prepared(prepared, is_quiet=is_quiet)
        if rows:
            return show_preview(prepared, rows, is_quiet=is_quiet)
        outcome = finished(run, record, base_record(prepared.model))
        if not dry_run and outcome is not None:
            return _end_at_once(run, prepared, outcome, is_quiet=is_quiet)

        stop = Stop()

        async def go_on() -> dict[str, Any]:
            async with open_trainer(settings, prepared, threads=means.threads) as opened:
                memory = await check_memory(settings, machine, prepared, opened, devices=means.devices)
                show_numerics(opened.load, is_quiet=is_quiet)
                show_memory(memory, is_quiet=is_quiet)
                if dry_run:
                    return settled_facts(prepared, record, memory)
                return await _drive(run, prepared, record, opened, memory, stop, is_quiet=is_quiet)

        facts = _run(go_on(), stop, path)
        if dry_run:
            facts["is_finished"] = outcome is not None
        if dry_run and not is_quiet:
            if outcome is not None:
                print_line(finished_text(run, outcome.course.step, outcome.ended))
            print_line("nothing was trained or written (--dry-run)")
        return facts


def _end_at_once(
    run: RunDirectory, prepared: Prepared, outcome: Outcome, *, is_quiet: bool
) -> dict[str, Any]:
    """Say how a run ended that is finished: for that no model is loaded."""
    stands = facts_of(run, outcome, steps=prepared.options.steps, warnings=prepared.warnings)
    facts = {**stands, "peak_memory_bytes": None, "estimated_memory_bytes": None, "memory_of": None}
    if not is_quiet:
        print_end(run, facts)
    return facts


def _run(work: Coroutine[Any, Any, dict[str, Any]], stop: Stop, run: Path | None) -> dict[str, Any]:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        if run is None or stop.again is None:
            raise
        goes_on = last_checkpoint_text(RunDirectory(run))
        print_line(f"stopped at once, the step was not finished; {goes_on}", error=True)
        raise typer.Exit(128 + stop.again) from None


async def _drive(
    run: RunDirectory,
    prepared: Prepared,
    record: RunRecord,
    opened: OpenTrainer,
    memory: t.TrainMemory,
    stop: Stop,
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    pace = prepared.options.pace
    report = LineReport(pace) if is_quiet else make_report(pace)
    try:
        with stop_on_signal(report.say, stop):
            outcome = await run_training(run, prepared, record, opened, report, stop.is_asked, memory)
    finally:
        report.close()
    # A device's memory is not this process's to look into; the worker's own is.
    peak = peak_resident_bytes(opened.worker.pid) or opened.worker.resident_bytes
    measured = {"peak_memory_bytes": peak, "estimated_memory_bytes": memory.total, "memory_of": memory.place}
    timings = LineFile(run.path / "timings.jsonl", is_durable=False)
    timings.append({"event": "ended", "ended": outcome.ended, "step": outcome.course.step, **measured})
    timings.close()
    stands = facts_of(
        run,
        outcome,
        steps=prepared.options.steps,
        warnings=prepared.warnings,
        speed=report.speed,
    )
    facts = {**stands, **measured}
    if outcome.ended == "interrupted" and stop.number is not None:
        facts["signal"] = int(stop.number)
    if not is_quiet:
        print_end(run, facts)
    elif outcome.ended == "interrupted":
        print_progress(go_on_text(run))
    return facts
