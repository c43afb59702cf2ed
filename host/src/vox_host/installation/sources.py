"""What a path to install is: a source folder, a wheel, or a folder of released artifacts."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import tomli
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vox_host.errors import IntegrityError, PluginError, UsageError
from vox_host.installed_tree import digest_of_file
from vox_host.manifest import FILE_NAME, Artifact, Manifest, find_source_manifest, load_manifest

__all__ = [
    "ReleasedFolder",
    "Source",
    "SourceFolder",
    "UnpackedDistribution",
    "WheelFile",
    "digest_of_sources",
    "find_sibling_sources",
    "identify",
    "not_installable",
    "verify_artifact",
]


@dataclass(frozen=True, slots=True)
class SourceFolder:
    """A project to build a wheel from; nothing vouches for its bytes."""

    folder: Path
    manifest: Manifest
    manifest_path: Path


@dataclass(frozen=True, slots=True)
class WheelFile:
    """A wheel without a released manifest beside it; nothing vouches for its bytes."""

    path: Path


@dataclass(frozen=True, slots=True)
class ReleasedFolder:
    """A released manifest with the artifacts it names, at least this platform's."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class UnpackedDistribution:
    """A distribution as it lies on a search path; its manifest is judged, but it is not installed."""

    folder: Path
    manifest: Manifest


Source = SourceFolder | WheelFile | ReleasedFolder | UnpackedDistribution


def identify(path: Path) -> Source:
    """Say what `path` is, and read its manifest where it has one of its own.

    Raises:
        UsageError: it is nothing that can be installed.
        PluginError: its manifest is not valid.
    """
    if path.is_file():
        if path.suffix != ".whl":
            raise not_installable(path, "a file that is not a wheel (.whl)")
        return WheelFile(path)
    if not path.is_dir():
        raise UsageError(
            "path-missing",
            f"{path} does not exist; nothing was installed",
            remedy="Give the path of a source folder, a wheel, or a folder with Plugin.toml.",
        )
    if (path / "pyproject.toml").is_file():
        manifest_path = find_source_manifest(path)
        project = _read_project(path)
        manifest, _ = load_manifest(manifest_path, expected_id=project.name, expected_version=project.version)
        return SourceFolder(path, manifest, manifest_path)
    if (path / FILE_NAME).is_file():
        manifest, _ = load_manifest(path / FILE_NAME)
        if manifest.artifacts:
            return ReleasedFolder(path, manifest)
        raise not_installable(
            path, f"a folder whose {FILE_NAME} names no artifacts and has no pyproject.toml"
        )
    if any(path.glob("*.dist-info")):
        manifest, _ = load_manifest(find_source_manifest(path))
        return UnpackedDistribution(path, manifest)
    raise not_installable(path, f"a folder without {FILE_NAME} and without pyproject.toml")


def verify_artifact(released: ReleasedFolder, platform: str, destination: Path) -> tuple[Path, str]:
    """Copy this platform's artifact to the folder `destination`, verified; return it and its digest.

    Files of other platforms are not looked at. What is hashed is the copy, so the file can't
    change between the check and its use.

    Raises:
        PluginError: the manifest declares none for this platform, or the file is missing.
        IntegrityError: its size or checksum is not the declared one.
    """
    plugin_id = released.manifest.plugin.id
    artifact = released.manifest.artifacts.get(platform)
    if artifact is None:
        has = ", ".join(sorted(released.manifest.artifacts)) or "none"
        raise PluginError(
            "no-artifact",
            f"plugin '{plugin_id}' declares no artifact for '{platform}'; has: {has}; nothing was installed",
            facts=[("manifest", str(released.folder / FILE_NAME))],
            remedy="Get a release that has this platform, or install from source.",
        )
    path = _inside(released.folder, artifact)
    if not path.is_file():
        raise PluginError(
            "artifact-missing",
            f"the artifact of plugin '{plugin_id}' for '{platform}' is missing: {artifact.file}; "
            "nothing was installed",
            facts=[("expected at", str(path))],
            remedy="Get the whole release again; files of other platforms may stay absent.",
        )
    copy = destination / path.name
    digest, size = _copy_hashing(path, copy)
    if digest != artifact.sha256 or size != artifact.size:
        raise IntegrityError(
            "artifact-mismatch",
            f"the artifact of plugin '{plugin_id}' for '{platform}' is not the released one; "
            "nothing was installed",
            facts=[
                ("file", str(path)),
                ("expected", f"sha256:{artifact.sha256}, {artifact.size} bytes"),
                ("found", f"sha256:{digest}, {size} bytes"),
            ],
            remedy="Get the release again from a place you trust.",
        )
    return copy, digest


