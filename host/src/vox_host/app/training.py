"""Compose a training run: the worker, the run directory, the loop.

What can be known without starting anything is settled by `training_setup`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import vox_host
from vox_host.app.training_setup import Prepared, memory_budget_of, plugin_record, vendor_of
from vox_host.errors import UsageError, WorkerFailedError
from vox_host.hardware.record import Machine
from vox_host.launch import plan_launch
from vox_host.models.installed import InstalledModel
from vox_host.quoted import quoted
from vox_host.runs.base_tensors import base_key_map
from vox_host.runs.inside import refuse_inside_run
from vox_host.runs.layout import CHAT_TEMPLATE, CONFIG, RUN_JSON, TOKENIZER, RunDirectory
from vox_host.runs.manifest import AdapterFacts, BaseModelRecord, NumericsRecord
from vox_host.runs.manifest import PluginRecord as AdapterPlugin
from vox_host.runs.publish import publish_adapter
from vox_host.settings import Settings
from vox_host.stat_cache import write_aside
from vox_host.training.checkpoints import Checkpoint
from vox_host.training.data import order
from vox_host.training.drive import Job, Outcome, Reporter, drive
from vox_host.training.memory import check_room
from vox_host.training.record import (
    DataRecord,
    ModelRecord,
    RunRecord,
    record_digest,
    record_text,
)
from vox_host.whole_folder import Making, refuse_target, whole_folder, write_file
from vox_host.workers import Limits, TrainingClient, Worker
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = [
    "OpenTrainer",
    "base_record",
    "check_memory",
    "check_out",
    "create_run",
    "open_trainer",
    "put_beside",
    "run_record",
    "run_training",
]

_BESIDE = (TOKENIZER, CONFIG, "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files of the model that a run takes along, as far as they are there: serving needs no second download."""


def _if_there(out: Path) -> str:
    if (out / RUN_JSON).is_file():
        return f"`vox-host train --resume {quoted(out)}` goes on with that run, or name a new folder."
    return "Name a new folder."


