"""The plugin protocol over the engine: what every Mens lane's plugin returns.

A lane's plugin supplies its `BackendInfo`, a function that makes its `Ops`, and its self-test;
everything else is here and in what this module calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from mens_core.answers import Evaluation, Generation, serve
from mens_core.conformance.suite import TRAINING_GROUPS, answer
from mens_core.kv_memory import FreeBytes
from mens_core.kv_plan import DEFAULT_KV_BYTES
from mens_core.ops import Ops
from mens_core.sequence import SequenceRequest
from mens_core.serving import LaneFactory, Served, Service, load_served
from mens_core.tracing import trace_forward
from mens_core.training_ops import TrainingOps
from vox_plugin_api import messages as m
from vox_plugin_api.backend import Backend, BackendError, BackendInfo, Reply, Stream
from vox_plugin_api.conformance_messages import ConformanceParams

if TYPE_CHECKING:  # a worker that serves never loads them
    from mens_core.fast_mode import FastMode
    from mens_core.models.model import Model
    from mens_core.peers.wire import PeerSetup
    from mens_core.training import TrainingRun
    from vox_plugin_api import train_messages as t
    from vox_plugin_api.merge_messages import MergeParams

__all__ = ["MensBackend"]


class MensBackend(Backend):
    """Serves one model at a time through a lane."""

    def __init__(
        self,
        info: BackendInfo,
        make_lane: LaneFactory,
        self_test: Callable[[], m.SelfTestResult],
        *,
        make_training_lane: Callable[[Ops], TrainingOps] | None = None,
        peers: PeerSetup | None = None,
        default_kv_bytes: int = DEFAULT_KV_BYTES,
        free_bytes: FreeBytes = lambda: None,
        lane_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
        fast: FastMode | None = None,
    ) -> None:
        """Remember how to make a lane; nothing is loaded or probed.

        Args:
            self_test: runs the lane's quick vectors (`conformance.quick.self_test`).
            make_training_lane: makes the lane that trains on weights which another lane of the
                same kind loaded, when training begins or an adapter is served; None: the serving lane,
                if it can.
            peers: how training runs on several devices, in a lane that can.
            default_kv_bytes: the KV cache's budget when a request names none.
            free_bytes: measures what the device could still take, which bounds that budget.
            lane_options: the options that the lane takes, each with its values for the error's text; any
                other is refused. The lane refuses values.
            fast: how the lane serves and trains in fast numerics; None: it has none.
        """
        self.info = info
        self._make_lane = make_lane
        self._self_test = self_test
        self._make_training_lane = make_training_lane
        self.peers = peers
        self._default_kv_bytes = default_kv_bytes
        self._free_bytes = free_bytes
        self._lane_options = lane_options
        self._fast = fast
        self._served: Served | None = None
        self._training: TrainingRun | None = None
        self._loaded_with: m.LoadModelParams | None = None
        self._is_loading = False
        self._is_beginning = False

    def self_test(self, params: m.SelfTestParams) -> Reply:
        started = time.perf_counter()
        result = self._self_test()
        return Reply(result, {"self_test_s": time.perf_counter() - started})

    def load_model(self, params: m.LoadModelParams) -> Stream:
        if params.numerics not in self.info.numerics:
            raise BackendError(
                "not-supported",
                f"lane {self.info.lane!r} has no numerics {params.numerics!r}; nothing was loaded",
                facts={"requested": params.numerics, "supported": list(self.info.numerics)},
                remedy=f"Ask for {' or '.join(self.info.numerics)} numerics, or for a plugin that has "
                f"{params.numerics!r}: `vox-host plugin list` shows what each has.",
            )
        if self._served is not None or self._is_loading:
            raise BackendError(
                "model-already-loaded",
                "this worker serves one model and has one; nothing was changed",
                facts={} if self._served is None else {"model_digest": self._served.result.model_digest},
                remedy="Unload it first, or start another worker.",
            )
        if params.adapter is not None and "adapters" not in self.info.capabilities:
            raise BackendError(
                "not-supported",
                f"lane {self.info.lane!r} has no capability 'adapters'; nothing was loaded",
                facts={"capabilities": list(self.info.capabilities)},
                remedy="Merge the adapter into its base model, or serve it with another plugin.",
            )
        self._refuse_unknown(params.lane_options)
        self._is_loading = True
        try:
            self._served = yield from self._load(params)
            self._loaded_with = params
        finally:
            self._is_loading = False
        yield Reply(self._served.result, self._served.observation)

    def _refuse_unknown(self, options: Mapping[str, str]) -> None:
        unknown = sorted(options.keys() - self._lane_options.keys())
        if unknown:
            known = {name: list(values) for name, values in self._lane_options.items()}
            raise BackendError(
                "lane-option",
                f"no lane option is called {', '.join(map(repr, unknown))}; nothing was loaded",
                facts={"found": dict(options), "known": known},
                remedy="Leave it out, or name one that the lane takes."
                if known
                else "Leave it out: this lane takes none.",
            )

    def _load(self, params: m.LoadModelParams) -> Generator[None, None, Served]:
        canonical = Service(make_lane=self._make_lane, make_adapting_lane=self._training_lane)
        fast = self._fast if params.numerics == "fast" else None
        steps = load_served(
            params,
            canonical if fast is None else fast.service,
            default_kv_bytes=self._default_kv_bytes,
            free_bytes=self._free_bytes,
            measured_by=None if fast is None else canonical,
        )
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                served: Served = stop.value
                return served
            yield None

    def generate(self, params: m.GenerateParams) -> Stream:
        engine = self._require_model().engine
        yield from serve(engine, Generation(engine, params))

    def evaluate(self, params: m.EvaluateParams) -> Stream:
        engine = self._require_model().engine
        yield from serve(engine, Evaluation(engine, params))

    def trace(self, params: m.TraceParams) -> Stream:
        served = self._require_model()
        served.engine.check(SequenceRequest(token_ids=tuple(params.token_ids), max_tokens=0))
        yield trace_forward(served.loaded.model, params.token_ids, params.slices)

    def train_plan(self, params: t.TrainPlanParams) -> Stream:
        served = self._require_model()
        self._check_devices(params.devices)
        from mens_core.training import answer_plan

        fast = self._fast_of(served)
        if fast is not None:
            yield fast.answer_plan(params, served.loaded)
            return
        yield answer_plan(params, served.loaded, self._training_lane(served.ops))

    def train_begin(self, params: t.TrainBeginParams) -> Stream:
        served = self._require_model()
        if self._training is not None or self._is_beginning:
            raise BackendError(
                "training-begun",
                "this worker trains one adapter and has begun; nothing was changed",
                remedy="Unload the model to end that training, or start another worker.",
            )
        self._check_devices(params.devices)
        fast = self._fast_of(served)
        from mens_core.training import begin_run

        if self._loaded_with is None:
            raise AssertionError("a model that is served was loaded with something")
        self._is_beginning = True
        try:
            run = yield from begin_run(
                params,
                served.loaded.model,
                None if fast is not None else self._training_lane(served.ops),
                self.info,
                loaded_with=self._loaded_with,
                peers=self.peers,
                make_trainer=None if fast is None else fast.make_trainer,
            )
        finally:
            self._is_beginning = False
        if self._served is not served:
            run.end()
            raise BackendError("model-unloaded", "the model was unloaded while the training began")
        self._training = run
        yield run.begun()

    def lend(self) -> tuple[Model, TrainingOps, m.LoadResult]:
        """Return the loaded model, a lane that trains on its weights, and what the load told: for a rank."""
        served = self._require_model()
        return served.loaded.model, self._training_lane(served.ops), served.result

    def _check_devices(self, devices: int) -> None:
        if devices == 1:
            return
        if self._served is not None and self._served.result.numerics == "fast":
            raise BackendError(
                "not-supported",
                f"fast numerics train on one device, {devices} were asked for; nothing was begun",
                facts={"requested": devices},
                remedy="Ask for one device, or train in canonical numerics.",
            )
        if self.peers is None:
            raise BackendError(
                "not-supported",
                f"lane {self.info.lane!r} trains on one device, {devices} were asked for; nothing was begun",
                facts={"requested": devices},
                remedy="Leave the number of devices out; no bit depends on it.",
            )
        there = self.peers.devices()
        if there < devices:
            raise BackendError(
                "devices-missing",
                f"{devices} devices were asked for and this worker can use {there}; nothing was begun",
                facts={"requested": devices, "found": there},
                remedy=f"Ask for {there}: no bit depends on it. CUDA_VISIBLE_DEVICES may hide GPUs.",
            )

    def train_step(self, params: t.TrainStepParams) -> Stream:
        return self._require_training().step(params)

    def train_evaluate(self, params: t.TrainEvaluateParams) -> Stream:
        return self._require_training().evaluate(params)

    def train_save(self, params: t.TrainSaveParams) -> Stream:
        return self._require_training().save(params)

    def merge_adapter(self, params: MergeParams) -> Stream:
        if "adapters" not in self.info.capabilities:
            raise BackendError(
                "not-supported",
                f"lane {self.info.lane!r} has no capability 'adapters'; nothing was written",
                facts={"capabilities": list(self.info.capabilities)},
                remedy="Merge with another plugin: the result is the same on each that can.",
            )
        self._refuse_unknown(params.lane_options)
        from mens_core.adapters.merge_request import merge

        lane = m.LoadModelParams(
            model_dir=params.model_dir,
            model_digest=params.model_digest,
            threads=params.threads,
            lane_options=params.lane_options,
        )
        yield from merge(params, self._training_lane(self._make_lane(lane)))

    def conformance(self, params: ConformanceParams) -> Stream:
        self._refuse_unknown(params.lane_options)
        # No model is needed, and none is touched: the cases bring their own operands.
        lane = m.LoadModelParams(
            model_dir="",
            model_digest="0" * 64,
            threads=params.threads,
            lane_options=params.lane_options,
        )

        def make_ops() -> Ops:
            ops = self._make_lane(lane)
            return self._training_lane(ops) if params.group in TRAINING_GROUPS else ops

        yield answer(make_ops, params)

    def unload(self, params: m.UnloadParams) -> Reply:
        served = self._require_model()
        if self._training is not None:
            self._training.end()
            self._training = None
        served.engine.stop("model-unloaded", "the model was unloaded while this request ran")
        self._served = None
        return Reply(observation=served.engine.facts())

    def _fast_of(self, served: Served) -> FastMode | None:
        """How the loaded model trains, if it was loaded with fast numerics."""
        return self._fast if served.result.numerics == "fast" else None

    def _training_lane(self, serving: Ops) -> TrainingOps:
        if self._make_training_lane is not None:
            return self._make_training_lane(serving)
        if isinstance(serving, TrainingOps):
            return serving
        raise BackendError(
            "not-supported", f"lane {self.info.lane!r} has no operators of training; nothing was done"
        )

    def _require_training(self) -> TrainingRun:
        self._require_model()
        if self._training is None:
            raise BackendError(
                "no-training", "no training has begun; nothing was done", remedy="Send train_begin first."
            )
        return self._training

    def _require_model(self) -> Served:
        if self._served is None:
            raise BackendError(
                "no-model", "no model is loaded; nothing was done", remedy="Load a model first."
            )
        return self._served
