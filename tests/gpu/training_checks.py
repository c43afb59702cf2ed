"""Checks of training on a GPU beside the CPU lane, byte by byte; `check_lane.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from grid_shim.check import ALL, SERVING, apart
from lanes.tiny_models import open_model
from lanes.training import a_config, finish, read, some_examples
from mens_core.conformance.cases_training import training_test
from mens_core.trainer import StepOutcome, Trainer
from mens_core.training_ops import TrainingOps

__all__ = ["training_operators", "training_run", "training_vectors"]

MakeLane = Callable[[], TrainingOps]


def training_vectors(make_lane: MakeLane) -> str:
    """The digests that are shipped."""
    result = training_test(make_lane)
    assert not result.failed and result.cases, f"{len(result.failed)} of {result.cases}: {result.failed}"
    return f"{result.cases} cases, vectors {result.vectors_digest[:16]}"


def training_operators(make_lane: MakeLane, make_reference: MakeLane) -> str:
    """Every case and shape, arrays and faults, beside the scalar reference."""
    names = [name for name in ALL if name not in SERVING]
    wheres = {name: apart(ALL[name], make_lane(), make_reference()) for name in names}
    differing = {name: where for name, where in wheres.items() if where is not None}
    shown = "; ".join(f"{name}: {where}" for name, where in list(differing.items())[:20])
    assert not differing, f"{len(differing)} of {len(names)} differ: {shown}"
    return f"{len(names)} cases, outputs and faults equal the scalar reference's"


def training_run(
    path: Path,
    make_lane: MakeLane,
    make_cpu: MakeLane,
    *,
    steps: int = 3,
    lengths: Sequence[int] = (2, 9, 140, 5, 300),
) -> str:
    """Steps with dropout and clipping: losses, norms and the adapter's digest after each."""

    def run(ops: TrainingOps) -> list[StepOutcome]:
        trainer = Trainer(open_model(path, ops).model, ops, a_config(dropout=0.25, max_gradient_norm=0.5))
        return [finish(trainer.train_step(read(some_examples(lengths, seed=i)))) for i in range(steps)]

    found, expected = run(make_lane()), run(make_cpu())
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a == b, f"step {number}: {a} beside {b}"
    return f"{steps} steps, adapter {found[-1].adapter_digest[:16]}"
