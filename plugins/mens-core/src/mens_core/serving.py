"""A loaded model with its cache and engine: what a backend serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mens_core.adapters.apply import make_loras, to_lane
from mens_core.adapters.copies import BaseTable, compare_copies
from mens_core.adapters.served import ServedAdapter, read_adapter
from mens_core.engine import Engine
from mens_core.kv_plan import KvPlan, plan_kv_cache
from mens_core.models.load import LoadedModel, Progress, load
from mens_core.numerics import NUMERICS_VERSION
from mens_core.ops import Ops
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError, read_json_object
from vox_plugin_api.families import ModelConfig, parse_config
from vox_plugin_api.families.tensors import EMBEDDING, HEAD
from vox_plugin_api.messages import LoadModelParams, LoadResult, TensorsReport

__all__ = ["LaneFactory", "Served", "load_served"]

LaneFactory = Callable[[LoadModelParams], Ops]
"""Makes a lane for one model: threads and numerics are in the parameters."""


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
    make_lane: LaneFactory,
    *,
    make_adapting_lane: Callable[[Ops], TrainingOps],
    default_kv_bytes: int,
) -> Generator[Progress, None, Served]:
    """Open, check and load a model directory, yielding after each layer.

    The cache is planned and an adapter is held against the config before a weight is read, so
    what can't fit fails in milliseconds.

    Args:
        make_adapting_lane: makes the lane that puts an adapter on weights which another lane of the
            same kind loaded.

    Raises:
        BackendError: the directory, its config, its weights or the memory are not right.
    """
    started = time.perf_counter()
    path = Path(params.model_dir)
    try:
        config = parse_config(read_json_object(path / "config.json"), source=str(path / "config.json"))
        plan = plan_kv_cache(config, params, default_bytes=default_kv_bytes)
        checkpoint = Checkpoint.open(path)
        adapter = None if params.adapter is None else read_adapter(params.adapter, config)
        opened = time.perf_counter()
        ops = make_lane(params)
        loaded = yield from load(config, checkpoint, ops)
        checkpoint.close()
        if adapter is not None:
            adapter = yield from _compared(adapter, loaded, ops)
            ops = make_adapting_lane(ops)
            loaded = _adapted(loaded, ops, adapter)
    except CheckpointError as error:
        raise BackendError(
            error.code, f"{error.message}. Nothing was loaded.", facts=error.facts, remedy=error.remedy
        ) from error
    weights_read = time.perf_counter()
    engine = Engine(
        loaded.model,
        loaded.model.new_cache(plan.blocks),
        vocab_size=config.vocab_size,
        context_length=plan.context_length,
        blocks=plan.blocks,
        max_sequences=params.max_sequences,
    )
    observation = {
        "open_s": opened - started,
        "weights_s": weights_read - opened,
        "load_s": time.perf_counter() - started,
        "kv_cache": plan.as_facts(),
        "lane": ops.facts(),
    }
    return Served(ops, loaded, engine, _report(params, loaded, plan, adapter), observation)


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


def _adapted(loaded: LoadedModel, ops: TrainingOps, adapter: ServedAdapter) -> LoadedModel:
    """Put the updates beside the weights, which stay as they are."""
    loras = make_loras(ops, adapter.plan, to_lane(ops, adapter.tensors))
    return replace(loaded, model=replace(loaded.model, ops=ops).adapted(loras))


def _report(
    params: LoadModelParams, loaded: LoadedModel, plan: KvPlan, adapter: ServedAdapter | None
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
        warnings=[*loaded.notes, *plan.warnings, *(() if adapter is None else adapter.warnings)],
    )
