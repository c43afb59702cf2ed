"""A loaded model with its cache and engine: what a backend serves."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mens_core.adapters.apply import make_loras, to_lane
from mens_core.adapters.copies import BaseTable, compare_copies
from mens_core.adapters.served import ServedAdapter, read_adapter
from mens_core.engine import Engine
from mens_core.kv_memory import FreeBytes, KvMemory
from mens_core.kv_plan import KvPlan, plan_kv_cache
from mens_core.models.load import LoadedModel, Progress, load
from mens_core.numerics import NUMERICS_VERSION
from mens_core.numerics_error import compare_logits, reference_logits
from mens_core.ops import Ops
from mens_core.scheduler import StepLimits
from mens_core.training_ops import AdapterOps
from mens_core.weights_fit import weight_bytes
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError, read_json_object
from vox_plugin_api.families import ModelConfig, parse_config
from vox_plugin_api.families.tensors import EMBEDDING, HEAD
from vox_plugin_api.messages import (
    LoadModelParams,
    LoadResult,
    NumericsError,
    TensorsReport,
    canonical_json,
)

__all__ = ["LaneFactory", "Served", "Service", "kv_origin", "load_served"]

LaneFactory = Callable[[LoadModelParams], Ops]
"""Makes a lane for one model: threads and numerics are in the parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """How models are served in one kind of numerics."""

    make_lane: LaneFactory
    make_adapting_lane: Callable[[Ops], AdapterOps]
    """Makes the lane that puts an adapter on weights which another lane of the same kind loaded."""
    kv_value_bytes: int = 4
    """Of one number of the KV cache."""
    rows: int = StepLimits().rows
    """Rows of one step at most."""


@dataclass(frozen=True, slots=True)
class Served:
    """One model in service."""

    ops: Ops
    loaded: LoadedModel
    engine: Engine
    result: LoadResult
    observation: dict[str, Any]

    @property
    def config(self) -> ModelConfig:
        return self.loaded.model.config


def load_served(
    params: LoadModelParams,
    service: Service,
    *,
    default_kv_bytes: int,
    free_bytes: FreeBytes = lambda: None,
    measured_by: Service | None = None,
) -> Generator[Progress, None, Served]:
    """Open, check and load a model directory, yielding after each layer.

    The cache is planned and an adapter is held against the config before a weight is read, so
    what can't fit fails in milliseconds; it is planned again by what is free beside the weights.

    Args:
        free_bytes: measures what the device could still take.
        measured_by: the canonical service that this one's logits are held against: the model is loaded
            by it first, runs the reference prompts, and is let go of.

    Raises:
        BackendError: the directory, its config, its weights or the memory are not right.
    """
    started = time.perf_counter()
    path = Path(params.model_dir)
    try:
        config = parse_config(read_json_object(path / "config.json"), source=str(path / "config.json"))

        def plan_now() -> KvPlan:
            return plan_kv_cache(
                config,
                params,
                default_bytes=default_kv_bytes,
                value_bytes=service.kv_value_bytes,
                free_bytes=free_bytes(),
            )

        plan_now()
        checkpoint = Checkpoint.open(path)
        adapter = None if params.adapter is None else read_adapter(params.adapter, config)
        weights = weight_bytes(path)
        opened = time.perf_counter()
        reference = None
        if measured_by is not None:
            as_canonical = params.model_copy(update={"numerics": "canonical", "lane_options": {}})
            model, adapter = yield from _load(
                as_canonical, measured_by, config, checkpoint, adapter, compares=True
            )
            reference = reference_logits(model.model)
            del model
            # Its weights may be as large as what comes: cycles must not keep them.
            gc.collect()
        measured = time.perf_counter()
        # Fast lanes hold rounded weights, which no copy equals: the canonical one has compared.
        loaded, adapter = yield from _load(
            params, service, config, checkpoint, adapter, compares=measured_by is None
        )
        checkpoint.close()
    except CheckpointError as error:
        raise BackendError(
            error.code, f"{error.message}. Nothing was loaded.", facts=error.facts, remedy=error.remedy
        ) from error
    ops = loaded.model.ops
    distance = None if reference is None else compare_logits(reference, reference_logits(loaded.model))
    weights_read = time.perf_counter()
    plan = plan_now()
    memory = None
    if ops.kv_is_taken_when_touched:
        # Who named the memory has said what may be taken, for kept blocks too.
        freely = plan.blocks if params.memory_bytes is not None else plan.taken_freely(weights)
        memory = KvMemory(plan.block_bytes, free_bytes, freely)
    engine = Engine(
        loaded.model,
        loaded.model.new_cache(plan.blocks),
        vocab_size=config.vocab_size,
        context_length=plan.context_length,
        blocks=plan.blocks,
        max_sequences=params.max_sequences,
        limits=StepLimits(rows=service.rows),
        origin=kv_origin(params, adapter),
        memory=memory,
    )
    observation = {
        "open_s": opened - started,
        "weights_s": weights_read - measured,
        "load_s": time.perf_counter() - started,
        "kv_cache": plan.as_facts(),
        "lane": ops.facts(),
    }
    if measured_by is not None:
        observation["measured_s"] = measured - opened
    return Served(ops, loaded, engine, _report(params, loaded, plan, adapter, distance), observation)


