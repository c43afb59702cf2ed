"""What is kept of a comparison: who, what, which bytes, and what came of it (pure)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from vox_host.hardware.apple import describe_mac
from vox_host.hardware.system import System
from vox_host.parity.compare import Parting, SideResult
from vox_host.parity.training import TrainingParting
from vox_plugin_api.messages import canonical_json

__all__ = [
    "DIGEST",
    "RECORDED",
    "VERSION",
    "certificate",
    "is_as_written",
    "is_certificate",
    "machine_facts",
    "signed",
    "verdict",
]

VERSION = 2
"""1 had no digest of its own."""
DIGEST = "certificate_digest"
"""SHA-256 of the canonical JSON of all other fields."""
RECORDED = "recorded"
"""In a verdict's place: what one side answered, for `--against` elsewhere."""


def certificate(
    *,
    model: str,
    model_digest: str,
    prompts_sha256: str,
    sides: Sequence[SideResult],
    partings: Sequence[Parting],
    machine: Mapping[str, Any],
    training_sha256: str | None = None,
    training_partings: Sequence[TrainingParting] = (),
    at_once: int = 1,
    is_record: bool = False,
    options: Mapping[str, Any] | None = None,
    left_out: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the certificate. Nothing in `observation` is compared, now or later.

    Args:
        at_once: requests that were begun together; no answer depends on it, so it is not compared.
        is_record: one side was asked to be compared elsewhere, and nothing here.
        options: what the requests were made with, by the options' names; told where another command's
            are not the same.
        left_out: what a certificate from elsewhere holds, and was not compared, in words.
    """
    facts = {
        "certificate": VERSION,
        "verdict": RECORDED if is_record else verdict(sides, partings, training_partings),
        "model": model,
        "model_digest": model_digest,
        "prompts_digest": prompts_sha256,
        "training_digest": training_sha256,
        "options": None if options is None else dict(options),
        "requests": max((len(side.answers) for side in sides), default=0),
        "at_once": at_once,
        "numerics": sorted({f"{side.numerics} {side.numerics_version}" for side in sides}),
        "sides": [side.as_dict() for side in sides],
        "differences": [parting.as_dict() for parting in partings],
        "training_differences": [parting.as_dict() for parting in training_partings],
        "left_out": list(left_out),
        "observation": {
            "machine": dict(machine),
            "sides": {side.label: dict(side.observation) for side in sides},
        },
    }
    return signed(facts)


def verdict(
    sides: Sequence[SideResult],
    partings: Sequence[Parting],
    training_partings: Sequence[TrainingParting] = (),
) -> str:
    """Return *bitwise*, *same tokens* or *failed*; of nothing compared, *failed*.

    Training has no grade between: a step that differs is another adapter.
    """
    if len(sides) < 2 or not all(side.answers for side in sides) or training_partings:
        return "failed"
    if not partings:
        return "bitwise"
    tokens = {tuple(answer.token_ids for answer in side.answers) for side in sides}
    return "same tokens" if len(tokens) == 1 else "failed"


def signed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with the digest of all of them.

    Raises:
        ValueError: they have no canonical JSON: a number or a character that is none.
        RecursionError: they are nested out of reach.
    """
    said = {name: value for name, value in facts.items() if name != DIGEST}
    return {**said, DIGEST: hashlib.sha256(canonical_json(said)).hexdigest()}


def is_certificate(facts: Mapping[str, Any]) -> bool:
    """Say whether a JSON object is a certificate or a record, of any version, whole or damaged."""
    return {"certificate", "verdict", "sides"} <= facts.keys()


def is_as_written(facts: Mapping[str, Any]) -> bool:
    """Say whether they are a certificate or a record with the digest of all that it says."""
    try:
        return is_certificate(facts) and signed(facts)[DIGEST] == facts.get(DIGEST)
    except (ValueError, RecursionError):
        return False


def machine_facts() -> dict[str, Any]:
    """Return what this machine says of itself: an observation.

    On a Mac also chip and system build, which is the version of Metal's driver and compiler.
    """
    facts = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
    system = System()
    return {**facts, **describe_mac(system)} if system.os == "macos" else facts
