"""Answer the protocol's training requests: one run at a time on the served model."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from mens_core.adapters.apply import lane_shapes
from mens_core.adapters.plan import AdapterPlan
from mens_core.differentiate import Score
from mens_core.micro_batches import Example, read_examples
from mens_core.models.load import LoadedModel
from mens_core.models.model import Model
from mens_core.run_state import read_run, read_state, save_run
from mens_core.trainer import StepOutcome, Trainer, TrainerConfig, TrainerState
from mens_core.training_ops import TrainingOps
from mens_core.training_plan import plan_step
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendError, BackendInfo, Reply, Stream
from vox_plugin_api.messages import Numerics
from vox_plugin_api.resident import resident_bytes

if TYPE_CHECKING:  # loaded where a training runs on several devices
    from mens_core.peers.team import Team
    from mens_core.peers.wire import PeerSetup

__all__ = ["MakeTrainer", "StepTrainer", "TrainingRun", "answer_plan", "begin_run"]

T = TypeVar("T")


class StepTrainer(Protocol):
    """An adapter in training: `Trainer`, or what a lane has for other numerics."""

    config: TrainerConfig
    plan: AdapterPlan
    step: int
    adapter_digest: str

    def train_step(self, examples: Sequence[Example]) -> Generator[None, None, StepOutcome]:
        """Take one optimizer step; until it returns, nothing has changed."""
        ...

    def evaluate(self, examples: Sequence[Example], *, digests: bool) -> Generator[None, None, list[Score]]:
        """Return the loss of each example with the adapter as it is."""
        ...

    def state(self) -> TrainerState:
        """Return a copy of everything that a later run needs."""
        ...


MakeTrainer = Callable[[Model, TrainerConfig, TrainerState | None, int | None], StepTrainer]
"""Makes one from a loaded model, what the run is, a state to go on from, and a micro-batch size."""


def answer_plan(params: t.TrainPlanParams, loaded: LoadedModel, ops: TrainingOps) -> Reply:
    """Say what a run would be and what memory it would take; nothing is begun."""
    plan = plan_step(
        params,
        loaded.model,
        ops,
        parameters=loaded.plan.parameters,
        process_bytes=resident_bytes(),
    )
    return Reply(
        t.TrainPlanResult(
            matrices=[matrix.name for matrix in plan.adapter.matrices], parameters=plan.adapter.parameters
        ),
        plan.memory.model_dump(),
    )


def begin_run(
    params: t.TrainBeginParams,
    model: Model,
    ops: TrainingOps | None,
    info: BackendInfo,
    *,
    loaded_with: m.LoadModelParams,
    peers: PeerSetup | None,
    make_trainer: MakeTrainer | None = None,
) -> Generator[None, None, TrainingRun]:
    """Make first values or read those of a save, and start the other devices' processes if there are some.

    Args:
        model: on `ops`, loaded with `loaded_with`; the other ranks load it likewise.
        make_trainer: of numerics that are not canonical; then `ops` are None.
        peers: None: the lane has one device, and `params` ask for one.

    Raises:
        BackendError: the adapter or the save doesn't fit the model, or a rank can't take part; nothing
            was begun.
    """
    started = time.perf_counter()
    digest = loaded_with.model_digest
    state = None
    if params.resume_dir is not None:
        folder = Path(params.resume_dir)
        saved = read_state(folder, model_digest=digest, numerics=loaded_with.numerics)
        config = saved.config
        state = read_run(folder, saved, Trainer.plan_for(model, config).shapes)
    else:
        config = _new_config(params)
    team = None
    if params.devices > 1 and peers is not None and ops is not None:
        team = yield from _start_team(params, config, model, ops, info, loaded_with, peers)
    try:
        run = TrainingRun(
            model,
            ops,
            config,
            model_digest=digest,
            state=state,
            micro_batch_size=params.micro_batch_size,
            remember_bytes=params.remember_bytes,
            team=team,
            make_trainer=make_trainer,
            numerics=loaded_with.numerics,
        )
    except BaseException:
        if team is not None:
            team.end(is_whole=False)
        raise
    run.begin_s = time.perf_counter() - started
    return run


def _start_team(
    params: t.TrainBeginParams,
    config: TrainerConfig,
    model: Model,
    ops: TrainingOps,
    info: BackendInfo,
    loaded_with: m.LoadModelParams,
    peers: PeerSetup,
) -> Generator[None, None, Team]:
    from mens_core.peers.messages import Load
    from mens_core.peers.ranks import facts_of_rank
    from mens_core.peers.team import Team

    # What a rank shows is the base's: an adapter in service is none of the training's business.
    base = replace(model.adapted({}), ops=ops)
    load = Load(
        model=loaded_with.model_copy(update={"adapter": None}),
        adapter=config.adapter,
        seed=config.seed,
        micro_batch_size=params.micro_batch_size,
        remember_bytes=params.remember_bytes,
    )
    return (
        yield from Team.start(
            peers,
            params.devices,
            load,
            ops,
            facts_of_rank(info, base, ops, loaded_with.model_digest),
            lane_shapes(Trainer.plan_for(model, config)),
        )
    )


class TrainingRun:
    """An adapter in training, from `train_begin` to the end of the model it lies on."""

    def __init__(
        self,
        model: Model,
        ops: TrainingOps | None,
        config: TrainerConfig,
        *,
        model_digest: str,
        state: TrainerState | None = None,
        micro_batch_size: int | None = None,
        remember_bytes: int = 0,
        team: Team | None = None,
        make_trainer: MakeTrainer | None = None,
        numerics: Numerics = "canonical",
    ) -> None:
        """Make first values, or take those of `state`.

        Raises:
            BackendError: the adapter doesn't fit the model, or a rank was lost.
        """
        self._team = team
        self._trainer: StepTrainer
        if make_trainer is not None:
            self._trainer = make_trainer(model, config, state, micro_batch_size)
        elif ops is not None:
            self._trainer = Trainer(
                model,
                ops,
                config,
                state=state,
                micro_batch_size=micro_batch_size,
                remember_bytes=remember_bytes,
                team=team,
            )
        else:
            raise AssertionError("a run has operators, or a trainer of its own")
        self.begin_s = 0.0
        """What beginning took, for the report."""
        self._model_digest = model_digest
        self._numerics: Numerics = numerics
        self._vocab_size = model.config.vocab_size
        self._context_length = model.config.context_length
        self._is_busy = False
        self._has_ended = False

    def begun(self) -> Reply:
        """Return what will be trained."""
        trainer = self._trainer
        result = t.TrainBeginResult(
            step=trainer.step,
            matrices=[matrix.name for matrix in trainer.plan.matrices],
            parameters=trainer.plan.parameters,
            adapter_digest=trainer.adapter_digest,
        )
        return Reply(
            result, {"begin_s": self.begin_s, "devices": 1 if self._team is None else self._team.ranks}
        )

    def step(self, params: t.TrainStepParams) -> Stream:
        """Take one optimizer step."""
        examples = self._read(params.examples)
        with self._alone():
            started = time.perf_counter()
            outcome = yield from self._while_it_lasts(self._trainer.train_step(examples))
            took_s = time.perf_counter() - started
            yield Reply(
                t.TrainStepResult(
                    step=outcome.step,
                    loss=outcome.loss,
                    gradient_norm=outcome.gradient_norm,
                    learning_rate=outcome.learning_rate,
                    trained_tokens=outcome.trained_tokens,
                    adapter_digest=outcome.adapter_digest,
                ),
                {"step_s": took_s, "rows": sum(example.rows for example in examples)},
            )

    def evaluate(self, params: t.TrainEvaluateParams) -> Stream:
        """Score examples with the adapter as it is."""
        examples = self._read(params.examples)
        with self._alone():
            scores = yield from self._while_it_lasts(
                self._trainer.evaluate(examples, digests=params.logits_digest)
            )
            for index, (example, score) in enumerate(zip(examples, scores, strict=True)):
                yield Reply(
                    t.TrainEvaluateResult(
                        index=index,
                        loss=float(score.loss),
                        trained_tokens=len(example.trained),
                        logits_digest=score.logits_digest,
                    )
                )

    def save(self, params: t.TrainSaveParams) -> Stream:
        """Write the run as it is."""
        with self._alone():
            trainer, started = self._trainer, time.perf_counter()
            state = trainer.state()
            yield None
            files = save_run(
                Path(params.folder),
                trainer.config,
                state,
                model_digest=self._model_digest,
                adapter_digest=trainer.adapter_digest,
                numerics=self._numerics,
            )
            yield Reply(
                t.TrainSaveResult(step=state.step, adapter_digest=trainer.adapter_digest, files=files),
                {"save_s": time.perf_counter() - started},
            )

    def end(self) -> None:
        """Let no request of this run go on, and the other devices' processes end."""
        self._has_ended = True
        if self._team is not None:
            self._team.end()

    def _read(self, examples: list[t.TrainExample]) -> list[Example]:
        return read_examples(examples, vocab_size=self._vocab_size, context_length=self._context_length)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Steps have an order; two at once have none."""
        if self._is_busy:
            raise BackendError(
                "training-busy",
                "another request of this training is running; this one was not begun",
                remedy="Wait for its answer: steps are taken one after the other.",
            )
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _while_it_lasts(self, work: Generator[None, None, T]) -> Generator[None, None, T]:
        while True:
            if self._has_ended:
                raise BackendError("model-unloaded", "the model was unloaded while this request ran")
            try:
                next(work)
            except StopIteration as stop:
                made: T = stop.value
                return made
            yield None


def _new_config(params: t.TrainBeginParams) -> TrainerConfig:
    if params.adapter is None or params.optimizer is None:
        raise AssertionError("TrainBeginParams admits no run without adapter and optimizer")
    return TrainerConfig(
        adapter=params.adapter,
        optimizer=params.optimizer,
        schedule=params.schedule or t.Schedule(),
        seed=params.seed or 0,
    )
