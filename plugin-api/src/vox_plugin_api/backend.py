"""What a backend plugin implements.

The entry point named after the plugin (group `vox_host.backends`) is a callable without
arguments that returns a `Backend`. The worker's main loop (`child`) calls it on one thread.
A method that streams is a generator: it yields a `Reply` when it has something to say and
None when it merely made progress, and the loop takes turns between the requests in flight,
so a backend that serves many requests together only has to hand out what its last step made.
Closing the generator is cancellation: clean up in `finally`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vox_plugin_api import messages as m
from vox_plugin_api.conformance_messages import ConformanceParams

if TYPE_CHECKING:  # a worker that serves never loads them
    from vox_plugin_api import train_messages as t
    from vox_plugin_api.merge_messages import MergeParams

__all__ = ["Backend", "BackendError", "BackendInfo", "Reply", "Stream"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One event's content: `result` is compared between lanes, `observation` never is."""

    result: m.Message | None = None
    observation: dict[str, Any] = field(default_factory=dict)
    slices: tuple[bytes, ...] = ()


Stream = Iterator[Reply | None]

_NO_TRAINING = "this backend has no capability 'train'"


class BackendError(Exception):
    """An error the caller should see, as data."""

    def __init__(
        self, code: str, message: str, *, facts: dict[str, Any] | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message)
        self.error = m.WorkerError(code=code, message=message, facts=facts or {}, remedy=remedy)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the handshake states; must agree with Plugin.toml."""

    plugin_id: str
    plugin_version: str
    lane: str
    numerics: tuple[m.Numerics, ...]
    capabilities: tuple[m.Capability, ...]
    execution: str = ""
    """Where the lane's kernels run, if not on the device that its name says: a label that the host shows
    wherever it names the lane."""


class Backend(ABC):
    """A model owner: token ids in, token ids out. Every method may raise `BackendError`."""

    info: BackendInfo

    @abstractmethod
    def self_test(self, params: m.SelfTestParams) -> Reply:
        """Check the lane's own operators; runs before anything else is served (under 50 ms)."""

    @abstractmethod
    def load_model(self, params: m.LoadModelParams) -> Stream:
        """Load a model; yield None as it goes and one `LoadResult` at the end."""

    @abstractmethod
    def generate(self, params: m.GenerateParams) -> Stream:
        """Yield `GenerateResult`s; the last has a `finish_reason`."""

    def evaluate(self, params: m.EvaluateParams) -> Stream:
        """Yield one `EvaluateResult` per sequence, in order (capability "evaluate")."""
        raise BackendError("not-supported", "this backend has no capability 'evaluate'")

    def trace(self, params: m.TraceParams) -> Stream:
        """Yield one `TraceResult` (capability "trace")."""
        raise BackendError("not-supported", "this backend has no capability 'trace'")

    def train_plan(self, params: t.TrainPlanParams) -> Stream:
        """Yield one `TrainPlanResult`, a `TrainMemory` as its observation (capability "train")."""
        raise BackendError("not-supported", _NO_TRAINING)

    def train_begin(self, params: t.TrainBeginParams) -> Stream:
        """Make or resume an adapter of the loaded model; yield a `TrainBeginResult` (capability "train")."""
        raise BackendError("not-supported", _NO_TRAINING)

    def train_step(self, params: t.TrainStepParams) -> Stream:
        """Take one optimizer step, whole or not at all; yield one `TrainStepResult` (capability "train")."""
        raise BackendError("not-supported", _NO_TRAINING)

    def train_evaluate(self, params: t.TrainEvaluateParams) -> Stream:
        """Yield one `TrainEvaluateResult` per example, in order (capability "train")."""
        raise BackendError("not-supported", _NO_TRAINING)

    def train_save(self, params: t.TrainSaveParams) -> Stream:
        """Write a folder to resume from; yield one `TrainSaveResult` (capability "train")."""
        raise BackendError("not-supported", _NO_TRAINING)

    def merge_adapter(self, params: MergeParams) -> Stream:
        """Write a base's weights with an adapter in them; yield one `MergeResult` (capability "adapters")."""
        raise BackendError("not-supported", "this backend has no capability 'adapters'")

    def unload(self, params: m.UnloadParams) -> Reply:
        """Forget the loaded model and free its memory."""
        raise BackendError("not-supported", "this backend cannot unload")

    def conformance(self, params: ConformanceParams) -> Stream:
        """Yield one `ConformanceResult`: what the lane's operators make of a named case."""
        raise BackendError("not-supported", "this backend has no operators to show")
