"""The options of a run: what the command line gave, filled in from a preset, settled for the data.

Pure. `Asked` is what was given (None: left open); `TrainingOptions` is what run.json keeps, with
every number that a resumed run needs to go on to the same bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from vox_host.errors import UsageError
from vox_host.training.pace import Pace, steps_per_epoch
from vox_host.training.presets import Preset
from vox_plugin_api import train_messages as t

__all__ = ["ALL_LINEAR", "Asked", "TrainingOptions", "parse_targets", "settle"]

T = TypeVar("T")
ALL_LINEAR = "all-linear"
_ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Options as given; None: left open."""

    steps: int | None = None
    epochs: int | None = None
    rank: int | None = None
    alpha: float | None = None
    targets: tuple[str, ...] | None = None
    rank_stabilised: bool = False
    dropout: float | None = None
    learning_rate: float | None = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    max_length: int | None = None
    seed: int = 0
    eval_every: int | None = None
    save_every: int | None = None
    keep_last: int = 2
    patience: int | None = None


class TrainingOptions(BaseModel):
    """Every option of a run, settled. Kept in run.json; nothing of it changes when a run is resumed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    preset: str
    steps: int = Field(ge=1)
    """Of the whole run, unless early stopping ends it before."""
    epochs: float
    """What that comes to."""
    rank: int
    alpha: float
    targets: list[str]
    rank_stabilised: bool
    dropout: float
    learning_rate: float
    schedule: Literal["constant", "linear", "cosine"]
    warmup_steps: int
    weight_decay: float
    max_gradient_norm: float | None
    batch_size: int = Field(ge=1)
    micro_batch_size: int | None
    max_length: int
    seed: int
    eval_every: int = Field(ge=1)
    save_every: int = Field(ge=1)
    keep_last: int = Field(ge=1)
    patience: int | None

    @property
    def pace(self) -> Pace:
        """When what is due."""
        return Pace(
            steps=self.steps,
            eval_every=self.eval_every,
            save_every=self.save_every,
            keep_last=self.keep_last,
            patience=self.patience,
        )

    @property
    def adapter(self) -> t.AdapterConfig:
        """The adapter, as the wire has it."""
        return t.AdapterConfig(
            rank=self.rank,
            alpha=self.alpha,
            targets=list(self.targets),
            rank_stabilised=self.rank_stabilised,
            dropout=self.dropout,
        )

    def begin(
        self, *, resume_dir: str | None = None, devices: int = 1, remember_bytes: int = 0
    ) -> t.TrainBeginParams:
        """Return the request that begins the run, or goes on from a checkpoint's folder."""
        if resume_dir is not None:
            return t.TrainBeginParams(
                resume_dir=resume_dir,
                micro_batch_size=self.micro_batch_size,
                devices=devices,
                remember_bytes=remember_bytes,
            )
        return t.TrainBeginParams(
            adapter=self.adapter,
            optimizer=t.OptimizerConfig(
                learning_rate=self.learning_rate,
                weight_decay=self.weight_decay,
                max_gradient_norm=self.max_gradient_norm,
            ),
            schedule=t.Schedule(
                kind=self.schedule,
                warmup_steps=self.warmup_steps,
                total_steps=None if self.schedule == "constant" else self.steps,
            ),
            seed=self.seed,
            micro_batch_size=self.micro_batch_size,
            devices=devices,
            remember_bytes=remember_bytes,
        )


def parse_targets(text: str) -> tuple[str, ...]:
    """Return the targets that a comma-separated text names; `all-linear` stands for every layer's seven.

    Raises:
        UsageError: it names none, or one twice, or `all-linear` beside others.
    """
    if text == ALL_LINEAR:
        return _ALL_LINEAR
    names = tuple(name.strip() for name in text.split(","))
    if ALL_LINEAR in names:
        others = [name for name in names if name not in ("", ALL_LINEAR)]
        spelled = ",".join(dict.fromkeys([*_ALL_LINEAR, *others]))
        raise UsageError(
            "usage",
            f"--targets {ALL_LINEAR} stands alone; found {text!r}; nothing was started",
            remedy=f"Its names with others beside them: --targets {spelled}",
        )
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            "usage",
            f"--targets is {ALL_LINEAR} or names with commas between, each once; found {text!r}; "
            "nothing was started",
        )
    return names


def settle(asked: Asked, name: str, preset: Preset, *, examples: int, max_length: int) -> TrainingOptions:
    """Fill in what was left open, for a run on so many examples of at most so many tokens.

    Raises:
        UsageError: options contradict each other.
    """
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("usage", "give --steps or --epochs, not both; nothing was started")
    batch_size = _or(asked.batch_size, preset.batch_size)
    per_epoch = steps_per_epoch(examples, batch_size)
    if asked.steps is None and asked.epochs is None:
        steps = preset.steps if preset.steps is not None else (preset.epochs or 1) * per_epoch
    else:
        steps = asked.steps if asked.steps is not None else (asked.epochs or 1) * per_epoch
    often = max(1, math.ceil(steps / preset.evaluations))
    rank = _or(asked.rank, preset.rank)
    return TrainingOptions(
        preset=name,
        steps=steps,
        epochs=round(steps / per_epoch, 3),
        rank=rank,
        # A rank of one's own keeps the preset's ratio: the update's size then stays as it was tuned.
        alpha=_or(asked.alpha, preset.alpha * rank / preset.rank),
        targets=list(_or(asked.targets, tuple(preset.targets))),
        rank_stabilised=asked.rank_stabilised,
        dropout=_or(asked.dropout, preset.dropout),
        learning_rate=_or(asked.learning_rate, preset.learning_rate),
        schedule=preset.schedule,
        warmup_steps=int(steps * preset.warmup_share),
        weight_decay=preset.weight_decay,
        max_gradient_norm=preset.max_gradient_norm,
        batch_size=batch_size,
        micro_batch_size=asked.micro_batch_size,
        max_length=max_length,
        seed=asked.seed,
        eval_every=_or(asked.eval_every, often),
        save_every=_or(asked.save_every, often),
        keep_last=asked.keep_last,
        patience=asked.patience,
    )


def _or(given: T | None, otherwise: T) -> T:
    return otherwise if given is None else given
