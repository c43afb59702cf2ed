"""From a source to an archive that may be placed: built, or copied and verified."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import PluginError
from vox_host.installation import sources
from vox_host.installation.request import Installable, InstallRequest
from vox_host.installation.wheel import InspectedWheel, inspect_wheel
from vox_host.installed_tree import digest_of_file
from vox_host.manifest import FILE_NAME, Manifest
from vox_host.resolution import platform_refusal
from vox_plugin_api.messages import PROTOCOL_MAX, PROTOCOL_MIN

__all__ = ["Payload", "prepare", "refuse_unusable"]

_LIBRARIES = {".so", ".dylib", ".dll"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """A verified archive, ready to be placed."""

    manifest: Manifest
    archive: Path
    archive_sha256: str
    is_verified: bool
    wheel: InspectedWheel | None
    """None: a plain native library."""
    siblings: tuple[Path, ...] = ()


def refuse_unusable(manifest: Manifest, request: InstallRequest) -> None:
    """Refuse what could never start here, before anything is built or copied."""
    plugin_id = manifest.plugin.id
    reason = platform_refusal(manifest, request.os, request.arch)
    if reason is not None:
        raise PluginError(
            "platform-unsupported",
            f"plugin '{plugin_id}' {reason}; nothing was installed",
            remedy="Install one that runs here; `vox-host plugin list` shows those that are installed.",
        )
    if not any(manifest.accepts_protocol(v) for v in range(PROTOCOL_MIN, PROTOCOL_MAX + 1)):
        raise PluginError(
            "protocol-unsupported",
            f"plugin '{plugin_id}' speaks another protocol than this host; nothing was installed",
            facts=[
                ("plugin", f'"{manifest.plugin.protocol}" ({FILE_NAME} of {request.path})'),
                ("host", f"{PROTOCOL_MIN} to {PROTOCOL_MAX} (version {request.host_version})"),
            ],
            remedy=f"Install a version of '{plugin_id}' made for this host, or another host.",
        )


def prepare(request: InstallRequest, source: Installable, siblings: tuple[Path, ...], stage: Path) -> Payload:
    """Return the archive of `source`, in the folder `stage`.

    Raises:
        PluginError: it can't be built, or can't run here.
        IntegrityError: bytes are not what a manifest or record declares.
    """
    if isinstance(source, sources.SourceFolder):
        return _build(request, source, siblings, stage)
    if isinstance(source, sources.WheelFile):
        wheel = inspect_wheel(source.path)
        refuse_unusable(wheel.manifest, request)
        # What is placed is a copy that was hashed, not the file that may change meanwhile.
        copy = stage / source.path.name
        shutil.copyfile(source.path, copy)
        return Payload(
            manifest=wheel.manifest,
            archive=copy,
            archive_sha256=digest_of_file(copy),
            is_verified=False,
            wheel=inspect_wheel(copy),
        )
    archive, digest = sources.verify_artifact(source, request.platform, stage)
    request.tools.report(f"{archive.name} matches its released checksum sha256:{digest}")
    if archive.suffix != ".whl" and archive.suffix not in _LIBRARIES:
        raise PluginError(
            "artifact-kind",
            f"the artifact {archive.name} is neither a wheel nor a native library; nothing was installed",
            facts=[
                ("expected", ", ".join((".whl", *sorted(_LIBRARIES)))),
                ("found", archive.suffix or "none"),
            ],
            remedy="Take the release from where it was made.",
        )
    return Payload(
        manifest=source.manifest,
        archive=archive,
        archive_sha256=digest,
        is_verified=True,
        wheel=inspect_wheel(archive, released=source.manifest) if archive.suffix == ".whl" else None,
    )


def _build(
    request: InstallRequest, source: sources.SourceFolder, siblings: tuple[Path, ...], stage: Path
) -> Payload:
    report = request.tools.report
    built: list[Path] = []
    for number, folder in enumerate([*siblings, source.folder]):
        report(f"building a wheel of {folder}")
        destination = stage / f"build-{number}"
        destination.mkdir()
        built.append(request.tools.build_wheel(folder, destination))
    wheel = inspect_wheel(built[-1])
    return Payload(
        manifest=wheel.manifest,
        archive=wheel.path,
        archive_sha256=digest_of_file(wheel.path),
        is_verified=False,
        wheel=wheel,
        siblings=tuple(built[:-1]),
    )
