"""The plugin folder: each receipt names an installed plugin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vox_host.discovery.problems import as_problem
from vox_host.errors import PluginError, VoxError
from vox_host.installed_tree import digest_of_file
from vox_host.manifest import load_manifest
from vox_host.receipt import Receipt, load_receipt
from vox_host.resolution import Candidate, Problem

__all__ = ["discover_installed"]


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
            remedy="Allow this user to read it, or set VOX_HOME to another folder.",
        ) from None
    return [_read_installed(path, plugins_dir) for path in receipts]


def _read_installed(path: Path, plugins_dir: Path) -> Candidate:
    try:
        receipt = load_receipt(path)
    except VoxError as error:
        return Candidate(
            plugin_id=path.stem,
            version=None,
            origin="installed",
            location=str(path),
            problem=as_problem(error),
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
        return replace(candidate, problem=as_problem(error))
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
