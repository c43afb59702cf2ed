"""One optimizer step, defined once over the operators.

Examples in order go in; they run in micro-batches; each parameter's gradient is made per example
and summed by the aligned tree over the examples; the sum is divided once by the trained tokens
of the step, clipped, and AdamW follows. A step is all or nothing: it works on copies, and the
trainer's state is exchanged when every value is known to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from mens_core.adapters.apply import all_from_lane, from_lane, make_loras, to_lane
from mens_core.adapters.initial import initial_tensors
from mens_core.adapters.keys import adapter_digest
from mens_core.adapters.plan import AdapterPlan, plan_adapter
from mens_core.differentiate import Score
from mens_core.example_tree import ExampleTree
from mens_core.float32 import exact, nearest
from mens_core.micro_batches import Example
from mens_core.models.model import Model
from mens_core.models.passes import Dropout
from mens_core.non_finite import not_finite, of_step
from mens_core.ops import Tensor
from mens_core.schedule import BetaPowers, adamw_constants, learning_rate
from mens_core.scoring import score_examples
from mens_core.step_gradients import sum_gradients
from mens_core.training_ops import TrainingOps
from vox_plugin_api.train_messages import AdapterConfig, OptimizerConfig, Schedule

if TYPE_CHECKING:  # loaded where a training runs on several devices
    from mens_core.peers.team import Team

__all__ = ["StepOutcome", "Trainer", "TrainerConfig", "TrainerState"]

Floats = npt.NDArray[np.float32]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """What a run is, apart from its data."""

    adapter: AdapterConfig
    optimizer: OptimizerConfig
    schedule: Schedule
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """How far a run is, on the host: enough to go on to the same bytes."""

    step: int
    """Steps taken."""
    parameters: Mapping[str, Floats]
    first_moments: Mapping[str, Floats]
    second_moments: Mapping[str, Floats]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What a step tells."""

    step: int
    """Steps taken, this one included."""
    loss: float
    gradient_norm: float
    learning_rate: float
    trained_tokens: int
    adapter_digest: str


@dataclass(frozen=True, slots=True)
class _Held:
    """All parameters and their moments on the lane, in the order of the plan's shapes."""

    values: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]


