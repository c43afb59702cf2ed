"""Compose a training run: the model, the plugin, the data, the worker, the run directory.

`prepare` and `prepare_resumed` settle everything that can be known without starting anything;
`open_trainer` starts the worker; `train` drives the run. Unlike serving, training never goes on with
another plugin than the one that was chosen: the choice is a fact of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import vox_host
from vox_host.discovery import discover
from vox_host.errors import UsageError
from vox_host.hardware.record import Machine
from vox_host.launch import plan_launch
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_host.requirements import parse_requirement
from vox_host.resolution import AUTO, Candidate, Request, Resolution, resolve
from vox_host.runs.base_tensors import base_key_map
from vox_host.runs.layout import CHAT_TEMPLATE, CONFIG, RUN_JSON, TOKENIZER, RunDirectory
from vox_host.runs.manifest import AdapterFacts, BaseModelRecord
from vox_host.runs.manifest import NumericsRecord as AdapterNumerics
from vox_host.runs.manifest import PluginRecord as AdapterPlugin
from vox_host.runs.publish import publish_adapter
from vox_host.settings import Settings
from vox_host.training.checkpoints import Checkpoint
from vox_host.training.data import TemplateChoice, choose_template, order
from vox_host.training.data.encoding import Answers
from vox_host.training.dataset import Dataset, Files, Holdout, encode_dataset, read_dataset
from vox_host.training.drive import Job, Outcome, Reporter, drive
from vox_host.training.memory import check_room, memory_budget
from vox_host.training.options import Asked, TrainingOptions, settle
from vox_host.training.presets import AUTO as AUTO_PRESET
from vox_host.training.presets import Vendor, choose_preset, load_presets
from vox_host.training.record import (
    DataRecord,
    ModelRecord,
    NumericsRecord,
    PluginRecord,
    RunRecord,
    read_run_record,
    record_text,
    refuse_changes,
)
from vox_host.workers import Limits, TrainingClient, Worker
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = [
    "OpenTrainer",
    "Prepared",
    "TrainRequest",
    "check_memory",
    "check_out",
    "create_run",
    "open_trainer",
    "prepare",
    "prepare_resumed",
    "train",
]

Say = Callable[[str], None]

_BESIDE = (TOKENIZER, CONFIG, "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")
"""Files of the model that a run takes along, as far as they are there: serving needs no second download."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRequest:
    """A new run, as asked for."""

    model: str
    data: Path
    asked: Asked
    preset: str = AUTO_PRESET
    holdout: Holdout = None
    template: str | None = None
    answers: Answers = "all"
    plugin: str = AUTO
    numerics: m.Numerics | None = None
    require_verified: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that could start: nothing has been started or written yet."""

    model: InstalledModel
    resolution: Resolution
    numerics: m.Numerics
    require_verified: bool
    tokenizer: Tokenizer
    template: TemplateChoice | None
    template_digest: str | None
    answers: Answers
    files: Files
    dataset: Dataset
    options: TrainingOptions
    warnings: tuple[str, ...]

    @property
    def chosen(self) -> Candidate:
        return self.resolution.chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTrainer:
    """A worker with the base model loaded."""

    worker: Worker
    client: TrainingClient
    load: m.LoadResult


def prepare(
    settings: Settings,
    request: TrainRequest,
    machine: Machine,
    *,
    candidates: Sequence[Candidate] | None = None,
) -> Prepared:
    """Settle a new run.

    Raises:
        VoxError: no such model, no plugin that trains, an unknown preset, bad rows, options that contradict.
    """
    model = Catalogue(settings.models_dir).find(request.model)
    resolution, numerics = _choose(settings, request, machine, candidates)
    vendor = vendor_of(resolution.chosen)
    budget, _ = _budget(settings, machine, vendor)
    presets = load_presets()
    name = choose_preset(request.preset, presets, vendor=vendor, budget_bytes=budget)
    preset = presets[name]
    warnings = [*resolution.warnings, *([resolution.degraded_reason] if resolution.degraded_reason else [])]
    if vendor not in preset.vendors:
        warnings.append(
            f"the preset {name!r} is made for {', '.join(preset.vendors)}; used on {vendor} as you asked"
        )
    most = model.context_length
    max_length = request.asked.max_length or min(preset.max_length, most or preset.max_length)
    if most is not None and max_length > most:
        raise UsageError(
            "context-too-long",
            f"--max-length {max_length}: {model.name} has {most} positions; nothing was started",
            facts=[("limit", most), ("found", max_length)],
        )
    verify_files(model, lambda *_: None, trust_unchanged=True)
    files = read_dataset(request.data, request.holdout)
    tokenizer = Tokenizer.load(model.path)
    template = choose_template(tokenizer, request.template) if files.needs_template else None
    if template is None and request.template is not None:
        choose_template(tokenizer, request.template)
        warnings.append(f"--template is not used: {request.data} holds no conversations")
    dataset = encode_dataset(
        files,
        tokenizer,
        template,
        holdout=request.holdout,
        max_length=max_length,
        answers=request.answers,
        seed=request.asked.seed,
    )
    options = settle(request.asked, name, preset, examples=len(dataset.train), max_length=max_length)
    if options.patience is not None and not dataset.held_out:
        raise UsageError(
            "usage",
            "--patience needs held-out rows, and there are none; nothing was started",
            remedy="Give --holdout N or --holdout FILE.",
        )
    return Prepared(
        model=model,
        resolution=resolution,
        numerics=numerics,
        require_verified=request.require_verified,
        tokenizer=tokenizer,
        template=template,
        template_digest=None if template is None else _sha256(template.source),
        answers=request.answers,
        files=files,
        dataset=dataset,
        options=options,
        warnings=(*warnings, *dataset.warnings),
    )


def prepare_resumed(
    settings: Settings,
    run: RunDirectory,
    machine: Machine,
    *,
    candidates: Sequence[Candidate] | None = None,
    micro_batch_size: int | None = None,
) -> tuple[Prepared, RunRecord]:
    """Settle a run that goes on; whoever calls holds the run.

    Args:
        micro_batch_size: in place of the run's own; it changes no bit.

    Raises:
        UsageError: it is no run.
        IntegrityError: the data, the model, the template or the plugin is not that of the start.
        VoxError: as `prepare`.
    """
    record = read_run_record(run.path)
    model = Catalogue(settings.models_dir).find(record.model.name)
    request = TrainRequest(
        model=record.model.name,
        data=Path(record.data.path),
        asked=Asked(),
        plugin=record.plugin.id,
        numerics=record.numerics.mode,
    )
    resolution, numerics = _choose(settings, request, machine, candidates)
    chosen = resolution.chosen
    refuse_changes(
        run.path,
        [
            ("model", str(model.path), record.model.digest, model.digest),
            ("plugin", chosen.location, record.plugin.digest, plugin_record(chosen).digest),
        ],
    )
    holdout: Holdout = record.held_out if isinstance(record.held_out, int) else Path(record.held_out.path)
    files = read_dataset(request.data, holdout)
    found = [("data", record.data.path, record.data.sha256, files.rows.digest)]
    if files.held_out is not None and isinstance(record.held_out, DataRecord):
        found.append(("data", record.held_out.path, record.held_out.sha256, files.held_out.digest))
    template = None
    if record.template is not None:
        try:
            source = run.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            source = str(error)
        found.append(("template", str(run.chat_template), record.template, _sha256(source)))
        template = TemplateChoice(source, str(run.chat_template), None)
    refuse_changes(run.path, found)
    verify_files(model, lambda *_: None, trust_unchanged=True)
    tokenizer = Tokenizer.load(model.path)
    options = record.options
    if micro_batch_size is not None:
        options = options.model_copy(update={"micro_batch_size": micro_batch_size})
    dataset = encode_dataset(
        files,
        tokenizer,
        template,
        holdout=holdout,
        max_length=options.max_length,
        answers=record.answers,
        seed=options.seed,
    )
    prepared = Prepared(
        model=model,
        resolution=resolution,
        numerics=numerics,
        require_verified=False,
        tokenizer=tokenizer,
        template=template,
        template_digest=record.template,
        answers=record.answers,
        files=files,
        dataset=dataset,
        options=options,
        warnings=(*resolution.warnings, *dataset.warnings),
    )
    return prepared, record


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
    settings: Settings, machine: Machine, prepared: Prepared, opened: OpenTrainer
) -> t.TrainMemory:
    """Ask the worker what the run takes at most, and hold it against what was free before it started.

    Raises:
        UsageError: it does not fit; the numbers are in it.
        VoxError: the worker refuses the adapter.
    """
    options = prepared.options
    plan = await opened.client.plan(
        t.TrainPlanParams(
            adapter=options.adapter,
            longest_example=prepared.dataset.longest,
            examples=options.batch_size,
            micro_batch_size=options.micro_batch_size,
        )
    )
    memory = plan.memory
    place: Vendor = "cpu" if memory.place == "host" else vendor_of(prepared.chosen)
    budget, source = _budget(settings, machine, place)
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
        numerics=NumericsRecord(mode=load.numerics, version=load.numerics_version),
        answers=prepared.answers,
        options=prepared.options,
    )


def check_out(out: Path) -> None:
    """Refuse a place for a new run where something is.

    Raises:
        UsageError: there is.
    """
    if out.exists() or out.is_symlink():
        is_run = (out / RUN_JSON).is_file()
        raise UsageError(
            "out-exists",
            f"--out {out} exists; nothing was started, since a run never replaces anything",
            remedy=f"`vox-host train --resume {out}` goes on with that run, or name a new folder."
            if is_run
            else "Name a new folder.",
        )


def create_run(out: Path, prepared: Prepared, record: RunRecord) -> RunDirectory:
    """Make the folder of a new run, whole or not at all: run.json and what serving will need.

    Raises:
        UsageError: something has come to be there.
        OSError: it can't be written; nothing is there.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        aside.mkdir()
        for name in _BESIDE:
            if (prepared.model.path / name).is_file():
                shutil.copyfile(prepared.model.path / name, aside / name)
        if prepared.template is not None:
            (aside / CHAT_TEMPLATE).write_text(prepared.template.source, encoding="utf-8")
        (aside / RUN_JSON).write_text(record_text(record), encoding="utf-8")
        for path in aside.iterdir():
            _sync(path)
        _sync(aside)
        check_out(out)
        aside.rename(out)
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return RunDirectory(out)


