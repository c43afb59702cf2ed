"""vox-host train: fine-tune an adapter, and go on with a run that was stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from vox_host.app.training import (
    OpenTrainer,
    Prepared,
    TrainRequest,
    check_memory,
    check_out,
    create_run,
    open_trainer,
    prepare,
    prepare_resumed,
    run_record,
)
from vox_host.app.training import (
    train as train_run,
)
from vox_host.byte_sizes import byte_size
from vox_host.cli import early_probe
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_json, print_line, print_progress, print_warning
from vox_host.cli.train_report import LineReport, duration, make_report
from vox_host.errors import UsageError
from vox_host.hardware.probe import probe_machine
from vox_host.runs.layout import RunDirectory
from vox_host.settings import load_settings
from vox_host.training.data import preview, render_preview
from vox_host.training.dataset import parse_holdout
from vox_host.training.drive import Outcome
from vox_host.training.lock import held_run
from vox_host.training.memory import peak_resident_bytes
from vox_host.training.metrics import LineFile
from vox_host.training.options import Asked, parse_targets
from vox_host.training.record import RunRecord, read_run_record
from vox_plugin_api import train_messages as t
from vox_plugin_api.messages import Numerics

__all__ = ["register"]

_MAX_STEPS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What is trained on what."""

    model: Annotated[str | None, typer.Option("--model", help="The base model's name.")] = None
    data: Annotated[
        Path | None,
        typer.Option("--data", help="JSONL: chat messages with tools, prompt/completion, alpaca or text."),
    ] = None
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; it must not exist.")] = None
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset", help="What fills in the options left open (manifests/presets.toml).  [default: auto]"
        ),
    ] = None
    holdout: Annotated[
        str | None,
        typer.Option(
            "--holdout",
            help="Rows to evaluate on and never train on: how many, or a file.  [default: a tenth]",
        ),
    ] = None
    template: Annotated[
        str | None,
        typer.Option("--template", help="A named chat template; by default the model's own, if it has one."),
    ] = None
    answers: Annotated[
        str | None,
        typer.Option(
            "--answers", help="Which answers of a conversation are learned: all or last.  [default: all]"
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """What is trained."""

    rank: Annotated[int | None, typer.Option("--rank", min=1, max=4096, help="Of the adapter.")] = None
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="The update is multiplied by alpha / rank.")
    ] = None
    targets: Annotated[
        str | None, typer.Option("--targets", help="all-linear, or layers like q_proj,v_proj,lm_head.")
    ] = None
    rank_stabilised: Annotated[
        bool, typer.Option("--rank-stabilised", help="Multiply by alpha / sqrt(rank) instead.")
    ] = False
    dropout: Annotated[
        float | None, typer.Option("--dropout", min=0.0, max=0.999, help="Of the update's inputs.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PaceOptions:
    """How long and how often."""

    steps: Annotated[int | None, typer.Option("--steps", min=1, max=_MAX_STEPS, help="Optimizer steps.")] = (
        None
    )
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, max=10**6, help="Times that every row is seen.")
    ] = None
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", help="The peak.")] = None
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, max=2**16, help="Examples of one optimizer step.")
    ] = None
    micro_batch_size: Annotated[
        int | None,
        typer.Option("--micro-batch-size", min=1, help="Examples at once; changes memory and time, no bit."),
    ] = None
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=2, help="Tokens of the longest row.")
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**63 - 1, help="[default: 0]")] = None
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", min=1, help="Steps between evaluations on held-out rows.")
    ] = None
    save_every: Annotated[
        int | None, typer.Option("--save-every", min=1, help="Steps between checkpoints.")
    ] = None
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", min=1, help="Checkpoints kept beside the best one.  [default: 2]"),
    ] = None
    patience: Annotated[
        int | None, typer.Option("--patience", min=1, help="Evaluations without gain that end the run.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class WhereOptions:
    """On what it is trained."""

    plugin: Annotated[str | None, typer.Option("--plugin", help="A plugin's id.  [default: auto]")] = None
    numerics: Annotated[str | None, typer.Option("--numerics", help="canonical, fast, or any.")] = None
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="Refuse plugins that no released checksum vouches for.")
    ] = False


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
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, load the model, and stop before the first step."),
    ] = False,
    preview_rows: Annotated[
        int, typer.Option("--preview", min=0, help="Show this many rows as the model sees them, and stop.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
) -> None:
    """Fine-tune an adapter. Ctrl-C finishes the step, saves, and says how to go on."""
    if resume is not None:
        _refuse_with_resume(source, adapter, pace, where)
        facts = _resume(
            resume, threads, pace.micro_batch_size, dry_run=dry_run, rows=preview_rows, is_quiet=json
        )
    else:
        facts = _begin(
            source, adapter, pace, where, threads, dry_run=dry_run, rows=preview_rows, is_quiet=json
        )
    if json:
        print_json(facts)
    if "signal" in facts:
        raise typer.Exit(128 + facts["signal"])


def _begin(
    source: SourceOptions,
    adapter: AdapterOptions,
    pace: PaceOptions,
    where: WhereOptions,
    threads: int | None,
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
        asked=_asked(adapter, pace),
        preset=source.preset or "auto",
        holdout=parse_holdout(source.holdout),
        template=source.template,
        answers=_word("--answers", source.answers or "all", ("all", "last")),
        plugin=where.plugin or "auto",
        numerics=None
        if where.numerics in (None, "any")
        else _word("--numerics", where.numerics, (*get_args(Numerics), "any")),
        require_verified=where.require_verified,
    )
    prepared = prepare(settings, request, machine)
    _show(prepared, is_quiet=is_quiet)
    if rows:
        return _preview(prepared, rows)

    async def run() -> dict[str, Any]:
        async with open_trainer(settings, prepared, threads=threads) as opened:
            memory = await check_memory(settings, machine, prepared, opened)
            _show_memory(memory, is_quiet=is_quiet)
            record = run_record(prepared, opened.load)
            if dry_run:
                return _settled(prepared, record, memory)
            assert source.out is not None
            created = create_run(source.out, prepared, record)
            with held_run(created.path):
                return await _drive(created, prepared, record, opened, memory, is_quiet=is_quiet)

    facts = _run(run(), source.out)
    if dry_run and not is_quiet:
        print_line("nothing was trained or written (--dry-run)")
    return facts


def _resume(
    path: Path,
    threads: int | None,
    micro_batch_size: int | None,
    *,
    dry_run: bool,
    rows: int,
    is_quiet: bool,
) -> dict[str, Any]:
    run = RunDirectory(path)
    # First: a lock in a folder that is no run would be litter.
    read_run_record(path)
    settings = load_settings()
    with held_run(path):
        machine = probe_machine(early_probe.take())
        prepared, record = prepare_resumed(settings, run, machine, micro_batch_size=micro_batch_size)
        _show(prepared, is_quiet=is_quiet)
        if rows:
            return _preview(prepared, rows)

        async def go_on() -> dict[str, Any]:
            async with open_trainer(settings, prepared, threads=threads) as opened:
                memory = await check_memory(settings, machine, prepared, opened)
                _show_memory(memory, is_quiet=is_quiet)
                if dry_run:
                    return _settled(prepared, record, memory)
                return await _drive(run, prepared, record, opened, memory, is_quiet=is_quiet)

        return _run(go_on(), path)


def _run(work: Coroutine[Any, Any, dict[str, Any]], run: Path | None) -> dict[str, Any]:
    try:
        return asyncio.run(work)
    except asyncio.CancelledError:
        # By the second signal: the first one would have been waited for.
        goes_on = f"; `vox-host train --resume {run}` goes on from the last checkpoint" if run else ""
        print_line(f"stopped at once, the step was not finished{goes_on}", error=True)
        raise typer.Exit(130) from None


async def _drive(
    run: RunDirectory,
    prepared: Prepared,
    record: RunRecord,
    opened: OpenTrainer,
    memory: t.TrainMemory,
    *,
    is_quiet: bool,
) -> dict[str, Any]:
    report = LineReport(prepared.options.steps) if is_quiet else make_report(prepared.options.steps)
    try:
        with _stop_on_signal(report) as stop:
            outcome = await train_run(run, prepared, record, opened, report, stop.is_asked)
    finally:
        report.close()
    # A device's memory is not this process's to look into; the worker's own is.
    peak = peak_resident_bytes(opened.worker.pid) or opened.worker.resident_bytes
    measured = {"peak_memory_bytes": peak, "estimated_memory_bytes": memory.total, "memory_of": memory.place}
    timings = LineFile(run.path / "timings.jsonl", is_durable=False)
    timings.append({"event": "ended", "ended": outcome.ended, "step": outcome.course.step, **measured})
    timings.close()
    facts = {**_facts(run, prepared, outcome, report), **measured}
    if outcome.ended == "interrupted" and stop.number is not None:
        facts["signal"] = int(stop.number)
    if not is_quiet:
        _print_end(run, facts)
    elif outcome.ended == "interrupted":
        print_progress(_go_on(run))
    return facts


@dataclass(slots=True)
class _Stop:
    """Whether the user wants the run to stop."""

    number: signal.Signals | None = None

    def is_asked(self) -> bool:
        return self.number is not None


@contextmanager
def _stop_on_signal(report: LineReport) -> Iterator[_Stop]:
    """Let the first SIGINT or SIGTERM stop the run after its step, and the second one at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    stop = _Stop()

    def hear(number: signal.Signals) -> None:
        if stop.number is None:
            stop.number = number
            report.say("stopping after this step; once more stops at once, without saving")
        elif task is not None:
            task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, hear, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _refuse_with_resume(*groups: Any) -> None:
    given = [
        "--" + field.name.replace("_", "-")
        for group in groups
        for field in fields(group)
        # How many rows run at once may be another on another day: it changes no bit.
        if field.name != "micro_batch_size" and getattr(group, field.name) not in (None, False)
    ]
    if given:
        raise UsageError(
            "usage",
            f"--resume goes on with a run as it was begun; {', '.join(given)} can't be given with it; "
            "nothing was started",
            remedy="Begin a new run to train with other options.",
        )


def _asked(adapter: AdapterOptions, pace: PaceOptions) -> Asked:
    for name, value in (("--alpha", adapter.alpha), ("--learning-rate", pace.learning_rate)):
        # A range of typer's includes its ends, and takes nan and inf for numbers.
        if value is not None and not 0 < value < 1e30:
            raise UsageError("usage", f"{name} is a number above 0; found {value}; nothing was started")
    return Asked(
        steps=pace.steps,
        epochs=pace.epochs,
        rank=adapter.rank,
        alpha=adapter.alpha,
        targets=None if adapter.targets is None else parse_targets(adapter.targets),
        rank_stabilised=adapter.rank_stabilised,
        dropout=adapter.dropout,
        learning_rate=pace.learning_rate,
        batch_size=pace.batch_size,
        micro_batch_size=pace.micro_batch_size,
        max_length=pace.max_length,
        seed=pace.seed or 0,
        eval_every=pace.eval_every,
        save_every=pace.save_every,
        keep_last=pace.keep_last or 2,
        patience=pace.patience,
    )


def _word(option: str, value: str, words: tuple[str, ...]) -> Any:
    if value not in words:
        raise UsageError(
            "usage", f"{option} is one of {', '.join(words)}; found {value!r}; nothing was started"
        )
    return value


def _show(prepared: Prepared, *, is_quiet: bool) -> None:
    for warning in prepared.warnings:
        print_warning(warning)
    if is_quiet:
        return
    options, dataset, chosen = prepared.options, prepared.dataset, prepared.chosen
    template = "" if prepared.template is None else f", template from {prepared.template.origin}"
    print_progress(
        f"model {prepared.model.name} ({prepared.model.architecture}, {byte_size(prepared.model.size_bytes)})"
    )
    print_progress(
        f"plugin {chosen.plugin_id} {chosen.version}: lane {chosen.lane}, {prepared.numerics} numerics"
    )
    print_progress(
        f"data {prepared.files.rows.path}: {prepared.files.rows.format}, {len(dataset.train)} rows to train, "
        f"{len(dataset.held_out)} held out, longest {dataset.longest} tokens{template}"
    )
    print_progress(
        f"preset {options.preset}: {options.steps} steps of {options.batch_size} rows "
        f"({options.epochs:g} epochs), rank {options.rank} on {', '.join(options.targets)}, "
        f"learning rate {options.learning_rate:g}"
    )


def _preview(prepared: Prepared, rows: int) -> dict[str, Any]:
    from rich.console import Console

    console = Console()
    shown = prepared.dataset.train[:rows]
    for example in shown:
        console.rule(
            f"line {example.line}: {len(example.token_ids)} tokens, {example.trained_tokens} learned"
        )
        console.print(render_preview(preview(example, prepared.tokenizer)))
    print_line("bold and green is learned, the rest is read; nothing was trained (--preview)", error=True)
    return {"ended": "preview", "rows": len(shown)}


def _show_memory(memory: t.TrainMemory, *, is_quiet: bool) -> None:
    if not is_quiet:
        kinds = ", ".join(f"{name} {byte_size(size)}" for name, size in memory.kinds.items() if size)
        print_progress(f"memory at most {byte_size(memory.total)} of the {memory.place}: {kinds}")


def _settled(prepared: Prepared, record: RunRecord, memory: t.TrainMemory) -> dict[str, Any]:
    return {
        "ended": "dry-run",
        "run": record.model_dump(mode="json"),
        "memory": memory.model_dump(mode="json"),
        "warnings": list(prepared.warnings),
    }


def _facts(run: RunDirectory, prepared: Prepared, outcome: Outcome, report: LineReport) -> dict[str, Any]:
    course, saved = outcome.course, outcome.checkpoint
    return {
        "run": str(run.path),
        "ended": outcome.ended,
        "step": course.step,
        "steps": prepared.options.steps,
        "held_out_loss_before": course.first_loss,
        "best_held_out_loss": course.best_loss,
        "best_step": course.best_step,
        "adapter_digest": None if saved is None else saved.state.adapter_digest,
        "tokens_per_s": round(report.speed.tokens / report.speed.seconds, 1)
        if report.speed.seconds
        else None,
        "seconds": round(report.speed.seconds, 1),
        "warnings": list(prepared.warnings),
    }


def _print_end(run: RunDirectory, facts: dict[str, Any]) -> None:
    if facts["ended"] == "interrupted":
        print_line(f"stopped after step {facts['step']} of {facts['steps']}; {_go_on(run)}")
        return
    why = "" if facts["ended"] == "steps" else ": no gain on the held-out rows any more"
    print_line(f"trained {facts['step']} steps in {duration(facts['seconds'])}{why}")
    before, best = facts["held_out_loss_before"], facts["best_held_out_loss"]
    if best is not None:
        print_line(f"held-out loss {before:.4f} before, {best:.4f} at its best (step {facts['best_step']})")
        if before is not None and best >= before:
            print_warning(
                "training made the held-out loss no better: try a lower --learning-rate or more rows"
            )
    if facts["peak_memory_bytes"] is not None:
        beside = (
            f", estimated at most {byte_size(facts['estimated_memory_bytes'])} of the {facts['memory_of']}"
        )
        print_line(f"peak memory of the worker {byte_size(facts['peak_memory_bytes'])}{beside}")
    print_line(f"Next: vox-host serve --model {run.path}")


def _go_on(run: RunDirectory) -> str:
    return f"`vox-host train --resume {run.path}` goes on"
