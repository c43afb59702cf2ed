"""The plugin folder: its lock, what interrupted installations left, receipts, removal.

    plugins/
        mens-cpu-ref.json                 the receipt: a plugin exists once this is here
        .environments/mens-cpu-ref-3f2a/  the tree the receipt names, built at its final place
        .environments/mens-cpu-ref-3f2a.tree   what the tree held
        .environments/mens-cpu-ref-3f2a.lock   shared by those who run workers from it
        .checked/                         what `stat` said at the last check
        .staging-9c1e/                    an installation at work
        .lock

An environment holds absolute paths, so it can't be built elsewhere and moved. It is built
under a name nobody looks at, and one rename of the receipt makes it the plugin's.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from vox_host.environment_use import alone_with, lock_path
from vox_host.errors import PluginError, VoxError
from vox_host.installation.tools import Report
from vox_host.installed_tree import listing_path
from vox_host.receipt import Receipt, load_receipt, receipt_text
from vox_host.stat_cache import write_aside

__all__ = [
    "ENVIRONMENTS",
    "environments",
    "locked",
    "new_environment",
    "publish",
    "receipt_of",
    "remove",
    "remove_remains",
    "staging",
]

ENVIRONMENTS = ".environments"
_STAGING = ".staging-"
_WAIT_S = 900.0


@contextlib.contextmanager
def locked(plugins_dir: Path, report: Report) -> Iterator[None]:
    """Hold the plugin folder alone; what an interrupted holder left is cleaned first.

    Raises:
        PluginError: another process kept it for a quarter of an hour.
    """
    plugins_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(plugins_dir / ".lock")
    try:
        lock.acquire(timeout=0.05)
    except Timeout:
        report("another vox-host is changing the plugin folder; waiting for it")
        try:
            lock.acquire(timeout=_WAIT_S)
        except Timeout:
            raise PluginError(
                "plugins-busy",
                "another vox-host is still changing the plugin folder; nothing was done",
                facts=[("lock", str(plugins_dir / ".lock")), ("waited", f"{_WAIT_S:.0f} s")],
                remedy="Wait until that command has ended, or end it, and repeat this one.",
            ) from None
    try:
        _clean(plugins_dir, report)
        yield
    finally:
        lock.release()


def remove_remains(plugins_dir: Path, report: Report = lambda line: None) -> None:
    """Remove what interrupted installations have left, unless somebody is at work or it can't be done.

    For commands that only read: it never waits and never fails.
    """
    if not plugins_dir.is_dir():
        return
    with contextlib.suppress(OSError, Timeout), FileLock(plugins_dir / ".lock", timeout=0):
        _clean(plugins_dir, report)


@contextlib.contextmanager
def staging(plugins_dir: Path) -> Iterator[Path]:
    """Give a hidden folder on the same file system, gone afterwards."""
    folder = plugins_dir / f"{_STAGING}{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_environment(plugins_dir: Path, plugin_id: str) -> tuple[str, Path]:
    """Return a fresh environment's name relative to the plugin folder, and its path (not made)."""
    (plugins_dir / ENVIRONMENTS).mkdir(exist_ok=True)
    name = f"{ENVIRONMENTS}/{plugin_id}-{secrets.token_hex(4)}"
    return name, plugins_dir / name


def publish(plugins_dir: Path, receipt: Receipt, listing: bytes) -> None:
    """Make an environment the plugin's: the one step that anybody can see."""
    # A crash of the machine may keep the receipt and lose files of the tree. Then the check
    # before the start says so, which is why the tree is not flushed file by file here.
    write_aside(listing_path(plugins_dir, receipt.environment), listing)
    write_aside(plugins_dir / f"{receipt.plugin}.json", receipt_text(receipt).encode())


def receipt_of(plugins_dir: Path, plugin_id: str) -> Receipt | None:
    """Return the receipt of an installed plugin; None if it has none that can be read."""
    path = plugins_dir / f"{plugin_id}.json"
    try:
        return load_receipt(path) if path.exists() else None
    except VoxError:
        return None


def environments(plugins_dir: Path) -> dict[str, str]:
    """Return the environment of each installed plugin, by its id; "" where none can be told."""
    found = {}
    for path in plugins_dir.glob("*.json"):
        if not path.name.startswith("."):
            receipt = receipt_of(plugins_dir, path.stem)
            found[path.stem] = "" if receipt is None else receipt.environment
    return found


def remove(plugins_dir: Path, plugin_id: str, report: Report = lambda line: None) -> None:
    """Remove an installed plugin, however broken it is.

    Raises:
        PluginError: no such plugin is installed.
    """
    path = plugins_dir / f"{plugin_id}.json"
    # The id is a file name here: nothing else may be reached with it.
    if path.parent != plugins_dir or plugin_id.startswith(".") or not path.exists():
        known = sorted(p.stem for p in plugins_dir.glob("*.json") if p.name[0] != ".")
        raise PluginError(
            "plugin-not-installed",
            f'plugin "{plugin_id}" is not in the plugin folder; nothing was removed',
            facts=[("installed", ", ".join(known) or "nothing"), ("folder", str(plugins_dir))],
            remedy="vox-host plugin list",
        )
    with locked(plugins_dir, report):
        receipt = receipt_of(plugins_dir, plugin_id)
        path.unlink()
        if receipt is not None:
            _forget(plugins_dir, Path(receipt.environment).name, report)
        else:
            # The receipt can't say which environment was its own: every one of that id goes.
            _clean(plugins_dir, report)


def _clean(plugins_dir: Path, report: Report) -> None:
    """Remove what no receipt names. A receipt that can't be read protects its id's environments."""
    kept: set[str] = set()
    unreadable: list[str] = []
    for path in plugins_dir.glob("*.json"):
        receipt = receipt_of(plugins_dir, path.stem)
        if receipt is None:
            unreadable.append(path.stem)
        else:
            kept.add(Path(receipt.environment).name)
    for path in plugins_dir.glob(f"{_STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in plugins_dir.glob(".*.tmp"):
        path.unlink(missing_ok=True)
    environments = plugins_dir / ENVIRONMENTS
    if not environments.is_dir():
        return
    for name in sorted({p.name.removesuffix(".tree").removesuffix(".lock") for p in environments.iterdir()}):
        if name in kept or name.rpartition("-")[0] in unreadable:
            continue
        _forget(plugins_dir, name, report)


def _forget(plugins_dir: Path, environment_name: str, report: Report) -> None:
    """Remove an environment and what lies beside it, unless a running host holds it."""
    name = f"{ENVIRONMENTS}/{environment_name}"
    environment = plugins_dir / name
    with alone_with(plugins_dir, name) as is_free:
        if not is_free:
            if environment.is_dir():
                report(f"keeping {environment_name}: a running vox-host uses it")
            return
        if environment.is_dir():
            report(f"removing {environment_name}: no plugin uses it")
        shutil.rmtree(environment, ignore_errors=True)
        listing_path(plugins_dir, name).unlink(missing_ok=True)
        (plugins_dir / ".checked" / f"{environment_name}.json").unlink(missing_ok=True)
        lock_path(plugins_dir, name).unlink(missing_ok=True)
