"""Options that `merge` and `export` share, and opening the adapter and the base that they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from vox_host.app.held_adapter import HeldAdapter
from vox_host.app.named_model import find_named_model
from vox_host.cli.output import print_warning
from vox_host.discovery import discover
from vox_host.errors import UsageError
from vox_host.exporting.merging import Dtype, MergeJob, choose_plugin
from vox_host.hardware.probe import probe_machine
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.runs.open import open_adapter
from vox_host.runs.source import AdapterSource
from vox_host.settings import Settings, load_settings

__all__ = ["AdapterOptions", "Opened"]

_DTYPES: dict[str, Dtype | None] = {"auto": None, "f32": "f32", "bf16": "bf16"}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An adapter, its base, and how they are to be merged."""

    settings: Settings
    catalogue: Catalogue
    source: AdapterSource
    base: InstalledModel
    plugin: str
    dtype: Dtype | None
    threads: int | None

    def job(self, say: Callable[[str], None]) -> MergeJob:
        """Choose the plugin, and return the work.

        Raises:
            VoxError: no plugin can merge here.
        """
        candidates = discover(self.settings.plugins_dir)
        return MergeJob(
            settings=self.settings,
            base=self.base,
            adapter=self.source,
            plugin=choose_plugin(candidates, probe_machine(), plugin=self.plugin),
            dtype=self.dtype,
            threads=self.threads,
            say=say,
        )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """How an adapter is merged."""

    base: Annotated[
        str | None,
        typer.Option("--base", help="The base model's name in the store; default: what the adapter says."),
    ] = None
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Of the matrices that are made: f32, bf16, or auto (f32 where the base's are f32 or f16, "
            "else bf16).",
        ),
    ] = "auto"
    plugin: Annotated[str, typer.Option("--plugin", help="A plugin's id, or auto.")] = "auto"
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")
    ] = None

    @contextmanager
    def open(self, run: str) -> Iterator[Opened]:
        """Read the adapter's configuration and find its base; what was found is held until the block ends.

        Raises:
            VoxError: one of them is not there, or not right.
        """
        if self.dtype not in _DTYPES:
            raise UsageError("usage", f"--dtype is one of {', '.join(_DTYPES)}; found {self.dtype!r}")
        settings = load_settings()
        catalogue = Catalogue(settings.models_dir)
        if not Path(run).is_dir() and not (catalogue.models_dir / run).is_dir():
            open_adapter(Path(run))  # says what it looked for
        named = find_named_model(catalogue, run, base=self.base)
        if named.adapter is None:
            raise UsageError(
                "usage",
                f"{run} is a model of the store, not an adapter; nothing was done",
                remedy="Name a run's directory, or a folder that holds an adapter.",
            )
        for note in named.adapter.notes:
            print_warning(note)
        with HeldAdapter(named.adapter) as held, held.apart() as source:
            yield Opened(
                settings=settings,
                catalogue=catalogue,
                source=source,
                base=named.base,
                plugin=self.plugin,
                dtype=_DTYPES[self.dtype],
                threads=self.threads,
            )
