"""The options of `vox-host train`, in groups, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.errors import UsageError
from vox_host.float32_range import LEAST, MOST, is_held
from vox_host.training.options import Asked, parse_targets

__all__ = [
    "AdapterOptions",
    "PaceOptions",
    "SourceOptions",
    "WhereOptions",
    "asked",
    "one_of",
    "refuse_with_resume",
]

_MAX_STEPS = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What is trained on what."""

    model: Annotated[
        str | None, typer.Option("--model", help="The base model's name; an adapter has to be merged first.")
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="JSONL: chat messages with tools, prompt/completion, alpaca or text. With --resume: "
            "where the run's rows are now.",
        ),
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
            help="Rows to evaluate on and never train on: how many, or a file (with --resume: where it is "
            "now).  [default: a tenth]",
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
        str | None,
        typer.Option("--targets", help="all-linear alone, or names like q_proj,v_proj,lm_head,embed_tokens."),
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


def refuse_with_resume(*groups: Any) -> None:
    """Refuse options of a new run beside --resume.

    Raises:
        UsageError: some were given.
    """
    given = [
        "--" + field.name.replace("_", "-")
        for group in groups
        for field in fields(group)
        # How many rows run at once may be another on another day, and so may where they lie: no bit changes.
        if field.name not in ("micro_batch_size", "data", "holdout")
        and getattr(group, field.name) not in (None, False)
    ]
    if given:
        raise UsageError(
            "usage",
            f"--resume goes on with a run as it was begun; {', '.join(given)} can't be given with it; "
            "nothing was started",
            remedy="Begin a new run to train with other options.",
        )


def asked(adapter: AdapterOptions, pace: PaceOptions) -> Asked:
    """Return the options of a new run.

    Raises:
        UsageError: one is no number that can be used.
    """
    for name, value in (("--alpha", adapter.alpha), ("--learning-rate", pace.learning_rate)):
        # A range of typer's includes its ends, and takes nan and inf for numbers.
        if value is not None and not (value > 0 and is_held(value)):
            raise UsageError(
                "usage",
                f"{name} is a number above {LEAST:g} and below {MOST:g}; found {value:g}; "
                "nothing was started",
                facts=[("as the worker gets it", "float32, which holds 1.2e-38 to 3.4e38")],
            )
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


def one_of(option: str, value: str, words: tuple[str, ...]) -> Any:
    """Return `value`, a word of a closed set.

    Raises:
        UsageError: it is another.
    """
    if value not in words:
        raise UsageError(
            "usage", f"{option} is one of {', '.join(words)}; found {value!r}; nothing was started"
        )
    return value