async def train(
    run: RunDirectory,
    prepared: Prepared,
    record: RunRecord,
    opened: OpenTrainer,
    report: Reporter,
    should_stop: Callable[[], bool],
) -> Outcome:
    """Drive the run to its end; whoever calls holds it.

    Raises:
        VoxError: see `drive`.
    """
    publisher = _Publisher(run, prepared, record)
    job = Job(
        run=run,
        title=f"{run.path.absolute().name}: {prepared.model.name}, rank {prepared.options.rank}",
        options=prepared.options,
        train=[example.message() for example in prepared.dataset.train],
        held_out=[example.message() for example in prepared.dataset.held_out],
        order=order,
        publish=publisher.publish,
        report=report,
        should_stop=should_stop,
    )
    return await drive(job, opened.client)


@dataclass(slots=True)
class _Publisher:
    run: RunDirectory
    prepared: Prepared
    record: RunRecord
    _key_map: dict[str, str] = field(default_factory=dict)

    def publish(self, checkpoint: Checkpoint, begun: t.TrainBeginResult) -> None:
        if not self._key_map:
            self._key_map = base_key_map(begun.matrices, self.prepared.model.path)
        options, record, model = self.record.options, self.record, self.prepared.model
        facts = AdapterFacts(
            vox_host=record.vox_host,
            base_model=BaseModelRecord(name=model.name, digest=model.digest, path=str(model.path)),
            rank=options.rank,
            alpha=options.alpha,
            targets=tuple(options.targets),
            rank_stabilised=options.rank_stabilised,
            dropout=options.dropout,
            layer_order=tuple(begun.matrices),
            base_key_map=self._key_map,
            adapter_digest=checkpoint.state.adapter_digest,
            data_digest=record.data.sha256,
            numerics=AdapterNumerics(mode=record.numerics.mode, version=record.numerics.version),
            plugin=AdapterPlugin(
                id=record.plugin.id, version=record.plugin.version, tree_digest=record.plugin.tree_digest
            ),
            seed=options.seed,
            preset=options.preset,
            step=checkpoint.state.step,
        )
        publish_adapter(
            self.run, checkpoint.folder, facts, sha256=checkpoint.state.files.get("adapter.safetensors")
        )


