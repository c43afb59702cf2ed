"""The messages of training (capability "train").

One `train_step` is one optimizer step: examples in order go in, the worker chooses how many it
runs at once, and what comes out depends on nothing but the model, the configuration, the seed
and the examples. A step is all or nothing, and a host never repeats one by itself.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vox_plugin_api.messages import F32, AdapterConfig, Digest, Message

__all__ = [
    "AdapterConfig",
    "OptimizerConfig",
    "Schedule",
    "TrainBeginParams",
    "TrainBeginResult",
    "TrainEvaluateParams",
    "TrainEvaluateResult",
    "TrainExample",
    "TrainMemory",
    "TrainPlanParams",
    "TrainPlanResult",
    "TrainSaveParams",
    "TrainSaveResult",
    "TrainStepParams",
    "TrainStepResult",
]


class OptimizerConfig(Message):
    """AdamW, its peak learning rate, and clipping before it."""

    learning_rate: F32 = Field(gt=0, allow_inf_nan=False)
    beta1: F32 = Field(default=0.9, ge=0, lt=1)
    beta2: F32 = Field(default=0.999, ge=0, lt=1)
    eps: F32 = Field(default=1e-8, gt=0, allow_inf_nan=False)
    weight_decay: F32 = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_gradient_norm: F32 | None = Field(default=None, gt=0, allow_inf_nan=False)
    """None: no clipping."""


class Schedule(Message):
    """The learning rate of each step, as a share of the peak."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: the peak; down to 0 at `total_steps` in a line, or in half a cosine."""
    warmup_steps: int = Field(default=0, ge=0, lt=2**31)
    """Step s of the first ones (from 0) has (s + 1) / warmup_steps."""
    total_steps: int | None = Field(default=None, ge=1, lt=2**31)

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.kind != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(f"a {self.kind} schedule needs total_steps above warmup_steps")
        return self


class TrainPlanParams(Message):
    """Ask what a run on the loaded model would be, and what memory it would take. Nothing is begun."""

    adapter: AdapterConfig
    longest_example: int = Field(ge=2)
    """Tokens of the longest example; all but its first count as learned."""
    examples: int = Field(ge=1, le=1 << 16)
    """Of a step."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """As in `TrainBeginParams`."""
    devices: int = Field(default=1, ge=1)
    """As in `TrainBeginParams`."""
    memory_bytes: int | None = Field(default=None, ge=0)
    """What the worker may plan with, on each device: beyond what a run needs, some of it may go to what
    would be computed twice otherwise. None: the least that a run needs. Changes memory and time, no bit."""


class TrainPlanResult(Message):
    """What would be trained. Compared between lanes; the memory is in the observation (`TrainMemory`)."""

    matrices: list[str]
    """The adapted layers, in the order of their keys."""
    parameters: int


class TrainMemory(Message):
    """Bytes held at the fullest moment of a run, if every example is the longest: by the worker, or by that
    of its ranks which holds most, each on a device of its own."""

    place: Literal["host", "device"]
    """Whose memory it is."""
    kinds: dict[str, int]
    """Bytes of weights, adapter, moments, gradients, activations, logits and workspace at that moment;
    remembered: outputs of layers that are not computed twice;
    reserve: what allocators and libraries may take; on the host also process: what the worker holds
    already beside the weights."""
    total: int
    """Their sum: no step, evaluation, save or resume of the run takes more."""
    examples_at_once: int
    rows_at_once: int
    devices: int = 1
    remember_bytes: int = 0
    """What `train_begin` may be told as its own, for the total to be this one."""


class TrainBeginParams(Message):
    """Make a new adapter of the loaded model, or go on from a folder that `train_save` wrote."""

    adapter: AdapterConfig | None = None
    optimizer: OptimizerConfig | None = None
    schedule: Schedule | None = None
    """None: constant."""
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    """Of the first values and of dropout; None: 0."""
    resume_dir: str | None = None
    """The folder; it holds all of the above, so none of it may be given."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Examples to run at once, on each device; None: as the worker likes. Changes memory and time, no bit."""
    devices: int = Field(default=1, ge=1)
    """Devices of one kind that share each step's examples; the worker starts a process for each but its own.
    Changes time, no bit."""
    remember_bytes: int = Field(default=0, ge=0)
    """What each device may hold of a micro-batch's layers, so that it is not computed twice. Changes
    memory and time, no bit."""

    @model_validator(mode="after")
    def _check(self) -> TrainBeginParams:
        given = [
            name for name in ("adapter", "optimizer", "schedule", "seed") if getattr(self, name) is not None
        ]
        if self.resume_dir is not None and given:
            raise ValueError(f"resume_dir holds {' and '.join(given)} already: give one or the other")
        if self.resume_dir is None and (self.adapter is None or self.optimizer is None):
            raise ValueError("give adapter and optimizer, or resume_dir")
        return self


class TrainBeginResult(Message):
    """What will be trained. Compared between lanes."""

    step: int
    """Steps taken so far: 0, or those of the folder."""
    matrices: list[str]
    """The adapted layers, in the order of their keys."""
    parameters: int
    adapter_digest: Digest


class TrainExample(Message):
    """A sequence, and which of its tokens are learned."""

    token_ids: list[int] = Field(min_length=2)
    loss_mask: list[bool]
    """One per token. The first token follows nothing, so it can't be learned and its entry is false."""


class TrainStepParams(Message):
    """Take one optimizer step on these examples."""

    examples: list[TrainExample] = Field(min_length=1)


class TrainStepResult(Message):
    """One optimizer step, taken."""

    step: int
    """Steps taken so far, this one included."""
    loss: F32
    """Mean over the trained tokens, before the step."""
    gradient_norm: F32
    """Before clipping."""
    learning_rate: F32
    trained_tokens: int
    adapter_digest: Digest
    """After the step."""


class TrainEvaluateParams(Message):
    """Losses with the adapter as it is; nothing is updated and nothing is dropped."""

    examples: list[TrainExample] = Field(min_length=1)
    logits_digest: bool = False


class TrainEvaluateResult(Message):
    """The loss of one example."""

    index: int
    loss: F32
    """Summed over its trained tokens."""
    trained_tokens: int
    logits_digest: Digest | None = None
    """Over the logits of every position, as in `EvaluateResult`."""


class TrainSaveParams(Message):
    """Write adapter and optimizer into a new folder, whole or not at all."""

    folder: str
    """It must not exist; the folder that it will lie in must."""


class TrainSaveResult(Message):
    """What was written."""

    step: int
    adapter_digest: Digest
    files: dict[str, Digest]
    """SHA-256 of each file by its name."""
