"""Install a plugin from a path: verify, build its environment, record it, make it visible."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import platform as python_platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vox_host.errors import IntegrityError, PluginError, UsageError, VoxError
from vox_host.installation import sources, store
from vox_host.installation.distributions import installed_distributions
from vox_host.installation.tools import Tools
from vox_host.installation.wheel import InspectedWheel, inspect_wheel
from vox_host.installed_tree import describe_interpreter, digest_of_file, listing_of_tree, read_entries
from vox_host.integrity import verify_installation
from vox_host.manifest import FILE_NAME, Manifest
from vox_host.receipt import Interpreter, Receipt
from vox_host.resolution import platform_refusal
from vox_plugin_api.messages import PROTOCOL_MAX, PROTOCOL_MIN

__all__ = ["InstallRequest", "Installed", "install"]

_Installable = sources.SourceFolder | sources.WheelFile | sources.ReleasedFolder
_LIBRARIES = {".so", ".dylib", ".dll"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstallRequest:
    """What to install, and where."""

    path: Path
    plugins_dir: Path
    os: str
    arch: str
    tools: Tools
    host_version: str
    require_verified: bool = False
    force: bool = False
    """Install again even if the same thing is installed and intact."""
    verify_signature: Callable[[Manifest, Path], tuple[str, ...]] = lambda manifest, path: ()
    """Asks extensions about the archive's origin; raises to refuse it."""

    @property
    def platform(self) -> str:
        return f"{self.os}-{self.arch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What came of it."""

    receipt: Receipt
    was_unchanged: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Payload:
    """A verified archive, ready to be placed."""

    manifest: Manifest
    archive: Path
    archive_sha256: str
    is_verified: bool
    wheel: InspectedWheel | None
    """None: a plain native library."""
    siblings: tuple[Path, ...] = ()


def install(request: InstallRequest) -> Installed:
    """Install what `request.path` holds and return its receipt.

    Until the last step nothing is visible, and any failure, a kill included, leaves what was
    installed before.

    Raises:
        UsageError: the path holds nothing installable, or the disk is full or may not be written.
        PluginError: the plugin can't be installed here.
        IntegrityError: bytes are not what a manifest or record declares, or nothing vouches
            for them where that is required.
    """
    path = request.path.absolute()
    if path.name == FILE_NAME and path.is_file():
        path = path.parent
    request = replace(request, path=path)
    source = sources.identify(path)
    if not isinstance(source, sources.WheelFile):
        _refuse_unusable(source.manifest, request)
    if isinstance(source, sources.UnpackedDistribution):
        raise sources.not_installable(path, "an unpacked distribution; give the wheel it came from")
    if request.require_verified and not isinstance(source, sources.ReleasedFolder):
        raise IntegrityError(
            "not-verified",
            f"nothing vouches for {request.path}: no released manifest came with it; nothing was installed",
            remedy="Install a folder with a released Plugin.toml, or leave out --require-verified.",
        )
    with _disk_errors(request.plugins_dir), store.locked(request.plugins_dir, request.tools.report):
        return _install_locked(request, source)


def _install_locked(request: InstallRequest, source: _Installable) -> Installed:
    with store.staging(request.plugins_dir) as stage:
        tools = request.tools
        siblings: tuple[Path, ...] = ()
        if isinstance(source, sources.SourceFolder):
            siblings = tuple(sources.find_sibling_sources(source.folder))
        source_digest = _digest_of_request(request, source, siblings)
        if isinstance(source, sources.SourceFolder) and not request.force:
            # Before the build, which is what takes long.
            unchanged = _unchanged(request, source.manifest.plugin.id, source_digest)
            if unchanged is not None:
                return unchanged
        payload = _prepare(request, source, siblings, stage)
        plugin_id = payload.manifest.plugin.id
        if not request.force:
            unchanged = _unchanged(request, plugin_id, source_digest)
            if unchanged is not None:
                return unchanged
        request.verify_signature(payload.manifest, payload.archive)
        environment, tree = store.new_environment(request.plugins_dir, plugin_id)
        try:
            receipt, listing = _place(request, payload, source_digest, environment, tree)
            store.publish(request.plugins_dir, receipt, listing)
        except BaseException:
            shutil.rmtree(tree, ignore_errors=True)
            raise
        # Reads everything back once: proves the receipt, and makes the first start cheap.
        verify_installation(receipt, request.plugins_dir)
        tools.report(f"{plugin_id} {receipt.version} installed")
        return Installed(receipt=receipt, was_unchanged=False, warnings=_warnings(receipt))


