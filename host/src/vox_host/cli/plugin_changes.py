"""vox-host plugin install, pack and remove: what changes an installation, or makes one's wheel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from vox_host.cli.output import print_json, print_line, print_progress, print_warning
from vox_host.cli.plugin_facts import details_of
from vox_host.cli.plugin_named import Json, PluginId, find_plugin
from vox_host.cli.stopping import BEGINS_AGAIN, is_another_file_since, stoppable, told_when_stopped
from vox_host.errors import UsageError
from vox_host.manifest import FILE_NAME
from vox_host.quoted import quoted
from vox_host.settings import load_settings, tool_environment

__all__ = ["install", "pack", "remove"]


@stoppable(f"nothing was installed, {BEGINS_AGAIN}")
def install(
    path: Annotated[
        Path, typer.Option("--path", help="A source folder, a wheel, or a folder with Plugin.toml.")
    ],
    find_links: Annotated[
        list[Path] | None,
        typer.Option("--find-links", help="A folder with wheels to take dependencies from."),
    ] = None,
    constraint: Annotated[
        Path | None, typer.Option("--constraint", help="A file that pins the dependencies' versions.")
    ] = None,
    no_index: Annotated[
        bool, typer.Option("--no-index", help="Use no package index, only --find-links.")
    ] = False,
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="Refuse what no released checksum vouches for.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Install again even if nothing changed.")] = False,
    json: Json = False,
) -> None:
    """Verify a plugin, build its own environment, and record what was installed."""
    import vox_host
    from vox_host.hooks import load_hooks, verify_signature
    from vox_host.installation import InstallRequest, environments
    from vox_host.installation import install as run_install
    from vox_host.installation.tools import Tools, find_tools

    settings = load_settings()
    links = [folder.absolute() for folder in find_links or []]
    for wanted in [*links, *([constraint] if constraint else [])]:
        if not wanted.exists():
            raise UsageError(
                "path-missing",
                f"{wanted} does not exist; nothing was installed",
                remedy="--find-links takes folders of wheels, --constraint a file of pip's.",
            )
    environment = tool_environment()
    python, uv = find_tools(environment)
    os_name, arch = _platform()
    hooks = load_hooks()
    was = environments(settings.plugins_dir)
    with told_when_stopped(lambda: _installing_as_it_stands(was, environments(settings.plugins_dir))):
        installed = run_install(
            InstallRequest(
                path=path,
                plugins_dir=settings.plugins_dir,
                os=os_name,
                arch=arch,
                tools=Tools(
                    python=python,
                    uv=uv,
                    environment=environment,
                    find_links=tuple(links),
                    constraint=constraint.absolute() if constraint else None,
                    offline=no_index,
                    report=print_progress,
                ),
                host_version=vox_host.__version__,
                require_verified=require_verified,
                force=force,
                verify_signature=lambda manifest, archive: verify_signature(hooks, manifest, archive),
            )
        )
        for warning in installed.warnings:
            print_warning(warning)
        facts = details_of(find_plugin(settings, installed.receipt.plugin), settings)
        if json:
            print_json({**facts, "was_unchanged": installed.was_unchanged})
        else:
            receipt = installed.receipt
            print_line(f"{receipt.plugin} {receipt.version} ({receipt.trust}) in {facts['path']}")


@stoppable(f"nothing was written, {BEGINS_AGAIN}")
def pack(
    path: Annotated[Path, typer.Option("--path", help="The plugin's source folder.")],
    out: Annotated[Path, typer.Option("--out", help="Where the wheel and Plugin.toml go.")],
    json: Json = False,
) -> None:
    """Build a plugin's wheel for this platform and the released Plugin.toml with its checksum."""
    from vox_host.packing import pack_plugin

    is_another = is_another_file_since(out / FILE_NAME)
    whole = f"{out} has the wheel and its {FILE_NAME}, and only the rest was not shown"
    with told_when_stopped(lambda: whole if is_another() else f"nothing was written, {BEGINS_AGAIN}"):
        packed = pack_plugin(
            path.absolute(),
            out.absolute(),
            platform="-".join(_platform()),
            environment=tool_environment(),
            say=print_progress,
        )
        if json:
            print_json(
                {
                    "plugin": packed.plugin_id,
                    "version": packed.version,
                    "platform": packed.platform,
                    "wheel": str(packed.wheel),
                    "manifest": str(packed.manifest),
                    "sha256": packed.sha256,
                    "size": packed.size,
                }
            )
            return
        print_line(f"{packed.wheel}  sha256:{packed.sha256}")
        print_line(f"vox-host plugin install --path {quoted(out)}")


@stoppable(lambda plugin, **_: f"nothing was done to {plugin}, {BEGINS_AGAIN}")
def remove(plugin: PluginId, json: Json = False) -> None:
    """Remove an installed plugin, however broken it is."""
    from vox_host.conformance.record import forget
    from vox_host.installation import environments
    from vox_host.installation import remove as run_remove

    settings = load_settings()
    with told_when_stopped(lambda: _removal_as_it_stands(plugin, environments(settings.plugins_dir))):
        run_remove(settings.plugins_dir, plugin, print_progress)
        forget(settings.plugins_dir, plugin)
        if json:
            print_json({"removed": plugin})
        else:
            print_line(f"{plugin} was removed.")


def _installing_as_it_stands(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return what a stopped installation leaves; a plugin's environment is named once it is whole."""
    done = [plugin for plugin in now if now[plugin] != was.get(plugin)]
    if done:
        return f"{done[0]} is installed, and only the rest was not shown"
    return f"nothing was installed, {BEGINS_AGAIN}"


def _removal_as_it_stands(plugin: str, now: Mapping[str, str]) -> str:
    if plugin in now:
        return f"{plugin} is still installed, {BEGINS_AGAIN}"
    return f"{plugin} is not installed any more; the next installation or removal sweeps what is left"


def _platform() -> tuple[str, str]:
    import platform

    system = {"Darwin": "macos"}.get(platform.system(), platform.system().lower())
    machine = platform.machine().lower()
    return system, {"arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)
