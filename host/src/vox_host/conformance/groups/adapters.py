"""Adapters: scores of given texts, an update that changes nothing, what must be refused, merging."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from vox_host.conformance.compare import Difference
from vox_host.conformance.expected import load_models
from vox_host.conformance.groups.evaluation import ask_scores, judge_scores
from vox_host.conformance.session import Session, case, failed, in_time
from vox_host.conformance.tiny_adapters import write_adapter
from vox_host.conformance.verdict import CaseResult
from vox_host.errors import VoxError
from vox_host.workers import Worker
from vox_plugin_api import messages as m
from vox_plugin_api.merge_messages import MergeParams, MergeResult

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the results.

    Raises:
        NotOfferedError: the plugin serves no adapters, or does not evaluate.
    """
    session.require("adapters")
    session.require("evaluate")
    for name, model in load_models()[0]["models"].items():
        tiny, *_ = session.model(name)
        recorded = model["adapter"]
        adapter = write_adapter(tiny, session.folder / f"{name}-adapter.safetensors")
        zero = write_adapter(tiny, session.folder / f"{name}-zero.safetensors", is_zero=True)
        async with session.worker() as worker:
            for title, wrong, code in _wrong(adapter):
                yield await case(f"{name}/{title}", _refused(session, worker, name, wrong, code), "passed")
            yield await case(f"{name}/load", _load(session, worker, name, adapter, recorded["digest"]))
            async for result in _scores(session, worker, name, model, recorded["results"], "adapted"):
                yield result
            yield await case(f"{name}/unload", _unload(worker), "passed")
            yield await case(f"{name}/load, B zero", _load(session, worker, name, zero, None))
            base = model["scores"]["results"]
            async for result in _scores(session, worker, name, model, base, "B zero, so the base"):
                yield result
            if session.is_canonical:
                params = _merging(session, name, adapter)
                yield await case(f"{name}/merge", _merge(worker, params, recorded["merged"]), "bitwise")
                yield await case(
                    f"{name}/merge, folder there already", _merge_again(worker, params), "passed"
                )


async def _scores(
    session: Session,
    worker: Worker,
    name: str,
    model: Mapping[str, Any],
    recorded: list[Mapping[str, Any]],
    what: str,
) -> AsyncGenerator[CaseResult, None]:
    found: list[m.EvaluateResult] = []
    asked = await case(f"{name}/request, {what}", ask_scores(worker, model, found))
    yield asked
    if not asked.is_failed:
        for number, (wanted, result) in enumerate(zip(recorded, found, strict=True)):
            title = f"{name}/text {number}, {what}"
            yield await case(title, judge_scores(session, model, title, wanted, result, group="adapters"))


async def _load(
    session: Session, worker: Worker, name: str, adapter: m.AdapterParams, expected: str | None
) -> CaseResult | None:
    found = (await session.load(worker, name, adapter=adapter)).adapter_digest
    if found is None or expected not in (None, found):
        difference = Difference(
            group="adapters",
            case=name,
            operator="load_model",
            name="adapter_digest",
            expected=str(expected),
            found=str(found),
        )
        return failed(str(difference), difference)
    return None


async def _unload(worker: Worker) -> CaseResult | None:
    await in_time(worker.call("unload", m.UnloadParams()))
    return None


def _wrong(adapter: m.AdapterParams) -> list[tuple[str, m.AdapterParams, str]]:
    """What differs, the parameters, and the code of the error."""
    less = dict(list(adapter.key_map.items())[1:])
    more = {**adapter.key_map, "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight": "elsewhere"}
    return [
        ("another file than was named", adapter.model_copy(update={"digest": "0" * 64}), "adapter-digest"),
        ("a tensor without a place", adapter.model_copy(update={"key_map": less}), "adapter-tensors"),
        ("a place without a tensor", adapter.model_copy(update={"key_map": more}), "adapter-tensors"),
    ]


async def _refused(
    session: Session, worker: Worker, name: str, adapter: m.AdapterParams, code: str
) -> CaseResult | None:
    try:
        await session.load(worker, name, adapter=adapter)
    except VoxError as error:
        return None if error.code == code else failed(f"expected the error {code}, found {error.code}")
    return failed(f"expected the error {code}; the model was loaded")


def _merging(session: Session, name: str, adapter: m.AdapterParams) -> MergeParams:
    _, folder, digest = session.model(name)
    return MergeParams(
        model_dir=str(folder),
        model_digest=digest,
        adapter=adapter,
        folder=str(session.folder / f"{name}-merged"),
        threads=session.target.threads,
        lane_options=dict(session.target.lane_options),
    )


async def _merge(worker: Worker, params: MergeParams, expected: Mapping[str, Any]) -> CaseResult | None:
    event = await in_time(worker.call("merge_adapter", params))
    found = MergeResult.model_validate(event.result).model_dump(mode="json")
    for field, wanted in expected.items():
        if found[field] != wanted:
            return failed(f"merge_adapter: {field}: expected {wanted}, found {found[field]}")
    written = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in Path(params.folder).iterdir()
    }
    return None if written == found["files"] else failed(f"stated {found['files']}, wrote {written}")


async def _merge_again(worker: Worker, params: MergeParams) -> CaseResult | None:
    try:
        await in_time(worker.call("merge_adapter", params))
    except VoxError as error:
        return (
            None if error.code == "folder-exists" else failed(f"expected folder-exists, found {error.code}")
        )
    return failed("expected the error folder-exists; the folder was written over")
