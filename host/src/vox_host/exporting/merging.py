"""Have a worker fold an adapter into its base's weights: the host itself never computes with any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vox_host.hardware.record import Machine
from vox_host.launch import plan_launch
from vox_host.models.installed import InstalledModel
from vox_host.models.verifying import verify_files
from vox_host.resolution import Candidate, Request, resolve
from vox_host.runs.source import AdapterSource
from vox_host.settings import Settings
from vox_host.workers import Limits, Worker
from vox_plugin_api.merge_messages import MergeParams, MergeResult

__all__ = ["Dtype", "Form", "MergeJob", "choose_plugin", "fold"]

Form = Literal["checkpoint", "hugging-face", "gguf"]
Dtype = Literal["f32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeJob:
    """What is merged, and who does it."""

    settings: Settings
    base: InstalledModel
    adapter: AdapterSource
    plugin: Candidate
    dtype: Dtype | None = None
    threads: int | None = None
    say: Callable[[str], None] = lambda _: None


def choose_plugin(candidates: Sequence[Candidate], machine: Machine, *, plugin: str) -> Candidate:
    """Return the plugin that merges: the named one, or of those that can, the one `auto` would take.

    Raises:
        VoxError: none can, or not the named one, or none that can fits this machine.
    """
    return resolve(Request(plugin=plugin, capability="adapters"), machine, candidates).chosen


async def fold(job: MergeJob, folder: Path, form: Form) -> MergeResult:
    """Have the merged weights written into the new folder `folder`.

    Raises:
        VoxError: the base isn't what was imported, the plugin can't be started, or the worker's own
            error; nothing is at `folder`.
    """
    settings = job.settings
    await asyncio.to_thread(verify_files, job.base, lambda *_: None, trust_unchanged=True)
    plan = await asyncio.to_thread(
        plan_launch, job.plugin, plugins_dir=settings.plugins_dir, log_dir=settings.log_dir
    )
    job.say(f"{job.plugin.plugin_id} merges {job.adapter.name} into {job.base.name}")
    worker = await Worker.start(plan, Limits())
    try:
        params = MergeParams(
            model_dir=str(job.base.path),
            model_digest=job.base.digest,
            adapter=job.adapter.params(),
            folder=str(folder),
            form=form,
            dtype=job.dtype,
            threads=job.threads,
        )
        event = await worker.call("merge_adapter", params)
        return MergeResult.model_validate(event.result)
    finally:
        await worker.stop()