def plugin_record(chosen: Candidate) -> PluginRecord:
    """Return what tells this plugin from any other."""
    return PluginRecord(
        id=chosen.plugin_id,
        version=chosen.version or "",
        manifest_digest=chosen.manifest_digest or "",
        tree_digest=None if chosen.receipt is None else chosen.receipt.tree_digest,
    )


def vendor_of(chosen: Candidate) -> Vendor:
    """Return the kind of device that a plugin runs on, as its manifest says."""
    texts = [] if chosen.manifest is None else chosen.manifest.requires.devices
    namespaces = {parse_requirement(text).namespace for text in texts}
    for vendor in ("nvidia", "apple"):
        if vendor in namespaces:
            return cast("Vendor", vendor)
    return "cpu"


def _choose(
    settings: Settings, request: TrainRequest, machine: Machine, candidates: Sequence[Candidate] | None
) -> tuple[Resolution, m.Numerics]:
    found = discover(settings.plugins_dir) if candidates is None else candidates
    resolution = resolve(
        Request(
            plugin=request.plugin,
            capability="train",
            numerics=request.numerics,
            require_verified=request.require_verified,
        ),
        machine,
        found,
    )
    manifest = resolution.chosen.manifest
    offered: list[m.Numerics] = [] if manifest is None else manifest.backend.numerics
    default: m.Numerics = "canonical" if "canonical" in offered or not offered else offered[0]
    return resolution, request.numerics or default


def _budget(settings: Settings, machine: Machine, vendor: Vendor) -> tuple[int | None, str]:
    return memory_budget(
        machine,
        vendor,
        unified_reserve_bytes=settings.unified_memory_reserve_bytes,
        vram_safety=settings.vram_safety,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
