"""Tiny training runs: configurations, examples, and a trainer driven to the end of a step."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mens_core.adapters.apply import make_loras, to_lane
from mens_core.differentiate import differentiate
from mens_core.example_tree import ExampleTree
from mens_core.micro_batches import Example, cut, pack, read_examples
from mens_core.models.model import Model
from mens_core.trainer import Trainer, TrainerConfig
from mens_core.training_ops import TrainingOps
from vox_plugin_api.train_messages import AdapterConfig, OptimizerConfig, Schedule, TrainExample

T = TypeVar("T")
LAYER_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_TARGETS = (*LAYER_TARGETS, "lm_head", "embed_tokens")


def finish(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end and return what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: T = stop.value
            return found


def a_config(
    targets: Sequence[str] = ALL_TARGETS,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    dropout: float = 0.0,
    rank_stabilised: bool = False,
    seed: int = 7,
    schedule: Schedule | None = None,
    **optimizer: Any,
) -> TrainerConfig:
    return TrainerConfig(
        adapter=AdapterConfig(
            rank=rank,
            alpha=alpha,
            targets=list(targets),
            dropout=dropout,
            rank_stabilised=rank_stabilised,
        ),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, **optimizer}),
        schedule=schedule or Schedule(),
        seed=seed,
    )


def some_examples(lengths: Sequence[int], *, seed: int = 0, vocab: int = 97) -> list[TrainExample]:
    """Random tokens; about half of them are learned, among them the last but one."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = [False, *(bool(bit) for bit in rng.integers(0, 2, length - 1))]
        mask[max(1, length - 2)] = True
        mask[length - 1] = length == 2
        tokens = rng.integers(0, vocab, length).tolist()
        made.append(TrainExample(token_ids=tokens, loss_mask=mask))
    return made


def read(examples: Sequence[TrainExample]) -> list[Example]:
    return read_examples(examples, vocab_size=97, context_length=1024)


def random_adapter(shapes: Mapping[str, tuple[int, int]], seed: int = 1) -> dict[str, np.ndarray]:
    """Values large enough that each update moves the loss, B included."""
    rng = np.random.default_rng(seed)
    return {
        key: rng.normal(0, 0.5 / np.sqrt(shape[1]), shape).astype(np.float32) for key, shape in shapes.items()
    }


def gradients_of(
    model: Model,
    ops: TrainingOps,
    config: TrainerConfig,
    adapter: Mapping[str, np.ndarray],
    examples: Sequence[Example],
    micro_batch_size: int | None = None,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses [E] and the gradient of their sum, by the parameters' own names and in their keys' shapes."""
    plan = Trainer.plan_for(model, config)
    adapted = model.adapted(make_loras(ops, plan, to_lane(ops, adapter)))
    trees: dict[str, ExampleTree[Any]] = {}
    losses: list[np.ndarray] = []

    def take(parameter: str, gradients: list[Any]) -> None:
        tree = trees.setdefault(parameter, ExampleTree(lambda a, b: ops.add(a, b, name=parameter)))
        for gradient in gradients:
            tree.push(gradient)

    for together in cut(examples, micro_batch_size):
        micro = pack(examples[together.start : together.stop], together.start)
        losses.append(finish(differentiate(adapted, ops, micro, None, take)))
    found = {name: np.array(ops.to_host(tree.total())) for name, tree in trees.items()}
    if "embed_tokens.lora_A" in found:
        found["embed_tokens.lora_A"] = found["embed_tokens.lora_A"].T
    return np.concatenate(losses), found
