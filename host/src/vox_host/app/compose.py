"""The composition root: from settings and a model's name to a service that answers.

Order matters for time and memory: the tokenizer's vocabulary is parsed while the worker gets up and reads
the weights. Parsing takes some 40 MiB more than keeping it, before a request has touched the KV cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vox_host.app.engine import WorkerEngine
from vox_host.app.held_adapter import HeldAdapter
from vox_host.app.model_info import check_adapter, describe_numerics, model_info
from vox_host.app.named_model import find_named_model
from vox_host.app.service import ModelService
from vox_host.app.templates import open_template
from vox_host.byte_sizes import byte_size
from vox_host.discovery import discover
from vox_host.errors import IntegrityError, ModelError, PluginError, VoxError, WorkerFailedError
from vox_host.hardware.record import Machine
from vox_host.launch import plan_launch
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.models.model_manifest import MODEL_MANIFEST
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_host.resolution import AUTO, Candidate, Request, Resolution, Stage, StageRecord, resolve
from vox_host.settings import Settings
from vox_host.workers import LaunchPlan, Limits, Supervisor, Worker
from vox_host.workers.failures import blames_what_was_named
from vox_plugin_api import messages as m
from vox_plugin_api.transcript import Transcript

__all__ = ["ModelOptions", "OpenModel", "open_model"]

log = logging.getLogger(__name__)

Say = Callable[[str], None]


def _say_nothing(_: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """What a user may choose about a model that is to answer."""

    model: str
    """A name of the store, or the path of a run or an adapter folder."""
    base: str | None = None
    """The model that an adapter lies on; None: what the adapter says."""
    plugin: str = AUTO
    numerics: m.Numerics | None = None
    context_length: int | None = None
    """Positions for each sequence; None: the model's own, as far as memory goes."""
    kv_cache_bytes: int | None = None
    """Memory for keys and values; None: the plugin's own bound."""
    threads: int | None = None
    max_sequences: int = 64
    require_verified: bool = False
    record: Path | None = None
    """Where to write the transcript of everything the worker is asked and answers."""
    only_text: str | None = None
    """The one text that will be encoded, where that is known: the tokenizer is then ready sooner."""
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A model that answers."""

    service: ModelService
    supervisor: Supervisor
    resolution: Resolution
    load: m.LoadResult


@contextlib.asynccontextmanager
async def open_model(
    settings: Settings,
    options: ModelOptions,
    machine: Machine,
    *,
    candidates: Sequence[Candidate] | None = None,
    progress: Say = _say_nothing,
    warn: Say = _say_nothing,
) -> AsyncGenerator[OpenModel, None]:
    """Start the plugin that fits, load the model, and hand out the service; everything ends with the block.

    A named plugin is used or refused. `auto` tries the next candidate when one can't start, and
    warns of it; a plugin whose bytes have changed stops everything, and so does a model or an adapter
    that is at fault itself.

    Raises:
        VoxError: no model, no plugin, bytes that differ, a worker that can't load it; nothing is left.
    """
    catalogue = Catalogue(settings.models_dir)
    named = await asyncio.to_thread(find_named_model, catalogue, options.model, base=options.base)
    model = named.base
    merged = ", merged" if model.merged_from is not None else ""
    progress(f"model {model.name} ({model.architecture}{merged}, {byte_size(model.size_bytes)})")
    found = list(candidates) if candidates is not None else discover(settings.plugins_dir)
    # Before the model's bytes are read: what a plugin is refused for is known without them.
    resolve(_request(options, has_adapter=named.adapter is not None), machine, found)
    await _verify(model, progress)
    transcript = Transcript(options.record) if options.record is not None else None
    async with contextlib.AsyncExitStack() as stack:
        if transcript is not None:
            stack.callback(transcript.close)
        held = None
        if named.adapter is not None:
            held = stack.enter_context(HeldAdapter(named.adapter))
            for note in held.source.notes:
                warn(note)
        start = _Start(settings, options, machine, model, held, transcript, progress, warn)
        resolution, supervisor, load = await start.first_that_starts(found)
        stack.push_async_callback(supervisor.stop)
        tokenizer = await start.tokenizer()
        adapter = None if held is None else held.source
        template, template_warnings = await open_template(stack, model, adapter, tokenizer, warn)
        for warning in (*resolution.warnings, *load.warnings):
            warn(warning)
        if resolution.degraded_reason is not None:
            warn(resolution.degraded_reason)
        info = model_info(model, adapter, resolution, load, template_warnings)
        if info.adapter is not None:
            progress(f"adapter {info.name}: {info.adapter.describe()}")
        progress(
            f"plugin {info.plugin_id} {info.plugin_version}: lane {info.lane}, "
            f"{describe_numerics(info.numerics, info.numerics_error)}, context {info.context_length}"
        )
        service = ModelService(info, tokenizer, template, WorkerEngine(supervisor))
        yield OpenModel(service=service, supervisor=supervisor, resolution=resolution, load=load)


async def _verify(model: InstalledModel, progress: Say) -> None:
    """Hold the model's files against its manifest; those that were not touched since are not read again."""
    said = False

    def say(*_: object) -> None:
        nonlocal said
        if not said:
            said = True
            progress(f"checking the files of {model.name}")

    await asyncio.to_thread(verify_files, model, say, trust_unchanged=True)


