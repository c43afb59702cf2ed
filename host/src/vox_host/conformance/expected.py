"""What is right: outputs of the scalar reference, as they were recorded.

    recorded/GROUP.json           per case: definition; operator, shape, type, digest of each output; faults
    recorded/GROUP.safetensors    the outputs' bytes, under "CASE#NUMBER"
    recorded/models.json          per tiny model: its digest, traces, answers, scores

A digest of all of it names the suite: a verdict of another suite is of another time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vox_host.errors import IntegrityError
from vox_plugin_api.checkpoint import CheckpointError
from vox_plugin_api.safetensors_file import read_safetensors_header

__all__ = [
    "EXPECTED_DIR",
    "ExpectedCase",
    "ExpectedGroup",
    "ExpectedOutput",
    "load_group",
    "load_models",
    "suite_digest",
]

EXPECTED_DIR = Path(__file__).with_name("recorded")


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """One array."""

    operator: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str
    data: bytes | None
    """Little-endian; None where only the digest was kept."""


@dataclass(frozen=True, slots=True)
class ExpectedCase:
    """Everything that one case makes."""

    name: str
    outputs: tuple[ExpectedOutput, ...]
    faults: tuple[tuple[str, tuple[int, ...]], ...]
    definition: str
    """SHA-256 of what the case asked of the lane when it was recorded."""


@dataclass(frozen=True, slots=True)
class ExpectedGroup:
    """A group of operators' cases."""

    numerics_version: int
    suite_version: int
    cases: tuple[ExpectedCase, ...]


@dataclass(frozen=True, slots=True)
class _File:
    index: Mapping[str, Any]
    data: Mapping[str, bytes]


def load_group(name: str) -> ExpectedGroup:
    """Return the cases of a group of operators, and the versions they are of.

    Raises:
        IntegrityError: the suite's files are damaged.
    """
    file = _load(name)
    cases = tuple(
        ExpectedCase(
            name=case,
            outputs=tuple(
                parse_output(output, file.data.get(f"{case}#{number}"))
                for number, output in enumerate(entry["outputs"])
            ),
            faults=tuple((fault["name"], tuple(fault["rows"])) for fault in entry["faults"]),
            definition=entry["definition"],
        )
        for case, entry in file.index["cases"].items()
    )
    return ExpectedGroup(int(file.index["numerics_version"]), int(file.index["suite_version"]), cases)


def load_models() -> tuple[Mapping[str, Any], Mapping[str, bytes]]:
    """Return what was recorded of the tiny models: the index, and arrays by "MODEL/TRACE#NUMBER"."""
    file = _load("models")
    return file.index, file.data


def parse_output(entry: Mapping[str, Any], data: bytes | None) -> ExpectedOutput:
    """Return one entry of an index with its bytes, held against its digest."""
    if data is not None and hashlib.sha256(data).hexdigest() != entry["digest"]:
        raise _damaged(f"the bytes of {entry['operator']} are not those of its digest")
    return ExpectedOutput(
        operator=entry["operator"],
        name=entry.get("name", ""),
        shape=tuple(entry["shape"]),
        dtype=entry["dtype"],
        digest=entry["digest"],
        data=data,
    )


@cache
def suite_digest() -> str:
    """Return the SHA-256 over all files of the suite."""
    digest = hashlib.sha256()
    for path in sorted(EXPECTED_DIR.iterdir()):
        if path.suffix in (".json", ".safetensors"):
            digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


@cache
def _load(name: str) -> _File:
    try:
        text = (EXPECTED_DIR / f"{name}.json").read_bytes().rstrip()
        index = json.loads(text)
        path = EXPECTED_DIR / f"{name}.safetensors"
        header = read_safetensors_header(path)
        content = path.read_bytes()
    except (OSError, ValueError, CheckpointError) as problem:
        raise _damaged(f"{name}: {problem}") from None
    if header.metadata.get("index_sha256") != hashlib.sha256(text).hexdigest():
        raise _damaged(f"{name}.json and {name}.safetensors were not recorded together")
    data = {key: content[entry.offset : entry.offset + entry.nbytes] for key, entry in header.entries.items()}
    return _File(index, data)


def _damaged(detail: str) -> IntegrityError:
    return IntegrityError(
        "suite-damaged",
        f"the conformance suite of this vox-host is damaged ({detail}); nothing was checked",
        facts=[("folder", str(EXPECTED_DIR))],
        remedy="Install vox-host again.",
    )
