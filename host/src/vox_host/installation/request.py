"""What is to be installed, and the digest by which a second request for the same is known."""

from __future__ import annotations

import hashlib
import platform as python_platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vox_host.installation import sources
from vox_host.installation.tools import Tools
from vox_host.installed_tree import digest_of_file
from vox_host.manifest import FILE_NAME, Manifest

__all__ = ["InstallRequest", "Installable", "digest_of_request"]

Installable = sources.SourceFolder | sources.WheelFile | sources.ReleasedFolder


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


def digest_of_request(request: InstallRequest, source: Installable, siblings: tuple[Path, ...]) -> str:
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