def _refuse_unusable(manifest: Manifest, request: InstallRequest) -> None:
    """Refuse what could never start here, before anything is built or copied."""
    plugin_id = manifest.plugin.id
    reason = platform_refusal(manifest, request.os, request.arch)
    if reason is not None:
        raise PluginError("platform-unsupported", f"plugin '{plugin_id}' {reason}; nothing was installed")
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


def _prepare(
    request: InstallRequest, source: _Installable, siblings: tuple[Path, ...], stage: Path
) -> _Payload:
    if isinstance(source, sources.SourceFolder):
        return _build(request, source, siblings, stage)
    if isinstance(source, sources.WheelFile):
        wheel = inspect_wheel(source.path)
        _refuse_unusable(wheel.manifest, request)
        # What is placed is a copy that was hashed, not the file that may change meanwhile.
        copy = stage / source.path.name
        shutil.copyfile(source.path, copy)
        return _Payload(
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
        )
    return _Payload(
        manifest=source.manifest,
        archive=archive,
        archive_sha256=digest,
        is_verified=True,
        wheel=inspect_wheel(archive, released=source.manifest) if archive.suffix == ".whl" else None,
    )


def _build(
    request: InstallRequest, source: sources.SourceFolder, siblings: tuple[Path, ...], stage: Path
) -> _Payload:
    report = request.tools.report
    built: list[Path] = []
    for number, folder in enumerate([*siblings, source.folder]):
        report(f"building a wheel of {folder}")
        destination = stage / f"build-{number}"
        destination.mkdir()
        built.append(request.tools.build_wheel(folder, destination))
    wheel = inspect_wheel(built[-1])
    return _Payload(
        manifest=wheel.manifest,
        archive=wheel.path,
        archive_sha256=digest_of_file(wheel.path),
        is_verified=False,
        wheel=wheel,
        siblings=tuple(built[:-1]),
    )


