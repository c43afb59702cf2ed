"""The distributions beside the host: their entry points in the group `vox_host.backends` name plugins.

The manifest is read through the distribution's list of files; nothing is asked of the import
system, since even looking up a dotted name runs its parent package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import importlib_metadata
from packaging.utils import canonicalize_name

from vox_host.discovery.problems import as_problem
from vox_host.errors import PluginError, VoxError
from vox_host.manifest import FILE_NAME, find_source_manifest, load_manifest
from vox_host.resolution import Candidate, Problem

__all__ = ["GROUP", "discover_in_environment"]

GROUP = "vox_host.backends"


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
        problem = as_problem(error, f"distribution {distribution}: ")
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _broken(name: str, claim: _Claim, problem: Problem) -> Candidate:
    return Candidate(
        plugin_id=name,
        version=claim.version,
        origin="environment",
        location=str(claim.metadata_folder),
        problem=problem,
    )
