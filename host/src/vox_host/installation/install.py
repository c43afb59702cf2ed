"""Install a plugin from a path: verify, build its environment, record it, make it visible."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import platform as python_platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vox_host.errors import IntegrityError, PluginError, UsageError, VoxError
from vox_host.installation import sources, store
from vox_host.installation.distributions import installed_distributions
from vox_host.installation.payload import Payload, prepare, refuse_unusable
from vox_host.installation.request import Installable, InstallRequest, digest_of_request
from vox_host.installed_tree import describe_interpreter, digest_of_file, listing_of_tree, read_entries
from vox_host.integrity import verify_installation
from vox_host.manifest import FILE_NAME
from vox_host.receipt import Interpreter, Receipt

__all__ = ["InstallRequest", "Installed", "install"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What came of it."""

    receipt: Receipt
    was_unchanged: bool
    warnings: tuple[str, ...]


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
        refuse_unusable(source.manifest, request)
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


def _install_locked(request: InstallRequest, source: Installable) -> Installed:
    with store.staging(request.plugins_dir) as stage:
        tools = request.tools
        siblings: tuple[Path, ...] = ()
        if isinstance(source, sources.SourceFolder):
            siblings = tuple(sources.find_sibling_sources(source.folder))
        source_digest = digest_of_request(request, source, siblings)
        if isinstance(source, sources.SourceFolder) and not request.force:
            # Before the build, which is what takes long.
            unchanged = _unchanged(request, source.manifest.plugin.id, source_digest)
            if unchanged is not None:
                return unchanged
        payload = prepare(request, source, siblings, stage)
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
            # What stops it may come when the receipt stands already: then the tree is the plugin's.
            published = store.receipt_of(request.plugins_dir, plugin_id)
            if published is None or published.environment != environment:
                shutil.rmtree(tree, ignore_errors=True)
            raise
        # Reads everything back once: proves the receipt, and makes the first start cheap.
        verify_installation(receipt, request.plugins_dir)
        tools.report(f"{plugin_id} {receipt.version} installed")
        return Installed(receipt=receipt, was_unchanged=False, warnings=_warnings(receipt))


def _place(
    request: InstallRequest, payload: Payload, source_digest: str, environment: str, tree: Path
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


def _build_environment(request: InstallRequest, payload: Payload, tree: Path) -> str:
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
            remedy=f"Its wheel has to hold {payload.wheel.manifest_name} where it is imported from: that is "
            "for whoever makes the plugin.",
        )
    tools.report(f"{plugin_id}: compiling its modules")
    tools.compile_modules(tree / "bin" / "python", folders[0])
    return folders[0].relative_to(tree).as_posix()


def _place_library(request: InstallRequest, payload: Payload, tree: Path) -> None:
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
