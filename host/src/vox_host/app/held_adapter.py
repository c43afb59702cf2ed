"""An adapter's file, held open while its model is served, merged or exported.

A run that is being trained gets new adapters under the same name. What was opened is what is
used until the end, also by a worker that is started in place of another: where the file at the
path is another one by then, the worker is given a copy of the one that is held. What reads the file
at several moments has it in a folder of its own from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

from vox_host.errors import ModelError, VoxError
from vox_host.runs.layout import ADAPTER_CONFIG
from vox_host.runs.open import open_adapter
from vox_host.runs.source import AdapterSource
from vox_plugin_api.messages import AdapterParams

__all__ = ["HeldAdapter"]

Result = TypeVar("Result")

_TRIES = 5
_NOT_THE_FILE = frozenset({"adapter-digest", "adapter-unreadable"})


class HeldAdapter:
    """The very file that `source` speaks of."""

    def __init__(self, source: AdapterSource) -> None:
        """Open it; a publish since `source` was opened is followed.

        Raises:
            VoxError: as `open_adapter`.
        """
        for _ in range(_TRIES):
            try:
                file = source.file.open("rb")
            except FileNotFoundError:
                source = open_adapter(source.folder)
                continue
            if hashlib.file_digest(file, "sha256").hexdigest() == source.sha256:
                self.source = source
                self._file: BinaryIO = file
                return
            file.close()
            source = open_adapter(source.folder)
        raise ModelError(
            "run-busy",
            f"the adapter of {source.folder} changed each time that it was read; nothing was started",
            remedy="Try again.",
        )

    def __enter__(self) -> HeldAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    async def load(self, load: Callable[[AdapterParams], Awaitable[Result]]) -> Result:
        """Call `load` with where the file is: at its path, else in a copy that lasts as long as the call.

        Raises:
            VoxError: what `load` raises.
        """
        params = self.source.params()
        if self._is_in_place():
            try:
                return await load(params)
            except VoxError as error:
                # Replaced between our look and the worker's.
                if error.code not in _NOT_THE_FILE or self._is_in_place():
                    raise
        with tempfile.NamedTemporaryFile(prefix="vox-adapter-", suffix=".safetensors") as copy:
            await asyncio.to_thread(self._copy_to, Path(copy.name))
            return await load(params.model_copy(update={"file": copy.name}))

    @contextlib.contextmanager
    def apart(self) -> Iterator[AdapterSource]:
        """Give out the adapter with its files where no publish touches them, until the block ends.

        A run's alone: what lies in other folders is published by nobody of ours.
        """
        if self.source.origin != "run":
            yield self.source
            return
        with tempfile.TemporaryDirectory(prefix="vox-adapter-") as folder:
            file = Path(folder) / self.source.file.name
            self._put_at(file)
            # The same in every adapter of a run; a publish moves it from the first place to the second.
            for place in (self.source.file.parent, self.source.folder):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(place / ADAPTER_CONFIG, file.parent / ADAPTER_CONFIG)
                    break
            yield replace(self.source, file=file)

    def _put_at(self, path: Path) -> None:
        # A link costs nothing, where the system makes one and it is of the file that is held.
        with contextlib.suppress(OSError):
            os.link(self.source.file, path)
            if os.path.samestat(path.stat(), os.fstat(self._file.fileno())):
                return
            path.unlink()
        self._copy_to(path)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self.source.file.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def _copy_to(self, path: Path) -> None:
        self._file.seek(0)
        with path.open("wb") as target:
            shutil.copyfileobj(self._file, target)
