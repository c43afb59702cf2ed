"""Whole models: what every operator of every layer makes, compared with the reference's trace."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from vox_host.conformance.compare import Difference, first_difference
from vox_host.conformance.expected import ExpectedOutput, load_models, parse_output
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.workers import Worker
from vox_plugin_api import messages as m

__all__ = ["run"]

_REPEATS = 6
"""A race that shows once in a few hundred calls is met here, where its operator can be named."""


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield one result per tiny model and prompt.

    Raises:
        NotOfferedError: the plugin promises no bits, or has no traces.
    """
    if not session.is_canonical:
        raise NotOfferedError("the plugin has its own numerics (fast); `generation` and `evaluate` grade it")
    session.require("trace")
    index, data = load_models()
    for name, model in index["models"].items():
        async with session.worker() as worker:
            loaded = await case(f"{name}/load", _load(session, worker, name, model["digest"]))
            yield loaded
            if loaded.is_failed:
                continue
            for trace, recorded in model["traces"].items():
                outputs = [
                    parse_output(entry, data.get(f"{name}/{trace}#{number}"))
                    for number, entry in enumerate(recorded["operators"])
                ]
                title = f"{name}/{trace}"
                yield await case(title, _trace(worker, title, recorded["token_ids"], outputs), "bitwise")
            title = f"{name}/{trace}, {_REPEATS} times more"
            yield await case(title, _repeat(worker, title, recorded["token_ids"], outputs), "bitwise")


async def _load(session: Session, worker: Worker, name: str, digest: str) -> CaseResult | None:
    if session.model(name)[2] != digest:
        return failed("the tiny model is not the one that was recorded: this vox-host is damaged")
    result = await session.load(worker, name)
    layers = session.model(name)[0].config["num_hidden_layers"]
    if result.layers != layers or result.tensors.unused:
        return failed(f"expected {layers} layers and no unused tensor, found {result.layers} and "
                      f"{result.tensors.unused}")  # fmt: skip
    return None


async def _trace(
    worker: Worker, title: str, token_ids: Sequence[int], expected: Sequence[ExpectedOutput]
) -> CaseResult | None:
    kept = [output.name for output in expected if output.data is not None]
    event = await in_time(worker.call("trace", m.TraceParams(token_ids=list(token_ids))))
    found = m.TraceResult.model_validate(event.result).operators
    difference = _by_digest(expected, found)
    # What was stated is believed of nobody: the bytes are asked for, and hashed here.
    asked = [name for name in kept if any(operator.name == name for operator in found)]
    event = await in_time(worker.call("trace", m.TraceParams(token_ids=list(token_ids), slices=asked)))
    payloads = dict(zip(asked, event.payloads, strict=False))
    difference = _by_bytes(expected, payloads) or difference
    if difference is None and len(payloads) != len(kept):
        difference = Difference(operator="trace", expected=f"{len(kept)} frames", found=str(len(payloads)))
    if difference is None:
        return None
    placed = Difference(**{**difference.as_dict(), "group": "forward", "case": title})
    return failed(str(placed), placed)


async def _repeat(
    worker: Worker, title: str, token_ids: Sequence[int], expected: Sequence[ExpectedOutput]
) -> CaseResult | None:
    for _ in range(_REPEATS):
        event = await in_time(worker.call("trace", m.TraceParams(token_ids=list(token_ids))))
        difference = _by_digest(expected, m.TraceResult.model_validate(event.result).operators)
        if difference is not None:
            placed = Difference(**{**difference.as_dict(), "group": "forward", "case": title})
            return failed(f"not the same each time: {placed}", placed)
    return None


def _by_digest(expected: Sequence[ExpectedOutput], found: Sequence[m.OperatorDigest]) -> Difference | None:
    for wanted, made in zip(expected, found, strict=False):
        for what, is_wanted, is_found in (
            ("name", wanted.name, made.name),
            ("operator", wanted.operator, made.operator),
            ("shape", list(wanted.shape), made.shape),
            ("type", wanted.dtype, made.dtype),
            ("digest", wanted.digest, made.digest),
        ):
            if is_wanted != is_found:
                name = wanted.name if what == "digest" else f"{what} of {wanted.name}"
                return Difference(
                    operator=wanted.operator, name=name, expected=str(is_wanted), found=str(is_found)
                )
    if len(expected) != len(found):
        return Difference(operator="trace", expected=f"{len(expected)} operators", found=str(len(found)))
    return None


def _by_bytes(expected: Sequence[ExpectedOutput], payloads: Mapping[str, bytes]) -> Difference | None:
    for wanted in expected:
        payload = payloads.get(wanted.name)
        if payload is None or hashlib.sha256(payload).hexdigest() == wanted.digest:
            continue
        assert wanted.data is not None
        facts: dict[str, Any] = {"dtype": wanted.dtype, "shape": wanted.shape}
        return first_difference(wanted.data, payload, operator=wanted.operator, name=wanted.name, **facts)
    return None
