"""What `vox-host train` shows before a run and after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vox_host.app.model_info import describe_numerics
from vox_host.app.training_setup import Prepared
from vox_host.byte_sizes import byte_size
from vox_host.cli.output import print_line, print_progress, print_warning
from vox_host.cli.train_report import Speed, duration
from vox_host.counted import counted
from vox_host.quoted import quoted
from vox_host.runs.layout import RunDirectory
from vox_host.training.checkpoints import Checkpoints
from vox_host.training.data import Example, marked_preview, preview, render_preview
from vox_host.training.drive import Outcome
from vox_host.training.record import RunRecord
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = [
    "facts_of",
    "finished_text",
    "go_on_text",
    "last_checkpoint_text",
    "print_end",
    "settled_facts",
    "show_memory",
    "show_numerics",
    "show_preview",
    "show_prepared",
]


def show_prepared(prepared: Prepared, *, is_quiet: bool) -> None:
    """Say what will be trained, on what, with which options."""
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
        f"data {prepared.files.rows.path}: {prepared.files.rows.format}, "
        f"{counted(len(dataset.train), 'row')} to train, "
        f"{len(dataset.held_out)} held out, longest {counted(dataset.longest, 'token')}{template}"
    )
    print_progress(
        f"preset {options.preset}: {counted(options.steps, 'step')} of "
        f"{counted(options.batch_size, 'row')} ({counted(options.epochs, 'epoch')}), "
        f"rank {options.rank} on {', '.join(options.targets)}, learning rate {options.learning_rate:g}"
    )


def show_preview(prepared: Prepared, rows: int, *, is_quiet: bool) -> dict[str, Any]:
    """Show rows as the model sees them, with what is learned; return the facts, rows included, for --json."""
    shown = prepared.dataset.train[:rows]
    if not is_quiet:
        how = _print_rows(prepared, shown)
        print_line(f"{how}, the rest is read; nothing was trained (--preview)", error=True)
        print_line(
            f"not checked, since no plugin was started: {' and '.join(_LEFT_OPEN)}; --dry-run does",
            error=True,
        )
    return {
        "ended": "preview",
        "rows": [_row_facts(prepared, example) for example in shown],
        "not_checked": list(_LEFT_OPEN),
        "warnings": list(prepared.warnings),
    }


_LEFT_OPEN = ("targets", "memory")
"""What only the worker can tell, which has the model's layers."""


def _print_rows(prepared: Prepared, shown: Sequence[Example]) -> str:
    """Print them to stdout; return how what is learned is told from the rest."""
    from rich.console import Console

    console = Console()
    is_coloured = console.color_system is not None and not console.no_color
    for example in shown:
        pieces = preview(example, prepared.tokenizer)
        title = (
            f"line {example.line}: {counted(len(example.token_ids), 'token')}, "
            f"{example.trained_tokens} learned"
        )
        if is_coloured:
            console.rule(title)
            console.print(render_preview(pieces))
        else:
            print_line(f"--- {title}")
            print_line(marked_preview(pieces))
    return "bold and green is learned" if is_coloured else "between >>> and <<< is learned"


def _row_facts(prepared: Prepared, example: Example) -> dict[str, Any]:
    return {
        "line": example.line,
        "tokens": len(example.token_ids),
        "learned": example.trained_tokens,
        "pieces": [
            {"text": piece.text, "learned": piece.is_trained, "token_ids": list(piece.token_ids)}
            for piece in preview(example, prepared.tokenizer)
        ],
    }


def show_numerics(load: m.LoadResult, *, is_quiet: bool) -> None:
    """Say how far from canonical a run will be that is not canonical itself."""
    if not is_quiet and load.numerics_error is not None:
        print_progress(describe_numerics(load.numerics, load.numerics_error))


def show_memory(memory: t.TrainMemory, *, is_quiet: bool) -> None:
    """Say what the run takes at most."""
    if not is_quiet:
        kinds = ", ".join(f"{name} {byte_size(size)}" for name, size in memory.kinds.items() if size)
        place = f"of the {memory.place}" if memory.devices == 1 else f"of each of {memory.devices} devices"
        print_progress(f"memory, estimated: {byte_size(memory.total)} {place}: {kinds}")


def settled_facts(prepared: Prepared, record: RunRecord, memory: t.TrainMemory) -> dict[str, Any]:
    """Return what a dry run tells programs."""
    return {
        "ended": "dry-run",
        "run": record.model_dump(mode="json"),
        "memory": memory.model_dump(mode="json"),
        "warnings": list(prepared.warnings),
    }


def facts_of(
    run: RunDirectory,
    outcome: Outcome,
    *,
    steps: int,
    warnings: Sequence[str] = (),
    speed: Speed | None = None,
) -> dict[str, Any]:
    """Return how a run stands, for --json; without `speed` nothing was trained now."""
    speed = speed or Speed()
    course, saved = outcome.course, outcome.checkpoint
    return {
        "run": str(run.path),
        "ended": outcome.ended,
        "step": course.step,
        "steps": steps,
        "held_out_loss_before": course.first_loss,
        "best_held_out_loss": course.best_loss,
        "best_step": course.best_step,
        "adapter_digest": None if saved is None else saved.state.adapter_digest,
        "tokens_per_s": round(speed.tokens / speed.seconds, 1) if speed.seconds else None,
        "seconds": round(speed.passed, 1),
        "warnings": list(warnings),
    }


def print_end(run: RunDirectory, facts: dict[str, Any]) -> None:
    """Print how a run stands when the loop has ended."""
    if facts["ended"] == "interrupted":
        print_line(f"stopped after step {facts['step']} of {facts['steps']}; {go_on_text(run)}")
        return
    if facts["tokens_per_s"] is None:
        print_line(finished_text(run, facts["step"], facts["ended"]))
    else:
        why = _why(facts["ended"])
        print_line(f"trained {counted(facts['step'], 'step')} in {duration(facts['seconds'])}{why}")
    before, best = facts["held_out_loss_before"], facts["best_held_out_loss"]
    if best is not None:
        print_line(f"held-out loss {before:.4f} before, {best:.4f} at its best (step {facts['best_step']})")
        if before is not None and best >= before:
            print_warning(
                "training made the held-out loss no better: try a lower --learning-rate or more rows"
            )
    if facts["peak_memory_bytes"] is not None:
        beside = f", estimated {byte_size(facts['estimated_memory_bytes'])} of the {facts['memory_of']}"
        print_line(f"peak memory of the worker {byte_size(facts['peak_memory_bytes'])}{beside}")
    print_line(f"Next: vox-host serve --model {quoted(run.path)}")


def finished_text(run: RunDirectory, step: int, ended: str) -> str:
    """Return what is said of a run in which nothing is left to do."""
    return (
        f"{run.path} was finished before: {counted(step, 'step')} trained{_why(ended)}; nothing is left to do"
    )


def _why(ended: str) -> str:
    return "" if ended == "steps" else ": no gain on the held-out rows any more"


def go_on_text(run: RunDirectory) -> str:
    """Return the command that goes on with a run, in a clause."""
    return f"`vox-host train --resume {quoted(run.path)}` goes on"


def last_checkpoint_text(run: RunDirectory) -> str:
    """Return from where a run goes on that was stopped without saving, and by which command, in a clause."""
    steps = Checkpoints(run.checkpoints).steps()
    if steps:
        return f"{go_on_text(run)} from the last checkpoint, step {max(steps)}"
    return (
        f"there is no checkpoint yet: `vox-host train --resume {quoted(run.path)}` begins again from step 1"
    )