def _request(options: ModelOptions, *, has_adapter: bool) -> Request:
    return Request(
        plugin=options.plugin,
        also=("adapters",) if has_adapter else (),
        numerics=options.numerics,
        require_verified=options.require_verified,
    )


@dataclass(slots=True)
class _Start:
    """The attempts to start a plugin and load the model."""

    settings: Settings
    options: ModelOptions
    machine: Machine
    model: InstalledModel
    adapter: HeldAdapter | None
    transcript: Transcript | None
    progress: Say
    warn: Say
    said_of_log: str | None = None
    outcomes: list[StageRecord] = field(default_factory=list)
    _loading: asyncio.Task[Tokenizer] | None = None

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer once it is loaded.

        Raises:
            ModelError: it can't be.
        """
        self._load_tokenizer()
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    def _is_the_tokenizers(self, failure: VoxError) -> bool:
        loading = self._loading
        return loading is not None and loading.done() and loading.exception() is failure

    def _load_tokenizer(self) -> None:
        if self._loading is None:
            self._loading = asyncio.create_task(
                asyncio.to_thread(Tokenizer.load, self.model.path, self.options.only_text)
            )

    async def first_that_starts(
        self, candidates: Sequence[Candidate]
    ) -> tuple[Resolution, Supervisor, m.LoadResult]:
        request = _request(self.options, has_adapter=self.adapter is not None)
        last_failure: VoxError | None = None
        failed = ""
        while True:
            try:
                resolution = resolve(request, self.machine, candidates, self.outcomes)
            except VoxError:
                # What really went wrong says more than that nothing is left to try.
                if last_failure is not None:
                    raise last_failure from None
                raise
            chosen = resolution.chosen
            if last_failure is not None:
                # Said once there is another to go on with; else it is the error itself.
                self.progress(f"{failed} could not be used: {last_failure.message}")
            verified_plan = functools.partial(self._verified_plan, chosen)
            plan = await verified_plan()
            self.progress(f"starting {chosen.plugin_id} {chosen.version}")
            loads: list[m.LoadResult] = []

            async def load(
                worker: Worker, chosen: Candidate = chosen, loads: list[m.LoadResult] = loads
            ) -> None:
                self._warn_of_log(worker)
                loads.append(await self._load(worker, chosen))
                await self.tokenizer()

            supervisor = Supervisor(
                plan,
                prepare=load,
                meanwhile=self._load_tokenizer,
                renew=functools.partial(self._renewed_plan, chosen),
                transcript=self.transcript,
                limits=self.options.limits,
            )
            started = time.monotonic()
            try:
                await supervisor.start()
            except IntegrityError:
                raise
            except VoxError as failure:
                if self.options.plugin != AUTO or self._is_the_tokenizers(failure):
                    raise
                if blames_what_was_named(failure):
                    raise
                last_failure, failed = failure, chosen.plugin_id
                self._note(chosen, _stage_of(failure), "failed", failure.code, failure.message)
                continue
            load_ms = (time.monotonic() - started) * 1000
            log.info("plugin.loaded id=%s load_ms=%.0f", chosen.plugin_id, load_ms)
            self._note(chosen, "start", "passed", "started", "handshake completed")
            self._note(
                chosen, "self-test", "passed", "self-test-passed", "the lane's operators gave the right bits"
            )
            self._note(chosen, "health", "passed", "loaded", f'model "{self.model.name}" is loaded')
            # Resolved once more, so that the record holds what the attempts have shown.
            return resolve(request, self.machine, candidates, self.outcomes), supervisor, loads[0]

    async def _load(self, worker: Worker, chosen: Candidate) -> m.LoadResult:
        async def load(adapter: m.AdapterParams | None = None) -> m.LoadResult:
            params = self._load_params(chosen).model_copy(update={"adapter": adapter})
            event = await worker.call("load_model", params)
            return m.LoadResult.model_validate(event.result)

        if self.adapter is None:
            return await load()
        loaded = await self.adapter.load(load)
        check_adapter(self.adapter.source, loaded, chosen.plugin_id)
        return loaded

    def _warn_of_log(self, worker: Worker) -> None:
        """Say once that there is no log file; a worker without one serves all the same."""
        if worker.log_problem not in (None, self.said_of_log):
            self.said_of_log = worker.log_problem
            self.warn(f"the worker's log can't be written ({worker.log_problem}); it goes to stderr")

    async def _verified_plan(self, chosen: Candidate) -> LaunchPlan:
        # Each start maps the weights anew.
        await _verify(self.model, self.progress)
        return await asyncio.to_thread(
            plan_launch,
            chosen,
            plugins_dir=self.settings.plugins_dir,
            log_dir=self.settings.log_dir,
            require_verified=self.options.require_verified,
        )

    async def _renewed_plan(self, chosen: Candidate) -> LaunchPlan:
        """Return the plan of a restart; a model or a plugin removed in the meantime is called just that."""
        if not (self.model.path / MODEL_MANIFEST).exists():
            raise ModelError(
                "model-gone",
                f'the model "{self.model.name}" is no longer in the store',
                facts=[("expected at", str(self.model.path))],
                remedy="Import the model again.",
            )
        if chosen.python is not None and not chosen.python.exists():
            raise PluginError(
                "plugin-gone",
                f'the plugin "{chosen.plugin_id}" is no longer installed',
                facts=[("expected at", str(chosen.python))],
                remedy="Install the plugin again.",
            )
        try:
            return await self._verified_plan(chosen)
        except OSError as error:
            raise ModelError(
                "restart-unreadable",
                f"a file of the model or the plugin can't be read ({error.strerror or error})",
                facts=[("file", str(error.filename))],
            ) from error

    def _load_params(self, chosen: Candidate) -> m.LoadModelParams:
        offered = chosen.manifest.backend.numerics if chosen.manifest is not None else []
        default: m.Numerics = "canonical" if "canonical" in offered or not offered else offered[0]
        return m.LoadModelParams(
            model_dir=str(self.model.path),
            model_digest=self.model.digest,
            context_length=self.options.context_length,
            numerics=self.options.numerics or default,
            threads=self.options.threads,
            memory_bytes=self.options.kv_cache_bytes,
            max_sequences=self.options.max_sequences,
        )

    def _note(self, chosen: Candidate, stage: Stage, status: str, code: str, detail: str) -> None:
        self.outcomes.append(
            StageRecord(
                plugin_id=chosen.plugin_id,
                version=chosen.version,
                stage=stage,
                status="passed" if status == "passed" else "failed",
                code=code,
                detail=detail,
            )
        )


def _stage_of(failure: VoxError) -> Stage:
    if failure.code.startswith("self-test"):
        return "self-test"
    return "health" if isinstance(failure, WorkerFailedError) and "load" in failure.code else "start"
