"""A run on disk: adapter, moments and configuration in one folder, whole or not there.

    adapter.safetensors     the adapter, under PEFT's names
    optimizer.safetensors   first and second moments
    state.json              configuration, steps, the base model's digest, the others' checksums

Everything is written into a folder of another name beside it, flushed to disk, and renamed. So
whatever ends a save, the folder is complete or absent, and earlier ones are never touched.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from mens_core.adapters.file import read_tensors, safetensors_pieces
from mens_core.numerics import NUMERICS_VERSION
from mens_core.trainer import TrainerConfig, TrainerState
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import CheckpointError, read_json_object
from vox_plugin_api.messages import Numerics, canonical_json
from vox_plugin_api.train_messages import AdapterConfig, OptimizerConfig, Schedule
from vox_plugin_api.unwritten import errno_name, what_helps

__all__ = ["ADAPTER", "OPTIMIZER", "STATE", "SavedRun", "read_run", "read_state", "save_run"]

ADAPTER = "adapter.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
_FORMAT = 1
_MOMENTS = ("first", "second")

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SavedRun:
    """What state.json says."""

    config: TrainerConfig
    step: int
    model_digest: str
    files: Mapping[str, str]


def save_run(
    folder: Path,
    config: TrainerConfig,
    state: TrainerState,
    *,
    model_digest: str,
    adapter_digest: str,
    numerics: Numerics = "canonical",
) -> dict[str, str]:
    """Write `folder`, which must not exist, and return the SHA-256 of each file in it.

    Raises:
        BackendError: `folder-exists`, or `save-failed` with the system's reason; nothing is at `folder`.
    """
    if folder.exists() or folder.is_symlink():
        raise BackendError(
            "folder-exists",
            f"{folder} exists; nothing was written, since a save never replaces another",
            facts={"folder": str(folder)},
            remedy="Save under a name of its own.",
        )
    shapes = {key: values.shape for key, values in state.parameters.items()}
    of_moments = {f"{key}.{name}": shape for name in _MOMENTS for key, shape in shapes.items()}
    moments = dict(zip(_MOMENTS, (state.first_moments, state.second_moments), strict=True))

    def moment(key: str) -> Floats:
        parameter, _, name = key.rpartition(".")
        return moments[name][parameter]

    aside = folder.with_name(f".{folder.name}.partial")
    try:
        # What a save that was killed left behind.
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        digests = {
            ADAPTER: _write(aside / ADAPTER, safetensors_pieces(shapes, state.parameters.__getitem__)),
            OPTIMIZER: _write(aside / OPTIMIZER, safetensors_pieces(of_moments, moment)),
        }
        text = _state_text(config, state.step, digests, model_digest, adapter_digest, numerics)
        digest = _write(aside / STATE, [text])
        _sync_folder(aside)
        aside.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise BackendError(
            "save-failed",
            f"{folder} can't be written: {error.strerror or error}; it is not there, and earlier saves "
            "are as they were",
            facts={
                "folder": str(folder),
                "bytes": 4 * sum(map(math.prod, (*shapes.values(), *of_moments.values()))),
                "errno": errno_name(error),
            },
            remedy=f"{what_helps(errno_name(error))} or name another folder, and save again: the training "
            "goes on meanwhile.",
        ) from error
    return {**digests, STATE: digest}


def _state_text(
    config: TrainerConfig,
    step: int,
    digests: Mapping[str, str],
    model_digest: str,
    adapter_digest: str,
    numerics: Numerics,
) -> bytes:
    return canonical_json(
        {
            "format": _FORMAT,
            "numerics_version": NUMERICS_VERSION,
            "model_digest": model_digest,
            "adapter_digest": adapter_digest,
            "step": step,
            "seed": config.seed,
            "adapter": config.adapter.model_dump(mode="json"),
            "optimizer": config.optimizer.model_dump(mode="json"),
            "schedule": config.schedule.model_dump(mode="json"),
            "files": digests,
            # Left out where it is canonical: the bytes of such a save are on record.
            **({} if numerics == "canonical" else {"numerics": numerics}),
        }
    )


def _write(path: Path, pieces: Iterable[bytes]) -> str:
    """Write a new file piece by piece, each made when the last is written, and return its SHA-256."""
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path, *, model_digest: str, numerics: Numerics = "canonical") -> SavedRun:
    """Read state.json and hold it against the loaded model.

    Raises:
        BackendError: `resume-invalid`: it is missing, damaged or of another format;
            `resume-mismatch`: it belongs to another model or to other numerics.
    """
    path = folder / STATE
    try:
        fields = read_json_object(path, code="resume-invalid")
    except CheckpointError as error:
        raise BackendError(error.code, error.message, facts=error.facts, remedy=error.remedy) from error
    for name, expected, found in (
        ("model_digest", model_digest, fields.get("model_digest")),
        ("numerics_version", NUMERICS_VERSION, fields.get("numerics_version")),
        ("numerics", numerics, fields.get("numerics", "canonical")),
    ):
        if expected != found:
            raise BackendError(
                "resume-mismatch",
                f"{path} was written with another {name}; nothing was begun",
                facts={"file": str(path), "expected": expected, "found": found},
                remedy="Load the model that the run was begun with, in the same numerics, by the version "
                "that wrote it.",
            )
    try:
        return _parse(fields)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise BackendError(
            "resume-invalid",
            f"{path} is not a state of format {_FORMAT}: {type(error).__name__} at "
            f"{str(error).splitlines()[0]}; nothing was begun",
            facts={"file": str(path)},
        ) from error


def _parse(fields: Mapping[str, Any]) -> SavedRun:
    step, seed, files = fields["step"], fields["seed"], fields["files"]
    if fields["format"] != _FORMAT or type(step) is not int or type(seed) is not int or step < 0:
        raise ValueError("format, step or seed")
    if not isinstance(files, dict) or set(files) != {ADAPTER, OPTIMIZER}:
        raise ValueError("files")
    config = TrainerConfig(
        adapter=AdapterConfig(**fields["adapter"]),
        optimizer=OptimizerConfig(**fields["optimizer"]),
        schedule=Schedule(**fields["schedule"]),
        seed=seed,
    )
    return SavedRun(config, step, fields["model_digest"], files)


def read_run(folder: Path, saved: SavedRun, shapes: Mapping[str, tuple[int, int]]) -> TrainerState:
    """Read the tensors that `saved` speaks of, each at its place.

    Raises:
        BackendError: `resume-invalid`: a file is not the one that was written;
            `adapter-tensors`: it doesn't fit the model.
    """
    for name, expected in saved.files.items():
        try:
            with (folder / name).open("rb") as file:
                found = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        except OSError as error:
            found = error.strerror or str(error)
        if found != f"sha256:{expected}":
            raise BackendError(
                "resume-invalid",
                f"{folder / name} is not the file that was saved; nothing was begun",
                facts={"file": str(folder / name), "expected": f"sha256:{expected}", "found": found},
                remedy="Resume from another save of the run.",
            )
    moments = read_tensors(
        folder / OPTIMIZER, {f"{key}.{name}": shape for name in _MOMENTS for key, shape in shapes.items()}
    )
    return TrainerState(
        step=saved.step,
        parameters=read_tensors(folder / ADAPTER, shapes),
        first_moments={key: moments[f"{key}.first"] for key in shapes},
        second_moments={key: moments[f"{key}.second"] for key in shapes},
    )
