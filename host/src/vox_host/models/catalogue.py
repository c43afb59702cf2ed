"""The models of the store: list them, find one, remove one."""

from __future__ import annotations

import re
import shutil
import uuid
from pathlib import Path

from vox_host.errors import UsageError
from vox_host.models.installed import BrokenModel, InstalledModel, checked_path, read_entry

__all__ = ["Catalogue", "check_name"]

_REMOVED = ".removed-"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?")


def check_name(name: str) -> str:
    """Return `name` if it can name a model.

    Raises:
        UsageError: it can't.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            "model-name",
            f"{name!r:.200} cannot name a model; nothing was done",
            remedy="A name has small letters, digits and . _ - inside, at most 128 in all.",
        )
    return name


class Catalogue:
    """The models in one directory, which may not exist yet."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = models_dir

    def list(self) -> list[InstalledModel | BrokenModel]:
        """Return every entry, sorted by name. Reads manifests and file sizes, no weight."""
        if not self.models_dir.is_dir():
            return []
        paths = sorted(self.models_dir.iterdir(), key=lambda path: path.name)
        return [read_entry(path) for path in paths if path.is_dir() and not path.name.startswith(".")]

    def find(self, name: str) -> InstalledModel:
        """Return the model `name`.

        Raises:
            UsageError: there is none of that name.
            ModelError: there is, but it was never complete.
            IntegrityError: there is, but its files are not those that were imported.
        """
        check_name(name)
        path = self.models_dir / name
        if not path.is_dir():
            known = [entry.name for entry in self.list()]
            raise UsageError(
                "model-not-found",
                f"no model is named {name!r}; nothing was started",
                facts=[("store", str(self.models_dir)), ("models", known)],
                remedy="`vox-host model import` adds one; `vox-host model list` shows what is there.",
            )
        entry = read_entry(path)
        if isinstance(entry, BrokenModel):
            raise type(entry.error)(
                entry.code,
                f"model {name!r} cannot be used: {entry.problem}",
                facts=[("path", str(path)), *entry.error.facts, ("missing", list(entry.missing))],
                remedy=f"`vox-host model remove {name}`, then import it again.",
            )
        return entry

    def remove(self, name: str) -> Path:
        """Delete the model `name`, broken or not, and return where it was.

        Raises:
            UsageError: there is none of that name.
        """
        check_name(name)
        path = self.models_dir / name
        if not path.is_dir() or path.is_symlink():
            raise UsageError(
                "model-not-found",
                f"no model is named {name!r} in {self.models_dir}; nothing was removed",
                remedy="vox-host model list",
            )
        # Out of sight first: a removal that is cut short leaves no half model behind.
        path.rename(self.models_dir / f"{_REMOVED}{uuid.uuid4().hex}")
        checked_path(path).unlink(missing_ok=True)
        self.remove_remains()
        return path

    def remove_remains(self) -> None:
        """Delete what removals that were cut short have left; what can't be deleted stays."""
        for left in self.models_dir.glob(f"{_REMOVED}*"):
            shutil.rmtree(left, ignore_errors=True)