def _place(
    request: InstallRequest, payload: _Payload, source_digest: str, environment: str, tree: Path
) -> tuple[Receipt, bytes]:
    interpreter: Interpreter | None = None
    python, packages, manifest_name = None, "", FILE_NAME
    if payload.wheel is not None:
        packages = _build_environment(request, payload, tree)
        manifest_name = f"{packages}/{payload.wheel.manifest_name}"
        python = "bin/python"
        interpreter = describe_interpreter(
            tree / python,
            version=python_platform.python_version(),
            implementation=sys.implementation.name,
        )
    else:
        _place_library(request, payload, tree)
    request.tools.report(f"{payload.manifest.plugin.id}: recording what was installed")
    entries = read_entries(tree, interpreter=interpreter)
    distributions = installed_distributions(tree, packages, entries) if packages else ()
    listing = listing_of_tree(entries, interpreter)
    receipt = Receipt(
        plugin=payload.manifest.plugin.id,
        version=payload.manifest.plugin.version,
        trust="verified" if payload.is_verified else "development",
        source=str(request.path),
        archive=payload.archive.name,
        archive_sha256=payload.archive_sha256,
        source_digest=source_digest,
        environment=environment,
        manifest=manifest_name,
        manifest_digest=digest_of_file(tree / manifest_name),
        packages=packages,
        python=python,
        interpreter=interpreter,
        distributions=distributions,
        tree_digest=hashlib.sha256(listing).hexdigest(),
        platform=request.platform,
        host_version=request.host_version,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return receipt, listing


def _build_environment(request: InstallRequest, payload: _Payload, tree: Path) -> str:
    """Make the environment and return its package folder, relative to it."""
    assert payload.wheel is not None
    tools, plugin_id = request.tools, payload.manifest.plugin.id
    tools.report(f"{plugin_id}: creating its environment with {'uv' if tools.uv else 'venv and pip'}")
    tools.create_environment(tree)
    # Wheels that lie beside a wheel are its release: its own dependencies are taken from there.
    beside = request.path if request.path.is_dir() else request.path.parent
    if any(beside.glob("*.whl")):
        tools = replace(tools, find_links=(*tools.find_links, beside))
    tools.report(f"{plugin_id}: installing it and what it depends on")
    tools.install_wheels(tree, [payload.wheel.path, *payload.siblings])
    folders = sorted(tree.glob("lib/python*/site-packages"))
    if len(folders) != 1 or not (folders[0] / payload.wheel.manifest_name).is_file():
        raise PluginError(
            "environment-odd",
            f"{payload.wheel.manifest_name} did not arrive in the environment; nothing was installed",
            facts=[("package folders", ", ".join(map(str, folders)) or "none")],
        )
    tools.report(f"{plugin_id}: compiling its modules")
    tools.compile_modules(tree / "bin" / "python", folders[0])
    return folders[0].relative_to(tree).as_posix()


def _place_library(request: InstallRequest, payload: _Payload, tree: Path) -> None:
    artifact = payload.manifest.artifacts[request.platform]
    target = tree / artifact.file
    target.parent.mkdir(parents=True)
    shutil.copyfile(payload.archive, target)
    shutil.copyfile(request.path / FILE_NAME, tree / FILE_NAME)


def _unchanged(request: InstallRequest, plugin_id: str, source_digest: str) -> Installed | None:
    receipt = store.receipt_of(request.plugins_dir, plugin_id)
    if receipt is None or receipt.source_digest != source_digest:
        return None
    try:
        verify_installation(receipt, request.plugins_dir)
    except VoxError:
        request.tools.report(f"{plugin_id}: the installed files were changed; installing again")
        return None
    request.tools.report(f"{plugin_id} {receipt.version} is installed already and intact; nothing to do")
    return Installed(receipt=receipt, was_unchanged=True, warnings=_warnings(receipt))


def _digest_of_request(request: InstallRequest, source: _Installable, siblings: tuple[Path, ...]) -> str:
    """Return a digest over everything an installation depends on, as far as it lies here."""
    digest = hashlib.sha256()
    if isinstance(source, sources.SourceFolder):
        digest.update(sources.digest_of_sources([source.folder, *siblings]).encode())
    else:
        folder = source.path.parent if isinstance(source, sources.WheelFile) else source.folder
        named = [source.path] if isinstance(source, sources.WheelFile) else [folder / FILE_NAME]
        for path in [*named, *sorted(folder.glob("*.whl"))]:
            digest.update(f"{path.name} {digest_of_file(path)}\n".encode())
    for links in request.tools.find_links:
        for path in sorted(links.glob("*.whl")):
            digest.update(f"{path.name} {path.stat().st_size} {digest_of_file(path)}\n".encode())
    if request.tools.constraint is not None:
        digest.update(digest_of_file(request.tools.constraint).encode())
    interpreter = Path(sys.executable).resolve()
    digest.update(f"{interpreter} {python_platform.python_version()} {request.platform}".encode())
    return digest.hexdigest()


def _warnings(receipt: Receipt) -> tuple[str, ...]:
    if receipt.trust == "verified":
        return ()
    return (
        f'plugin "{receipt.plugin}" is a development install: no checksum vouches for {receipt.archive}. '
        "Its files are recorded as they were installed, and later changes are noticed.",
    )


@contextlib.contextmanager
def _disk_errors(plugins_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Not the plugin's fault: the same codes and status as of every other command.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UsageError(
                "disk-full",
                "the disk has no room left; nothing was installed",
                facts=[("folder", str(plugins_dir)), ("system", error.strerror)],
                remedy="Free some space, or set VOX_HOME to a folder on another disk.",
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UsageError(
                "not-writable",
                f"{error.filename or plugins_dir} can't be written: {error.strerror}; nothing was installed",
                remedy="Set VOX_HOME to a folder you may write to.",
            ) from None
        raise
