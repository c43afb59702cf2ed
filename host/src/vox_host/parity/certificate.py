"""What is kept of a comparison: who, what, which bytes, and what came of it (pure)."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from vox_host.errors import UsageError
from vox_host.hardware.apple import describe_mac
from vox_host.hardware.system import System
from vox_host.parity.compare import Answered, Parting, SideResult
from vox_host.parity.training import Taken, TrainingParting

__all__ = ["RECORDED", "certificate", "machine_facts", "parse_certificate"]

_VERSION = 1
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
) -> dict[str, Any]:
    """Return the certificate. Nothing in `observation` is compared, now or later.

    Args:
        at_once: requests that were begun together; no answer depends on it, so it is not compared.
        is_record: one side was asked to be compared elsewhere, and nothing here.
    """
    return {
        "certificate": _VERSION,
        "verdict": RECORDED if is_record else verdict(sides, partings, training_partings),
        "model": model,
        "model_digest": model_digest,
        "prompts_digest": prompts_sha256,
        "training_digest": training_sha256,
        "requests": max((len(side.answers) for side in sides), default=0),
        "at_once": at_once,
        "numerics": sorted({f"{side.numerics} {side.numerics_version}" for side in sides}),
        "sides": [side.as_dict() for side in sides],
        "differences": [parting.as_dict() for parting in partings],
        "training_differences": [parting.as_dict() for parting in training_partings],
        "observation": {
            "machine": dict(machine),
            "sides": {side.label: dict(side.observation) for side in sides},
        },
    }


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


def parse_certificate(
    data: bytes, name: str, *, model_digest: str, prompts_sha256: str, training_sha256: str | None = None
) -> list[SideResult]:
    """Return the sides of a certificate from elsewhere, to be compared by their hashes.

    Raises:
        UsageError: it is no certificate, or one of another model or of other requests.
    """
    try:
        facts = json.loads(data)
        if facts["certificate"] != _VERSION:
            raise ValueError(f"a certificate of version {facts['certificate']}, not {_VERSION}")
        sides = [
            SideResult(
                label=f"{side['label']} ({name})",
                plugin=side["plugin"],
                plugin_version=side["plugin_version"],
                plugin_tree_digest=side["plugin_tree_digest"],
                lane=side["lane"],
                lane_options=side["lane_options"],
                numerics=side["numerics"],
                numerics_version=side["numerics_version"],
                answers=tuple(Answered.parse(answer) for answer in side["answers"]),
                transcript=None,
                transcript_sha256=side["transcript_sha256"],
                taken=tuple(Taken.parse(step) for step in side.get("taken", ()))
                if training_sha256 is not None
                else (),
            )
            for side in facts["sides"]
        ]
        found = {
            "model": facts["model_digest"],
            "prompts": facts["prompts_digest"],
            "training": facts.get("training_digest"),
        }
    except (ValueError, KeyError, TypeError) as problem:
        raise UsageError(
            "certificate-invalid",
            f"--against {name}: this is no certificate of `vox-host parity` ({problem!r})",
            remedy="Name what `vox-host parity --out` or `--record` wrote.",
        ) from None
    asked = {"model": model_digest, "prompts": prompts_sha256, "training": training_sha256}
    for what, wanted in asked.items():
        # Steps that were not asked for now are left alone.
        if wanted is not None and found[what] != wanted:
            raise UsageError(
                "certificate-of-another",
                f"--against {name}: it is about another {what}; nothing was started",
                facts=[
                    ("expected", f"sha256:{wanted}"),
                    ("found", f"sha256:{found[what]}" if found[what] else "no steps of training"),
                ],
                remedy="Make it with the same model, prompts and options.",
            )
    return sides


def machine_facts() -> dict[str, Any]:
    """Return what this machine says of itself: an observation.

    On a Mac also chip and system build, which is the version of Metal's driver and compiler.
    """
    facts = {"system": platform.system(), "machine": platform.machine(), "python": platform.python_version()}
    system = System()
    return {**facts, **describe_mac(system)} if system.os == "macos" else facts
