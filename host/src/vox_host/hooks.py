"""Hook specifications for in-process extensions of the host.

Only what is called today is specified. An extension is a distribution with an entry point in
the group `vox_host.hooks`; unlike a backend plugin it runs inside the host, so it is loaded
only by the commands that call its hook, and never by `list`, `explain` or `remove`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from vox_host.errors import IntegrityError, PluginError

if TYPE_CHECKING:
    from vox_host.manifest import Manifest

__all__ = ["SignatureVerdict", "hookimpl", "load_hooks", "verify_signature"]

PROJECT = "vox_host"
GROUP = "vox_host.hooks"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class SignatureVerdict:
    """What one extension says about an archive's origin."""

    is_valid: bool
    signer: str
    """Who signed, or why the signature was refused."""


class _Specifications:
    @hookspec
    def vox_host_verify_signature(self, manifest: Manifest, archive_path: Path) -> SignatureVerdict | None:
        """Judge the origin of an archive whose checksum was already verified.

        Called once per installation, before anything of the archive is placed. None: no opinion.
        One refusal is enough to stop the installation.
        """


def load_hooks() -> pluggy.PluginManager:
    """Return the hook caller with every installed extension registered.

    Raises:
        PluginError: an extension can't be imported; it is named.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_Specifications)
    try:
        manager.load_setuptools_entrypoints(GROUP)
    except Exception as error:
        # An extension that checks signatures must not vanish because it is broken.
        raise PluginError(
            "hook-broken",
            f"an extension in the entry point group {GROUP} can't be loaded; nothing was installed",
            facts=[("error", f"{type(error).__name__}: {error}")],
            remedy="Repair or uninstall that distribution.",
        ) from error
    return manager


def verify_signature(
    manager: pluggy.PluginManager, manifest: Manifest, archive_path: Path
) -> tuple[str, ...]:
    """Ask every extension about an archive; return who vouches for it (often nobody).

    Raises:
        IntegrityError: one refused it.
    """
    verdicts: list[SignatureVerdict] = manager.hook.vox_host_verify_signature(
        manifest=manifest, archive_path=archive_path
    )
    refusals = [verdict.signer for verdict in verdicts if not verdict.is_valid]
    if refusals:
        raise IntegrityError(
            "signature-refused",
            f'the signature of plugin "{manifest.plugin.id}" was refused; nothing was installed',
            facts=[("archive", str(archive_path)), *(("refused", reason) for reason in refusals)],
            remedy="Take the release from where it was made; if its maker's key is new, give it to whatever "
            "refused.",
        )
    return tuple(verdict.signer for verdict in verdicts)
