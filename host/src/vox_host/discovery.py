"""Find plugins, import none of them.

Two places are looked at: the plugin folder, where each receipt names an installed plugin, and
the distributions beside the host, whose entry points in the group `vox_host.backends` name
plugins. The manifest is read through the distribution's list of files; nothing is asked of
the import system, since even looking up a dotted name runs its parent package. A broken
plugin is a candidate with its problem, listed like the others.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import importlib_metadata
from packaging.utils import canonicalize_name

from vox_host.errors import PluginError, VoxError
from vox_host.installed_tree import digest_of_file
from vox_host.manifest import FILE_NAME, find_source_manifest, load_manifest
from vox_host.receipt import Receipt, load_receipt
from vox_host.resolution import Candidate, Problem, Stage

__all__ = ["GROUP", "discover", "discover_in_environment", "discover_installed"]

GROUP = "vox_host.backends"

log = logging.getLogger(__name__)


def discover(plugins_dir: Path, search_path: Sequence[str] | None = None) -> list[Candidate]:
    """Return every plugin, one candidate per id, sorted by id.

    `search_path` is where the host's own distributions are; None: where Python looks.
    """
    found = {candidate.plugin_id: candidate for candidate in discover_in_environment(search_path)}
    for candidate in discover_installed(plugins_dir):
        other = found.get(candidate.plugin_id)
        if other is not None:
            note = f"installed; the one at {other.location} beside the host is not used"
            candidate = replace(candidate, notes=(*candidate.notes, note))
        found[candidate.plugin_id] = candidate
    for plugin_id in sorted(found):
        log.info("plugin.discovered id=%s origin=%s", plugin_id, found[plugin_id].origin)
    return [found[plugin_id] for plugin_id in sorted(found)]


def discover_installed(plugins_dir: Path) -> list[Candidate]:
    """Return a candidate per receipt in the plugin folder.

    Environments without a receipt are the remains of an interrupted installation: invisible.
    """
    try:
        receipts = sorted(p for p in plugins_dir.iterdir() if p.suffix == ".json" and p.name[0] != ".")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PluginError(
            "plugins-unreadable",
            f"the plugin folder can't be read: {error.strerror}",
            facts=[("path", str(plugins_dir))],
        ) from None
    return [_read_installed(path, plugins_dir) for path in receipts]


def discover_in_environment(search_path: Sequence[str] | None = None) -> list[Candidate]:
    """Return a candidate per plugin among the distributions on `search_path`."""
    claims: list[_Claim] = []
    path = sys.path if search_path is None else search_path
    for distribution in importlib_metadata.distributions(path=list(path)):
        claims.extend(_claims_of(distribution))
    by_id: dict[str, list[_Claim]] = {}
    for claim in claims:
        by_id.setdefault(claim.name, []).append(claim)
    return [_settle(name, by_id[name]) for name in sorted(by_id)]


@dataclass(frozen=True, slots=True)
class _Claim:
    """One distribution that registers one name in the entry point group."""

    name: str
    distribution: str
    """Its normalised name."""
    version: str
    metadata_folder: Path
    """The .dist-info or .egg-info folder."""
    entry_points: tuple[str, ...]
    files: Callable[[], Iterable[importlib_metadata.PackagePath] | None]
    locate: Callable[[str], Path]
    direct_url: str | None


def _claims_of(distribution: Any) -> list[_Claim]:
    try:
        text = distribution.read_text("entry_points.txt")
        # Most distributions have nothing to do with us; only ours are parsed further.
        if not text or GROUP not in text:
            return []
        names = tuple(sorted(distribution.entry_points.select(group=GROUP).names))
    except (OSError, ValueError, AttributeError, KeyError):
        # Not even its list of entry points can be read; whatever it is, it names no plugin.
        return []
    if not names:
        return []
    folder = Path(str(getattr(distribution, "_path", distribution.locate_file(""))))
    metadata = distribution.metadata
    return [
        _Claim(
            name=name,
            distribution=canonicalize_name(metadata["Name"] or folder.stem.partition("-")[0]),
            version=str(metadata["Version"] or "unknown"),
            metadata_folder=folder,
            entry_points=names,
            files=lambda: distribution.files,
            locate=lambda file: Path(str(distribution.locate_file(file))),
            direct_url=distribution.read_text("direct_url.json"),
        )
        for name in names
    ]


def _settle(name: str, claims: list[_Claim]) -> Candidate:
    """Choose among the distributions that claim one id, the same way whatever their order."""
    owners = [c for c in claims if c.distribution == name]
    notes = [
        f"distribution {c.distribution} {c.version} ({c.metadata_folder}) claims this id too; "
        "it is not used, since an id belongs to the distribution of that name"
        for c in claims
        if c.distribution != name
    ]
    if not owners:
        first = min(claims, key=lambda c: (c.distribution, str(c.metadata_folder)))
        others = ", ".join(sorted({f"{c.distribution} {c.version}" for c in claims}))
        return _broken(
            name,
            first,
            Problem(
                stage="found",
                code="name-not-owned",
                detail=f'entry point "{name}" comes from {others}, not from a distribution named "{name}"',
                remedy="The entry point, the distribution and plugin.id must have one name.",
            ),
        )
    # Python itself takes the first folder on its path, so only that one can be meant.
    folder = owners[0].metadata_folder.parent
    here = [c for c in owners if c.metadata_folder.parent == folder]
    notes += [
        f"{c.metadata_folder} is later on the search path; it is not used"
        for c in owners
        if c.metadata_folder.parent != folder
    ]
    modern = [c for c in here if c.metadata_folder.suffix == ".dist-info"]
    if modern:
        notes += [
            f"{c.metadata_folder.name} is stale: {modern[0].metadata_folder.name} replaces it"
            for c in here
            if c not in modern
        ]
        here = modern
    if len(here) > 1:
        names = ", ".join(sorted(c.metadata_folder.name for c in here))
        return _broken(
            name,
            min(here, key=lambda c: c.metadata_folder.name),
            Problem(
                stage="found",
                code="claimed-twice",
                detail=f"{folder} holds several versions of it ({names}); none is used",
                remedy=f"Uninstall {name} until none is left there, then install it once.",
            ),
        )
    return _read_claim(name, here[0], tuple(sorted(notes)))


def _read_claim(name: str, claim: _Claim, notes: tuple[str, ...]) -> Candidate:
    distribution = f"{claim.distribution} {claim.version}"
    try:
        path = _manifest_of(claim)
        manifest, digest = load_manifest(
            path,
            expected_id=claim.distribution,
            expected_version=claim.version,
            entry_points=claim.entry_points,
        )
    except (VoxError, OSError) as error:
        problem = _as_problem(error, f"distribution {distribution}: ")
        return replace(_broken(name, claim, problem), notes=notes)
    return Candidate(
        plugin_id=name,
        version=claim.version,
        origin="environment",
        location=str(path),
        manifest=manifest,
        manifest_digest=digest,
        python=Path(sys.executable),
        notes=notes,
    )


def _manifest_of(claim: _Claim) -> Path:
    listed = [f for f in claim.files() or () if f.name == FILE_NAME]
    if len(listed) == 1:
        return claim.locate(str(listed[0]))
    if len(listed) > 1:
        raise PluginError(
            "manifest-twice",
            f"it holds several {FILE_NAME}: {', '.join(sorted(map(str, listed)))}",
            remedy=f"Ship exactly one {FILE_NAME} per distribution.",
        )
    source = _editable_source(claim.direct_url)
    if source is not None:
        return find_source_manifest(source)
    raise PluginError(
        "manifest-missing",
        f"its list of files holds no {FILE_NAME} ({claim.metadata_folder})",
        remedy=f"Ship {FILE_NAME} inside the package, as package data.",
    )


def _editable_source(direct_url: str | None) -> Path | None:
    """Return the source folder of an editable installation: its file list has no package files."""
    try:
        record = json.loads(direct_url or "null")
        if not record["dir_info"].get("editable"):
            return None
        return Path(unquote(urlsplit(record["url"]).path))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_installed(path: Path, plugins_dir: Path) -> Candidate:
    try:
        receipt = load_receipt(path)
    except VoxError as error:
        return Candidate(
            plugin_id=path.stem,
            version=None,
            origin="installed",
            location=str(path),
            problem=_as_problem(error),
        )
    tree = plugins_dir / receipt.environment
    candidate = Candidate(
        plugin_id=receipt.plugin,
        version=receipt.version,
        origin="installed",
        location=str(tree / receipt.manifest),
        manifest_digest=receipt.manifest_digest,
        receipt=receipt,
        tree=tree,
        python=tree / receipt.python if receipt.python else None,
    )
    # Bytes before meaning: a changed manifest is a matter of integrity, not of its contents.
    problem = _changed_manifest(receipt, tree)
    if problem is not None:
        return replace(candidate, problem=problem)
    try:
        manifest, _ = load_manifest(
            tree / receipt.manifest, expected_id=receipt.plugin, expected_version=receipt.version
        )
    except VoxError as error:
        return replace(candidate, problem=_as_problem(error))
    return replace(candidate, manifest=manifest, problem=_start_problem(receipt, tree))


def _changed_manifest(receipt: Receipt, tree: Path) -> Problem | None:
    path = tree / receipt.manifest
    try:
        found = f"sha256:{digest_of_file(path)}"
    except OSError as error:
        found = str(error.strerror or error).lower()
    if found == f"sha256:{receipt.manifest_digest}":
        return None
    return Problem(
        stage="integrity",
        code="integrity-mismatch",
        detail=f"{path}: expected sha256:{receipt.manifest_digest}, found {found}",
        remedy=f"vox-host plugin install --path {receipt.source}",
    )


def _start_problem(receipt: Receipt, tree: Path) -> Problem | None:
    if receipt.python is None:
        return Problem(
            stage="start",
            code="no-worker",
            detail="its artifact is a plain native library; protocol 1 starts plugins that ship a wheel",
        )
    packages = tree / receipt.packages
    if not (packages / "vox_plugin_api").is_dir():
        return Problem(
            stage="start",
            code="no-worker",
            detail=f"no worker can start: vox_plugin_api is not in {packages}",
            remedy="Let the plugin's distribution depend on vox-plugin-api, and install it again.",
        )
    return None


def _broken(name: str, claim: _Claim, problem: Problem) -> Candidate:
    return Candidate(
        plugin_id=name,
        version=claim.version,
        origin="environment",
        location=str(claim.metadata_folder),
        problem=problem,
    )


def _as_problem(error: VoxError | OSError, prefix: str = "") -> Problem:
    if isinstance(error, OSError):
        return Problem(stage="found", code="unreadable", detail=f"{prefix}{error.filename}: {error.strerror}")
    # A receipt that can't be read vouches for nothing: the same as bytes that changed.
    stages: dict[str, Stage] = {"manifest": "manifest", "receipt": "integrity"}
    stage = stages.get(error.code.split("-")[0], "found")
    facts = "".join(f"; {name} {value}" for name, value in error.facts)
    return Problem(
        stage=stage, code=error.code, detail=f"{prefix}{error.message}{facts}", remedy=error.remedy
    )
