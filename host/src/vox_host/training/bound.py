"""Read run.json and hold it against what binds it: its own digest and the record of every checkpoint.

What a run is was settled before its first step. A run.json that says anything else now would be
believed by every step to come, and by the manifest of an adapter that was trained otherwise.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vox_host.errors import IntegrityError, UsageError
from vox_host.quoted import quoted
from vox_host.runs.layout import CHECKPOINTS, RUN_JSON, RunDirectory
from vox_host.training.checkpoints import Checkpoints
from vox_host.training.record import RunRecord, record_digest
from vox_plugin_api.strict_json import CheckpointError, read_json_object

__all__ = ["read_run_record"]

_VERSION = 2
_MOST_NAMED = 5


def read_run_record(folder: Path) -> RunRecord:
    """Read the run.json of a run's folder; what it says is what the run was begun as.

    Raises:
        UsageError: it is no run of ours.
        IntegrityError: `run-changed`: its run.json is not what was written, each field named that a
            checkpoint knows otherwise; `run-older`: nothing binds it; `checkpoints-missing`: they
            were removed.
    """
    path = folder / RUN_JSON
    if not path.is_file():
        is_left = (folder / CHECKPOINTS).is_dir()
        missing = "there is no such folder" if not folder.is_dir() else f"{RUN_JSON} is missing"
        raise UsageError(
            "not-a-run",
            f"{folder} is not a training run: {missing}; nothing was started",
            remedy=_bring_back(folder) if is_left else _begin("NEW" if folder.exists() else "RUN"),
        )
    try:
        fields = read_json_object(path, code="run-changed")
    except CheckpointError as error:
        raise IntegrityError(
            error.code, error.message, facts=list(error.facts.items()), remedy=_bring_back(folder)
        ) from None
    if fields.get("schema_version") == 1:
        raise _older(path, folder)
    for where, record in Checkpoints(RunDirectory(folder).checkpoints).records():
        expected = record.model_dump(mode="json") | {"record_digest": record_digest(record)}
        if differing := list(_differences(expected, fields)):
            raise _changed(path, folder, where, differing)
    try:
        record = RunRecord.model_validate(fields)
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()[:_MOST_NAMED]]
        raise IntegrityError(
            "run-changed",
            f"{path} is not what a run writes; nothing was started",
            facts=problems,
            remedy=_bring_back(folder),
        ) from None
    if record.record_digest != record_digest(record):
        told = "no digest of its own" if record.record_digest is None else f"sha256:{record.record_digest}"
        raise IntegrityError(
            "run-changed",
            f"{path} was changed: its digest is not that of its own text, and no checkpoint is there to say "
            "what differs; nothing was started",
            facts=[("expected", told), ("found", f"sha256:{record_digest(record)}")],
            remedy=_bring_back(folder),
        )
    _refuse_lost_checkpoints(RunDirectory(folder))
    return record.model_copy(update={"record_digest": None})


def _refuse_lost_checkpoints(run: RunDirectory) -> None:
    """Refuse to train again, unasked, what a run has trained: begin where there is nothing to go on from."""
    left = run.left_by_training()
    if run.metrics.exists() and not run.checkpoints.is_dir():
        # The folder is made before the first line is written.
        left.append(run.metrics)
    if not left or Checkpoints(run.checkpoints).steps():
        return
    again = shlex.join(["rm", "-r", *map(str, left)])
    raise IntegrityError(
        "checkpoints-missing",
        f"{run.checkpoints} holds no checkpoint, and {run.path} has been trained: it can't go on from where "
        "it was; nothing was started or changed",
        facts=[
            ("missing", f"{run.checkpoints}/step-NNNNNN"),
            ("found", [place.name for place in left]),
        ],
        remedy=f"Bring them back, then {_resume(run.path)}. The adapter that is there can "
        f"be used as it is. To give it up and train from the start: `{again}`, then the same command.",
    )


_Difference = tuple[str, Any, Any]
"""The field's name with dots, expected and found."""


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], above: str = ""
) -> Iterator[_Difference]:
    for name in dict.fromkeys([*expected, *found]):
        one, other = expected.get(name), found.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{above}{name}.")
        elif name not in expected or name not in found or one != other:
            yield f"{above}{name}", expected.get(name, "no such field"), found.get(name, "no such field")


def _changed(path: Path, folder: Path, where: Path, differing: list[_Difference]) -> IntegrityError:
    named = differing[:_MOST_NAMED]
    facts: list[tuple[str, Any]] = [
        ("file", str(path)),
        ("held against", str(where)),
        ("expected", ", ".join(f"{name} {json.dumps(value)}" for name, value, _ in named)),
        ("found", ", ".join(f"{name} {json.dumps(value)}" for name, _, value in named)),
    ]
    names = ", ".join(name for name, _, _ in named)
    more = f" and {len(differing) - _MOST_NAMED} more" if len(differing) > _MOST_NAMED else ""
    return IntegrityError(
        "run-changed",
        f"{path} is not what the run was begun as: {names}{more} was changed; nothing was started",
        facts=facts,
        remedy=f"Write back what was expected, then {_resume(folder)}; other settings are "
        "for a new run, with --out NEW.",
    )


def _older(path: Path, folder: Path) -> IntegrityError:
    return IntegrityError(
        "run-older",
        f"{path} was written by an older vox-host, and nothing binds what it says; nothing was started",
        facts=[
            ("expected", f"schema_version {_VERSION}, with its own digest"),
            ("found", "schema_version 1"),
        ],
        remedy=f"The adapter that {folder} has can be used as before. Go on with the vox-host that wrote "
        "it, or begin a new run: `vox-host train --model NAME --data FILE --out NEW`.",
    )


def _resume(folder: Path) -> str:
    return f"`vox-host train --resume {quoted(folder)}`"


def _begin(out: str) -> str:
    return f"Begin one with `vox-host train --model NAME --data FILE --out {out}`."


def _bring_back(folder: Path) -> str:
    return (
        f"Bring back the {RUN_JSON} of then, then {_resume(folder)}; or begin a new run: "
        "`vox-host train --model NAME --data FILE --out NEW`."
    )