class Trainer:
    """An adapter in training on one frozen model."""

    def __init__(
        self,
        model: Model,
        ops: TrainingOps,
        config: TrainerConfig,
        *,
        state: TrainerState | None = None,
        micro_batch_size: int | None = None,
        remember_bytes: int = 0,
        team: Team | None = None,
    ) -> None:
        """Begin with first values from the seed, or go on from a state.

        Args:
            model: its weights are `ops`' own.
            micro_batch_size: examples at once; None: as many as a bound on rows allows.
            remember_bytes: of a micro-batch, for outputs of layers that are not made twice; no bit depends
                on it.
            team: the other devices, if the step is shared with some.

        Raises:
            BackendError: the adapter doesn't fit the model (`plan_adapter`), or a rank was lost.
        """
        self.config = config
        self.plan = self.plan_for(model, config)
        self.micro_batch_size = micro_batch_size
        self.remember_bytes = remember_bytes
        self._ops = ops
        self._base = replace(model, ops=ops)
        self._team = team
        if state is None:
            first_values = initial_tensors(self.plan, config.seed)
            zeros = {key: np.zeros_like(value) for key, value in first_values.items()}
            state = TrainerState(step=0, parameters=first_values, first_moments=zeros, second_moments=zeros)
        self.step = state.step
        self._powers = BetaPowers(config.optimizer, state.step)
        values, first, second = (
            to_lane(ops, of) for of in (state.parameters, state.first_moments, state.second_moments)
        )
        self._keys = list(self.plan.shapes)
        self._install(_Held(*([of[key] for key in self._keys] for of in (values, first, second))))

    @staticmethod
    def plan_for(model: Model, config: TrainerConfig) -> AdapterPlan:
        """Return what the adapter will be, which needs no lane."""
        return plan_adapter(config.adapter, model.layer_shapes)

    def state(self) -> TrainerState:
        """Return what a later run needs, as it is now; a tensor comes to the host when it is read."""
        values, first, second = (
            from_lane(self._ops, dict(zip(self._keys, of, strict=True)))
            for of in (self._held.values, self._held.first, self._held.second)
        )
        return TrainerState(step=self.step, parameters=values, first_moments=first, second_moments=second)

    def _install(self, held: _Held) -> None:
        """Run with these values from now on."""
        tensors = dict(zip(self._keys, held.values, strict=True))
        values = all_from_lane(self._ops, self._keys, held.values)
        loras = make_loras(self._ops, self.plan, tensors, together=held.values, values=values)
        model = self._base.adapted(loras)
        digest = adapter_digest(values)
        if self._team is not None:
            self._team.install(tensors, digest)
        # Nothing below can fail: before it, all is as it was.
        self._held, self.model, self.adapter_digest = held, model, digest

    # --- one step ------------------------------------------------------------------------------

    def train_step(self, examples: Sequence[Example]) -> Generator[None, None, StepOutcome]:
        """Take one optimizer step, yielding on the way; until it returns, nothing has changed.

        Raises:
            BackendError: `non-finite`, or a rank was lost; the step was not taken.
        """
        with of_step(self.step + 1):
            return (yield from self._train_step(examples))

    def _train_step(self, examples: Sequence[Example]) -> Generator[None, None, StepOutcome]:
        self._ops.take_faults()
        loss_sum, sums = yield from self._sum_gradients(examples)
        trained = sum(len(example.trained) for example in examples)
        gradients = self._average(sums, trained)
        norm = self._norm(gradients)
        gradients = self._clip(gradients, norm)
        yield
        rate = learning_rate(self.config.optimizer.learning_rate, self.config.schedule, self.step)
        held = self._updated(gradients, rate)
        yield
        self._install(held)
        self._powers.advance()
        self.step += 1
        return StepOutcome(
            step=self.step,
            loss=nearest(Fraction(float(loss_sum)) / trained),
            gradient_norm=float(norm),
            learning_rate=rate,
            trained_tokens=trained,
            adapter_digest=self.adapter_digest,
        )

    def _sum_gradients(
        self, examples: Sequence[Example]
    ) -> Generator[None, None, tuple[np.float32, dict[str, Tensor]]]:
        ops, rate, team = self._ops, self.plan.dropout, self._team
        asked = None if team is None else team.ask("step", self.step, examples, self.adapter_digest)
        mine = range(len(examples)) if asked is None else asked.mine
        found = yield from self._beside(
            sum_gradients(
                self.model,
                ops,
                list(self.plan.shapes),
                examples[mine.start : mine.stop],
                micro_batch_size=self.micro_batch_size,
                remember_bytes=self.remember_bytes,
                dropout=Dropout(rate, self.config.seed, self.step) if rate else None,
            )
        )
        if team is not None and asked is not None:
            yield from team.join(asked, found)
        losses = ExampleTree[Tensor](lambda a, b: ops.add(a, b, name="loss.sum"))
        for loss in found.losses:
            losses.push(ops.from_host(np.array([[loss]], loss.dtype)))
        # Popped as they are summed: the parts of one parameter go before the next one's sum is made.
        sums = {key: found.trees.pop(key).total() for key in self.plan.shapes}
        total = np.float32(ops.to_host(losses.total())[0, 0])
        self._refuse_faults()
        return total, sums

    def _beside(self, work: Generator[None, None, T]) -> Generator[None, None, T]:
        """Do this rank's work; a rank that is lost meanwhile is told at once."""
        look: Callable[[], None] = _nothing if self._team is None else self._team.look
        while True:
            try:
                next(work)
            except StopIteration as stop:
                made: T = stop.value
                return made
            look()
            yield

    def _average(self, sums: dict[str, Tensor], trained: int) -> list[Tensor]:
        share = nearest(Fraction(1, trained))
        return self._ops.scale_all([sums.pop(key) for key in self._keys], share, self._named("mean"))

    def _named(self, what: str) -> list[str]:
        return [f"{key}.{what}" for key in self._keys]

    def _norm(self, gradients: list[Tensor]) -> np.float32:
        """Root of the sum of squares: C128 in each tensor, tensors in the order of their keys."""
        total: np.float32 | None = None
        with np.errstate(over="ignore"):
            for square in self._ops.sums_of_squares(gradients, self._named("square")):
                total = square if total is None else np.float32(total + square)
        self._refuse_faults()
        if total is None or not np.isfinite(total):
            raise not_finite("gradient norm", {})
        return np.float32(np.sqrt(total))

    def _clip(self, gradients: list[Tensor], norm: np.float32) -> list[Tensor]:
        limit = self.config.optimizer.max_gradient_norm
        if limit is None or float(norm) <= exact(limit):
            return gradients
        factor = nearest(exact(limit) / Fraction(float(norm)))
        return self._ops.scale_all(gradients, factor, self._named("clip"))

    def _updated(self, gradients: list[Tensor], rate: float) -> _Held:
        ops = self._ops
        ops.release_freed()
        by = adamw_constants(self.config.optimizer, rate, self._powers.next())
        held = _Held(*(ops.copies(of) for of in (self._held.values, self._held.first, self._held.second)))
        ops.adamw_all(held.values, gradients, held.first, held.second, by, self._keys)
        self._refuse_faults()
        return held

    def _refuse_faults(self) -> None:
        faults = self._ops.take_faults()
        if faults:
            raise not_finite(faults[0].name, {})

    # --- losses --------------------------------------------------------------------------------

    def evaluate(self, examples: Sequence[Example], *, digests: bool) -> Generator[None, None, list[Score]]:
        """Return the loss of each example with the adapter as it is.

        Raises:
            BackendError: `non-finite`.
        """
        self._ops.take_faults()
        team = self._team
        asked = (
            None
            if team is None
            else team.ask("evaluate", self.step, examples, self.adapter_digest, logits_digest=digests)
        )
        mine = range(len(examples)) if asked is None else asked.mine
        scores = yield from self._beside(
            score_examples(
                self.model,
                self._ops,
                examples[mine.start : mine.stop],
                micro_batch_size=self.micro_batch_size,
                digests=digests,
            )
        )
        if team is not None and asked is not None:
            scores += yield from team.scores(asked)
        return scores


def _nothing() -> None:
    pass