def find_sibling_sources(folder: Path) -> list[Path]:
    """Return the source folders near `folder` that its dependencies are built from, in order.

    In a clone a plugin lies beside the distributions it needs, and those versions are the ones
    it was written with: they come first, before any index.
    """
    nearby = _nearby_projects(folder)
    needed: list[Path] = []
    pending = [folder]
    while pending:
        for text in _read_project(pending.pop()).dependencies:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            project = nearby.get(canonicalize_name(requirement.name))
            if project is None or project.folder in needed or project.folder == folder:
                continue
            if project.version is not None and not requirement.specifier.contains(project.version, True):
                continue
            needed.append(project.folder)
            pending.append(project.folder)
    return needed


def digest_of_sources(folders: list[Path]) -> str:
    """Return one digest over the files of source folders, build results left out."""
    digest = hashlib.sha256()
    for folder in folders:
        digest.update(f"{folder}\n".encode())
        for path in _source_files(folder):
            digest.update(f"{path.relative_to(folder).as_posix()} {digest_of_file(path)}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Project:
    folder: Path
    name: str | None
    version: str | None
    dependencies: tuple[str, ...]


def _read_project(folder: Path) -> _Project:
    path = folder / "pyproject.toml"
    try:
        document = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError, RecursionError) as error:
        raise PluginError(
            "project-unreadable",
            f"{path} can't be read: {error}; nothing was installed",
            remedy="Mend that file, or name a plugin's folder, wheel or release.",
        ) from None
    project = document.get("project")
    if not isinstance(project, dict):
        return _Project(folder, None, None, ())
    name, version = project.get("name"), project.get("version")
    dependencies = project.get("dependencies")
    return _Project(
        folder,
        canonicalize_name(name) if isinstance(name, str) else None,
        version if isinstance(version, str) else None,
        tuple(d for d in dependencies if isinstance(d, str)) if isinstance(dependencies, list) else (),
    )


def _nearby_projects(folder: Path) -> dict[str, _Project]:
    found: dict[str, _Project] = {}
    parents = list(folder.resolve().parents)[:2]
    for parent in parents:
        for path in sorted(parent.glob("*/pyproject.toml")):
            try:
                project = _read_project(path.parent)
            except PluginError:
                continue
            if project.name is not None:
                found.setdefault(project.name, project)
    return found


_SKIPPED = {"__pycache__", "build", "dist", "venv", "node_modules"}


def _source_files(folder: Path) -> list[Path]:
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            d for d in folders if d not in _SKIPPED and d[0] != "." and not d.endswith(".egg-info")
        )
        files += [Path(root, name) for name in sorted(names) if not name.endswith((".pyc", ".so", ".dylib"))]
    return [path for path in files if path.is_file()]


def _inside(folder: Path, artifact: Artifact) -> Path:
    path = folder / artifact.file
    real = Path(os.path.realpath(path))
    # The manifest's text was checked already; a link can still lead away.
    if Path(os.path.realpath(folder)) not in real.parents:
        raise PluginError(
            "artifact-outside",
            f"the artifact {artifact.file} lies outside {folder}; nothing was installed",
            facts=[("resolves to", str(real))],
            remedy="Put the artifact itself beside its Plugin.toml, not a link.",
        )
    return path


def _copy_hashing(source: Path, destination: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, destination.open("xb") as writer:
        while chunk := reader.read(1 << 20):
            digest.update(chunk)
            size += len(chunk)
            writer.write(chunk)
    return digest.hexdigest(), size


def not_installable(path: Path, what: str) -> UsageError:
    """Return the error for a path that is something else."""
    return UsageError(
        "not-installable",
        f"{path} is {what}; nothing was installed",
        remedy=(
            "Give a source folder (pyproject.toml, and Plugin.toml in its package), a wheel, "
            "or a released folder (Plugin.toml with [artifacts])."
        ),
    )