def kv_origin(params: LoadModelParams, adapter: ServedAdapter | None) -> str:
    """Name all that decides the bytes of keys and values beside the token ids before them.

    The cache and its blocks go with the load, so one that is not equal to it is never met; that they
    can't be mixed up is said here all the same. How a lane computes is not in it: the bytes are equal.
    """
    return canonical_json(
        {
            "model_digest": params.model_digest,
            "adapter_digest": None if adapter is None else adapter.digest,
            "adapter_config": None
            if params.adapter is None
            else params.adapter.config.model_dump(mode="json"),
            "numerics": params.numerics,
            "numerics_version": NUMERICS_VERSION,
        }
    ).decode()


def _load(
    params: LoadModelParams,
    service: Service,
    config: ModelConfig,
    checkpoint: Checkpoint,
    adapter: ServedAdapter | None,
    *,
    compares: bool,
) -> Generator[Progress, None, tuple[LoadedModel, ServedAdapter | None]]:
    """Load the model and put the adapter on it; `compares` holds its copies of base weights against them."""
    ops = service.make_lane(params)
    loaded = yield from load(config, checkpoint, ops)
    if adapter is None:
        return loaded, None
    if compares:
        adapter = yield from _compared(adapter, loaded, ops)
    return _adapted(loaded, service.make_adapting_lane(ops), adapter), adapter


def _compared(
    adapter: ServedAdapter, loaded: LoadedModel, ops: Ops
) -> Generator[Progress, None, ServedAdapter]:
    """Hold what the adapter's file has of the base's own weights against them."""
    head, planned = loaded.model.head, loaded.plan.tensors
    tables = {
        head.embedding.name: BaseTable(head.embedding.weight, planned[EMBEDDING].format),
        head.output.name: BaseTable(head.output.weight, planned.get(HEAD, planned[EMBEDDING]).format),
    }
    comparing = compare_copies(adapter.file, adapter.copies, tables.__getitem__, ops)
    while True:
        try:
            next(comparing)
        except StopIteration as done:
            found: tuple[str, ...] = done.value
            return replace(adapter, warnings=(*adapter.warnings, *found))
        layers = loaded.model.config.layers
        yield Progress(layers, layers)


def _adapted(loaded: LoadedModel, ops: AdapterOps, adapter: ServedAdapter) -> LoadedModel:
    """Put the updates beside the weights, which stay as they are."""
    loras = make_loras(ops, adapter.plan, to_lane(ops, adapter.tensors))
    return replace(loaded, model=replace(loaded.model, ops=ops).adapted(loras))


def _report(
    params: LoadModelParams,
    loaded: LoadedModel,
    plan: KvPlan,
    adapter: ServedAdapter | None,
    distance: NumericsError | None,
) -> LoadResult:
    config = loaded.model.config
    return LoadResult(
        architecture=config.architecture,
        model_digest=params.model_digest,
        numerics=params.numerics,
        numerics_version=NUMERICS_VERSION,
        parameters=loaded.plan.parameters,
        layers=config.layers,
        vocab_size=config.vocab_size,
        context_length=plan.context_length,
        model_context_length=config.context_length,
        tensors=TensorsReport(used=list(loaded.plan.used), unused=list(loaded.plan.unused)),
        adapter_digest=None if adapter is None else adapter.digest,
        numerics_error=distance,
        warnings=[*loaded.notes, *plan.warnings, *(() if adapter is None else adapter.warnings)],
    )
