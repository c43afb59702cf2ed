"""Models served with an adapter, and adapters folded into their base, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from vox_host.conformance.expected import load_models
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
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
        NotOfferedError: the plugin serves no adapters, or promises no bits.
    """
    session.require("adapters")
    if not session.is_canonical:
        raise NotOfferedError("the plugin has its own numerics (fast); no tolerance for adapters is derived")
    for name, recorded in load_models()[0]["models"].items():
        model, folder, digest = session.model(name)
        one = write_adapter(model, session.folder / f"{name}-adapter.safetensors")
        none = write_adapter(model, session.folder / f"{name}-zero.safetensors", changes_nothing=True)
        wanted, base = recorded["adapter"], recorded["answers"]["greedy"]
        asked = m.GenerateParams.model_validate(base["params"])
        for title, adapter, rows in (
            ("served", one, wanted["rows"]),
            ("of zeros, served", none, base["rows"]),
        ):
            async with session.worker() as worker:
                yield await case(
                    f"{name}/{title}",
                    _serve(session, worker, name, adapter, wanted["digest"] if adapter is one else None),
                    "bitwise",
                )
                yield await case(f"{name}/{title}, answer", _answer(session, worker, asked, rows), "bitwise")
        async with session.worker() as worker:
            params = MergeParams(
                model_dir=str(folder),
                model_digest=digest,
                adapter=one,
                folder=str(session.folder / f"{name}-merged"),
                lane_options=dict(session.target.lane_options),
            )
            yield await case(f"{name}/merged", _merge(worker, params, wanted["merged"]), "bitwise")
            yield await case(f"{name}/merged into the same folder", _refused_merge(worker, params))
            yield await case(
                f"{name}/another digest", _refused(session, worker, name, _altered(one), "adapter-digest")
            )
            fewer = one.model_copy(update={"key_map": dict(list(one.key_map.items())[1:])})
            yield await case(
                f"{name}/a tensor too few", _refused(session, worker, name, fewer, "adapter-tensors")
            )
            yield await case(
                f"{name}/the base, after refusals", _base(session, worker, name, asked, base["rows"])
            )


def _altered(adapter: m.AdapterParams) -> m.AdapterParams:
    return adapter.model_copy(update={"digest": "0" * 64})


async def _serve(
    session: Session, worker: Worker, name: str, adapter: m.AdapterParams, digest: str | None
) -> CaseResult | None:
    loaded = await session.load(worker, name, adapter=adapter)
    if loaded.adapter_digest is None or digest not in (None, loaded.adapter_digest):
        return failed(
            f"expected the adapter digest {digest or 'of some adapter'}, found {loaded.adapter_digest}"
        )
    return None


async def _answer(
    session: Session, worker: Worker, asked: m.GenerateParams, rows: list[list[Any]]
) -> CaseResult | None:
    found = (await session.generate(worker, asked)).as_rows()
    result = grade_rows(rows, found, group="adapters", case="")
    return result if result.is_failed else None


async def _merge(worker: Worker, params: MergeParams, wanted: Mapping[str, Any]) -> CaseResult | None:
    event = await in_time(worker.call("merge_adapter", params))
    found = MergeResult.model_validate(event.result).model_dump(mode="json")
    for field, value in wanted.items():
        if found[field] != value:
            return failed(f"expected {field} {value}, found {found[field]}")
    written = {path.name for path in Path(params.folder).iterdir()}
    if written != found["files"].keys():
        return failed(f"it states the files {sorted(found['files'])}, and wrote {sorted(written)}")
    return None


async def _refused_merge(worker: Worker, params: MergeParams) -> CaseResult | None:
    return await _refusal(worker.call("merge_adapter", params), "folder-exists")


async def _refused(
    session: Session, worker: Worker, name: str, adapter: m.AdapterParams, code: str
) -> CaseResult | None:
    return await _refusal(session.load(worker, name, adapter=adapter), code)


async def _refusal(asked: Any, code: str) -> CaseResult | None:
    try:
        await in_time(asked)
    except VoxError as error:
        return None if error.code == code else failed(f"refused as {error.code}, not {code}: {error.message}")
    return failed(f"it was not refused ({code})")


async def _base(
    session: Session, worker: Worker, name: str, asked: m.GenerateParams, rows: list[list[Any]]
) -> CaseResult | None:
    loaded = await session.load(worker, name)
    if loaded.adapter_digest is not None:
        return failed(f"expected no adapter, found {loaded.adapter_digest}")
    return await _answer(session, worker, asked, rows)