_RUN = Making(
    option="--out ",
    undone="nothing was started",
    never="a run never replaces anything",
    if_there=_if_there,
    if_nowhere="Name another place.",
    failed_code="out-folder",
    failed="it is not there, nothing was trained",
    if_failed="Make room, or name another place.",
    makes_parents=True,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTrainer:
    """A worker with the base model loaded."""

    worker: Worker
    client: TrainingClient
    load: m.LoadResult


@contextlib.asynccontextmanager
async def open_trainer(
    settings: Settings,
    prepared: Prepared,
    *,
    threads: int | None = None,
    limits: Limits | None = None,
) -> AsyncGenerator[OpenTrainer, None]:
    """Start the chosen plugin and load the base model; the worker ends with the block.

    Raises:
        VoxError: its bytes differ, it can't start or load the model; nothing is left.
    """
    plan = await asyncio.to_thread(
        plan_launch,
        prepared.chosen,
        plugins_dir=settings.plugins_dir,
        log_dir=settings.log_dir,
        require_verified=prepared.require_verified,
    )
    worker = await Worker.start(plan, limits or Limits())
    try:
        client = TrainingClient(worker)
        params = m.LoadModelParams(
            model_dir=str(prepared.model.path),
            model_digest=prepared.model.digest,
            # Nothing is generated: one sequence, no longer than what is trained on.
            context_length=prepared.dataset.longest,
            numerics=prepared.numerics,
            threads=threads,
            max_sequences=1,
        )
        event = await worker.call("load_model", params)
        yield OpenTrainer(worker=worker, client=client, load=m.LoadResult.model_validate(event.result))
    finally:
        await worker.stop()


async def check_memory(
    settings: Settings, machine: Machine, prepared: Prepared, opened: OpenTrainer, *, devices: int = 1
) -> t.TrainMemory:
    """Ask the worker what the run takes at most, and hold it against what was free before it started.

    Args:
        devices: that share each step; each one needs the room.

    Raises:
        UsageError: it does not fit; the numbers are in it.
        VoxError: the worker refuses the adapter, or the number of devices.
    """
    options = prepared.options
    vendor = vendor_of(prepared.chosen)
    budget, source = memory_budget_of(settings, machine, vendor, devices=devices)
    # No step has more than all rows, and no micro-batch more than a step.
    examples = min(options.batch_size, len(prepared.dataset.train))
    at_once = options.micro_batch_size
    params = t.TrainPlanParams(
        adapter=options.adapter,
        longest_example=prepared.dataset.longest,
        examples=examples,
        micro_batch_size=None if at_once is None else min(at_once, examples),
        devices=devices,
        memory_bytes=budget,
    )
    try:
        memory = (await opened.client.plan(params)).memory
    except WorkerFailedError as error:
        if error.code == "not-supported" and devices > 1:
            # The plugin is well, and was asked for what it doesn't have.
            raise UsageError(error.code, error.message, facts=error.facts, remedy=error.remedy) from None
        raise
    if memory.place == "host" and vendor != "cpu":
        # Another memory than was looked at.
        budget, source = memory_budget_of(settings, machine, "cpu", devices=devices)
        params = params.model_copy(update={"memory_bytes": budget})
        memory = (await opened.client.plan(params)).memory
    if memory.devices != devices:
        # A worker of an older version passes over what it doesn't know.
        raise UsageError(
            "not-supported",
            f'plugin "{prepared.chosen.plugin_id}" trains on {memory.devices} device, and {devices} were '
            "asked for; nothing was trained",
            remedy="Leave --devices out, or update the plugin.",
        )
    check_room(memory.kinds, memory.total, budget, source)
    return memory


def run_record(prepared: Prepared, load: m.LoadResult) -> RunRecord:
    """Return what run.json of a new run says."""
    rows, beside = prepared.files.rows, prepared.files.held_out
    return RunRecord(
        vox_host=vox_host.__version__,
        model=ModelRecord(name=prepared.model.name, digest=prepared.model.digest),
        data=DataRecord(
            path=str(rows.path.absolute()), sha256=rows.digest, examples=len(prepared.dataset.train)
        ),
        held_out=len(prepared.dataset.held_out)
        if beside is None
        else DataRecord(
            path=str(beside.path.absolute()), sha256=beside.digest, examples=len(prepared.dataset.held_out)
        ),
        template=prepared.template_digest,
        template_origin=None if prepared.template is None else prepared.template.origin,
        plugin=plugin_record(prepared.chosen),
        numerics=NumericsRecord(mode=load.numerics, version=load.numerics_version, error=load.numerics_error),
        answers=prepared.answers,
        options=prepared.options,
    )


def base_record(model: InstalledModel) -> BaseModelRecord:
    """Return what an adapter says of the model that it lies on."""
    return BaseModelRecord(name=model.name, digest=model.digest, path=str(model.path))


def check_out(out: Path) -> None:
    """Refuse a place for a new run where something is, or where no folder can be made.

    Raises:
        UsageError: `out-exists`, `out-folder`, or `out-inside-run`: it lies in another run's folder.
    """
    refuse_inside_run(out, "nothing was started")
    refuse_target(out, _RUN)


def create_run(out: Path, prepared: Prepared, record: RunRecord) -> RunDirectory:
    """Make the folder of a new run, whole or not at all: run.json and what serving will need.

    Raises:
        UsageError: something has come to be there, or `out-folder`: it can't be written, and isn't there.
    """
    with whole_folder(out, _RUN) as folder:
        put_beside(folder, prepared)
        write_file(folder / RUN_JSON, record_text(record).encode("utf-8"))
    return RunDirectory(out)


def put_beside(folder: Path, prepared: Prepared) -> None:
    """Put what serving needs into a run's folder: the base model's very files, and the template that trains.

    What is there and differs was damaged since, or lost: a manifest must not vouch for that.
    """
    sources = {name: prepared.model.path / name for name in _BESIDE}
    contents = {name: path.read_bytes() for name, path in sources.items() if path.is_file()}
    if prepared.template is not None:
        contents[CHAT_TEMPLATE] = prepared.template.source.encode("utf-8")
    for name, content in contents.items():
        target = folder / name
        if not (target.is_file() and target.read_bytes() == content):
            write_aside(target, content)


async def run_training(
    run: RunDirectory,
    prepared: Prepared,
    record: RunRecord,
    opened: OpenTrainer,
    report: Reporter,
    should_stop: Callable[[], bool],
    memory: t.TrainMemory,
) -> Outcome:
    """Drive the run to its end as it was planned (`check_memory`); whoever calls holds it.

    Raises:
        VoxError: see `drive`.
    """
    publisher = _Publisher(run, prepared)
    job = Job(
        run=run,
        # Of the run alone: its folder may have any name.
        title=f"{record.model.name}, rank {record.options.rank}",
        record=record,
        options=prepared.options,
        train=[example.message() for example in prepared.dataset.train],
        held_out=[example.message() for example in prepared.dataset.held_out],
        order=order,
        publish=publisher.publish,
        report=report,
        should_stop=should_stop,
        devices=memory.devices,
        remember_bytes=memory.remember_bytes,
    )
    return await drive(job, opened.client)


@dataclass(slots=True)
class _Publisher:
    run: RunDirectory
    prepared: Prepared
    _key_map: dict[str, str] = field(default_factory=dict)

    def publish(self, checkpoint: Checkpoint, begun: t.TrainBeginResult) -> None:
        if not self._key_map:
            self._key_map = base_key_map(begun.matrices, self.prepared.model.path)
        # What the checkpoint was made as, whatever anything else says by now.
        record, model = checkpoint.state.run, self.prepared.model
        options = record.options
        facts = AdapterFacts(
            vox_host=record.vox_host,
            base_model=base_record(model),
            rank=options.rank,
            alpha=options.alpha,
            targets=tuple(options.targets),
            rank_stabilised=options.rank_stabilised,
            dropout=options.dropout,
            layer_order=tuple(begun.matrices),
            base_key_map=self._key_map,
            adapter_digest=checkpoint.state.adapter_digest,
            data_digest=record.data.sha256,
            numerics=record.numerics,
            plugin=AdapterPlugin(
                id=record.plugin.id, version=record.plugin.version, tree_digest=record.plugin.tree_digest
            ),
            seed=options.seed,
            preset=options.preset,
            run_digest=record_digest(record),
            step=checkpoint.state.step,
        )
        publish_adapter(
            self.run, checkpoint.folder, facts, sha256=checkpoint.state.files.get("adapter.safetensors")
        )
