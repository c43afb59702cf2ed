"""Options that `serve`, `generate` and `chat` share, and opening the model they name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from vox_host.app.compose import ModelOptions, OpenModel, open_model
from vox_host.cli import early_probe
from vox_host.cli.kv_cache import kv_cache_bytes
from vox_host.cli.output import print_progress, print_warning
from vox_host.errors import UsageError
from vox_host.hardware.probe import probe_machine
from vox_host.models.tokenizer_file import keep_heap_small
from vox_host.settings import Settings, load_settings
from vox_plugin_api.messages import Numerics

__all__ = ["Model", "RunOptions", "with_model"]

Result = TypeVar("Result")

Model = Annotated[
    str,
    typer.Option(
        "--model",
        help="A model's name (`vox-host model list` shows them), or the folder of a run or an adapter.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How the model is run."""

    base: Annotated[
        str | None,
        typer.Option("--base", help="The model an adapter lies on, by name; default: what the adapter says."),
    ] = None
    plugin: Annotated[str, typer.Option("--plugin", help="A plugin's id, or auto.")] = "auto"
    numerics: Annotated[
        str, typer.Option("--numerics", help="canonical, fast, or any: canonical where the plugin has it.")
    ] = "any"
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length", min=1, help="Tokens of prompt and answer together; default: the model's."
        ),
    ] = None
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-mib",
            min=1,
            help="Memory for keys and values of all requests at once, and of earlier ones that later ones "
            "begin like; default: the plugin's own bound.",
        ),
    ] = None
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")
    ] = None
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="Refuse plugins that no released checksum vouches for.")
    ] = False
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write a transcript of the worker's answers to this file."),
    ] = None

    def for_model(self, model: str) -> ModelOptions:
        """Return them as one value.

        Raises:
            UsageError: one can't be used.
        """
        words = (*get_args(Numerics), "any")
        if self.numerics not in words:
            raise UsageError("usage", f"--numerics is one of {', '.join(words)}; found {self.numerics!r}")
        if self.record is not None:
            _check_record(self.record)
        return ModelOptions(
            model=model,
            base=self.base,
            plugin=self.plugin,
            numerics=None if self.numerics == "any" else self.numerics,  # type: ignore[arg-type]
            context_length=self.context_length,
            kv_cache_bytes=kv_cache_bytes(self.kv_cache_mib, probe_machine),
            threads=self.threads,
            require_verified=self.require_verified,
            record=self.record,
        )


_kept: list[OpenModel] = []


def with_model(
    settings: Settings,
    options: ModelOptions,
    use: Callable[[OpenModel], Awaitable[Result]],
    *,
    is_quiet: bool = False,
) -> Result:
    """Open the model, run `use` with it, close everything."""
    keep_heap_small()

    async def run() -> Result:
        machine = await asyncio.to_thread(probe_machine, early_probe.take())
        say = (lambda _: None) if is_quiet else print_progress
        async with open_model(settings, options, machine, progress=say, warn=print_warning) as opened:
            # The process ends after this; taking a large vocabulary down first would only delay that.
            _kept.append(opened)
            return await use(opened)

    return asyncio.run(run())


def _check_record(record: Path) -> None:
    """Refuse a transcript that would take the place of something that is not one."""
    home = load_settings().home
    if not record.absolute().parent.is_dir():
        why = "the folder does not exist"
    elif record.is_dir():
        why = "this is a folder"
    elif record.is_symlink() or (record.exists() and not record.is_file()):
        why = "this is a link, a device or a pipe, which a finished transcript would replace"
    elif record.absolute().resolve().is_relative_to(home.resolve()):
        why = f"this lies in {home}, where plugins and models are kept"
    else:
        return
    raise UsageError(
        "record-folder", f"--record {record}: {why}; nothing was started", remedy="Name a file of your own."
    )
