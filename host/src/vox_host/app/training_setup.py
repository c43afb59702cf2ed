"""Settle a training run before anything is started: the model, the plugin, the preset, the data.

`training` starts the worker and drives the run. Unlike serving, training never goes on with another
plugin than the one that was chosen: the choice is a fact of the run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from vox_host.app.named_model import find_stored_model
from vox_host.chat.templates import template_names
from vox_host.counted import counted
from vox_host.discovery import discover
from vox_host.errors import UsageError
from vox_host.hardware.record import Machine
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_host.quoted import quoted
from vox_host.requirements import parse_requirement
from vox_host.resolution import AUTO, Candidate, Request, Resolution, resolve
from vox_host.runs.layout import RunDirectory
from vox_host.settings import Settings
from vox_host.training.bound import read_run_record
from vox_host.training.data import TemplateChoice, choose_template
from vox_host.training.data.encoding import Answers
from vox_host.training.dataset import Dataset, Files, Holdout, encode_dataset, read_dataset
from vox_host.training.memory import memory_budget
from vox_host.training.options import Asked, TrainingOptions, settle
from vox_host.training.presets import AUTO as AUTO_PRESET
from vox_host.training.presets import Vendor, choose_preset, load_presets
from vox_host.training.record import (
    DataRecord,
    ModelRecord,
    PluginRecord,
    RunRecord,
    changed_since,
    refuse_changes,
)
from vox_plugin_api import messages as m

__all__ = [
    "Prepared",
    "TrainRequest",
    "memory_budget_of",
    "plugin_record",
    "prepare",
    "prepare_resumed",
    "vendor_of",
]


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


@dataclass(frozen=True, slots=True)
class Moved:
    """Where a run's files of rows lie now; None: where they lay when it was begun."""

    data: Path | None = None
    holdout: Path | None = None


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
    model = find_stored_model(Catalogue(settings.models_dir), request.model, what="training on")
    resolution, numerics = _choose(settings, request, machine, candidates)
    vendor = vendor_of(resolution.chosen)
    budget, _ = memory_budget_of(settings, machine, vendor)
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
            remedy="Leave --max-length out, or give no more than that.",
        )
    verify_files(model, lambda *_: None, trust_unchanged=True)
    files = read_dataset(request.data, request.holdout)
    tokenizer = Tokenizer.load(model.path)
    template = choose_template(tokenizer, request.template) if files.needs_template else None
    if template is None and request.template is not None:
        choose_template(tokenizer, request.template)
        warnings.append(f"--template is not used: {request.data} holds no conversations")
    if template is None and request.answers != "all":
        warnings.append(f"--answers is not used: {request.data} holds no conversations")
    dataset = encode_dataset(
        files,
        tokenizer,
        template,
        holdout=request.holdout,
        max_length=max_length,
        answers=request.answers,
        seed=request.asked.seed,
        most_held_out=preset.most_held_out,
    )
    options = settle(request.asked, name, preset, examples=len(dataset.train), max_length=max_length)
    needing = [
        option
        for option, value in (("--patience", options.patience), ("--eval-every", request.asked.eval_every))
        if value is not None
    ]
    if needing and not dataset.held_out:
        raise UsageError(
            "usage",
            f"{needing[0]} needs held-out rows, and there are none; nothing was started",
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
    moved: Moved | None = None,
) -> tuple[Prepared, RunRecord]:
    """Settle a run that goes on; whoever calls holds the run.

    Args:
        micro_batch_size: in place of the run's own; it changes no bit.
        moved: where the files of rows lie now; their digests must be those of the start.

    Raises:
        UsageError: it is no run.
        IntegrityError: the data, the model, the template or the plugin is not that of the start.
        VoxError: as `prepare`.
    """
    record = read_run_record(run.path)
    moved = moved or Moved()
    if moved.holdout is not None and isinstance(record.held_out, int):
        raise UsageError(
            "usage",
            f"--holdout says where a file was moved to, and {run.path} holds out "
            f"{counted(record.held_out, 'row')} of its data; nothing was started",
            remedy=f"`vox-host train --resume {quoted(run.path)}`",
        )
    model = _model_of_then(Catalogue(settings.models_dir), record.model)
    request = TrainRequest(
        model=model.name,
        data=moved.data or Path(record.data.path),
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
    held_out = record.held_out
    holdout: Holdout = held_out if isinstance(held_out, int) else moved.holdout or Path(held_out.path)
    _refuse_missing(run, "--data", request.data)
    if isinstance(holdout, Path):
        _refuse_missing(run, "--holdout", holdout)
    files = read_dataset(request.data, holdout)
    found = [("data", str(request.data), record.data.sha256, files.rows.digest)]
    if files.held_out is not None and isinstance(record.held_out, DataRecord):
        found.append(("data", str(holdout), record.held_out.sha256, files.held_out.digest))
    refuse_changes(run.path, found)
    verify_files(model, lambda *_: None, trust_unchanged=True)
    tokenizer = Tokenizer.load(model.path)
    template = None if record.template is None else _template_of_then(run, record.template, tokenizer)
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


def _model_of_then(catalogue: Catalogue, then: ModelRecord) -> InstalledModel:
    """Return the model of that digest, whatever its name is now; else the one of that name, to be refused."""
    same = [one for one in catalogue.list() if isinstance(one, InstalledModel) and one.digest == then.digest]
    if same:
        return next((model for model in same if model.name == then.name), same[0])
    return catalogue.find(then.name)


def _refuse_missing(run: RunDirectory, option: str, path: Path) -> None:
    if not path.exists():
        raise UsageError(
            "data-missing",
            f"{path} does not exist, which {run.path} was begun with; nothing was started",
            remedy=f"Where it was moved: `vox-host train --resume {quoted(run.path)} {option} FILE`; "
            "its bytes must be those of then.",
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


def memory_budget_of(
    settings: Settings, machine: Machine, vendor: Vendor, *, devices: int = 1
) -> tuple[int | None, str]:
    """Return the bytes that a run may plan with on each device of this kind, and where the number is from."""
    return memory_budget(
        machine,
        vendor,
        unified_reserve_bytes=settings.unified_memory_reserve_bytes,
        vram_safety=settings.vram_safety,
        devices=devices,
    )


def _template_of_then(run: RunDirectory, digest: str, tokenizer: Tokenizer) -> TemplateChoice:
    """Return the template that the run was begun with; one that is gone is found again where it came from.

    Raises:
        IntegrityError: it was changed, or is gone and the model has another one now.
    """
    place = run.chat_template
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        if (choice := _known_template(digest, tokenizer)) is not None:
            return choice
        found = "no such file, and no template of the model or of vox-host is the one"
    except OSError as error:
        found = error.strerror or str(error)
    else:
        found = hashlib.sha256(content).hexdigest()
        if found == digest:
            return TemplateChoice(content.decode("utf-8"), str(place), None)
    remedy = None
    if _known_template(digest, tokenizer) is not None:
        remedy = (
            f"`rm {quoted(place)}`, then `vox-host train --resume {quoted(run.path)}` puts "
            "back the one that trained. A run with another template is a new one."
        )
    raise changed_since(run.path, "template", str(place), digest, found, remedy)


def _known_template(digest: str, tokenizer: Tokenizer) -> TemplateChoice | None:
    known = [choose_template(tokenizer), *(choose_template(tokenizer, name) for name in template_names())]
    return next((choice for choice in known if _sha256(choice.source) == digest), None)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
