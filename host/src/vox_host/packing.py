"""Build a plugin's wheel and the released manifest beside it.

The manifest inside a wheel can't hold the wheel's own checksum; the released one equals it
plus `[artifacts]`, one table per platform. Packing on a second platform into the same folder
adds that platform's table.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import PluginError, UsageError
from vox_host.manifest import (
    FILE_NAME,
    Artifact,
    Manifest,
    find_source_manifest,
    load_manifest,
    parse_manifest,
)
from vox_host.ticker import PROGRESS_EVERY_S, ticking
from vox_host.tool_process import tool_process
from vox_host.whole_folder import write_file

__all__ = ["PackedPlugin", "pack_plugin", "released_manifest"]

BUILD_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class PackedPlugin:
    """What `pack_plugin` wrote."""

    plugin_id: str
    version: str
    platform: str
    wheel: Path
    manifest: Path
    sha256: str
    size: int


def pack_plugin(
    source: Path,
    out: Path,
    *,
    platform: str,
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda line: None,
    progress_every_s: float = PROGRESS_EVERY_S,
) -> PackedPlugin:
    """Build the wheel of the plugin in `source` for this machine and write it and Plugin.toml to `out`.

    Args:
        source: folder with a pyproject.toml and a Plugin.toml among its package data.
        platform: the key of the artifact's table, like linux-x86_64.
        environment: what the build sees.

    Raises:
        UsageError: `source` is not a plugin's source folder.
        PluginError: the manifest is wrong, or the build failed (its last lines are shown).
    """
    if not (source / "pyproject.toml").is_file():
        raise UsageError(
            "not-a-source-folder",
            f"{source} has no pyproject.toml; nothing was built",
            remedy="Give the folder that holds the plugin's pyproject.toml.",
        )
    embedded_path = find_source_manifest(source)
    embedded, _ = load_manifest(embedded_path)
    what = f"building {embedded.plugin.id} {embedded.plugin.version} for {platform}"
    say(what)
    with tempfile.TemporaryDirectory(prefix="vox-pack-") as folder:
        with ticking(say, what, progress_every_s):
            built = _build_wheel(source, Path(folder), environment)
        out.mkdir(parents=True, exist_ok=True)
        wheel, path = out / built.name, out / FILE_NAME
        content = built.read_bytes()
        artifact = Artifact(file=wheel.name, sha256=hashlib.sha256(content).hexdigest(), size=len(content))
        others = _other_platforms(path, embedded, platform)
        text = released_manifest(embedded_path.read_text(encoding="utf-8"), {**others, platform: artifact})
        parse_manifest(text.encode("utf-8"), source=str(path))
        _place({wheel: content, path: text.encode("utf-8")})
    return PackedPlugin(
        plugin_id=embedded.plugin.id,
        version=embedded.plugin.version,
        platform=platform,
        wheel=wheel,
        manifest=path,
        sha256=artifact.sha256,
        size=artifact.size,
    )


def released_manifest(embedded: str, artifacts: dict[str, Artifact]) -> str:
    """Return the embedded manifest's text plus one `[artifacts.*]` table per platform."""
    tables = [
        f'[artifacts.{platform}]\nfile = "{a.file}"\nsha256 = "{a.sha256}"\nsize = {a.size}\n'
        for platform, a in sorted(artifacts.items())
    ]
    return "\n".join([embedded.rstrip() + "\n", *tables])


def _build_wheel(source: Path, folder: Path, environment: Mapping[str, str]) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--quiet",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    try:
        # What a build has started ends with it, also when it is stopped.
        with tool_process(command, environment, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(timeout=BUILD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PluginError(
            "build-timeout",
            f"building {source} took longer than {BUILD_TIMEOUT_S:g} s; nothing was written",
            remedy="Repeat it on a machine with less to do; the project's own build says what it waits for.",
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = output.decode("utf-8", "replace").splitlines()
        last = [line for line in lines if line.strip()][-12:]
        raise PluginError(
            "build-failed",
            f"building the wheel of {source} failed with status {process.returncode}; nothing was written",
            facts=[("output", line) for line in last],
            remedy="Mend the build, then run `vox-host plugin pack` again.",
        )
    return wheels[0]


def _place(files: Mapping[Path, bytes]) -> None:
    """Write files that belong together: all of them, or none, when this is stopped at whatever moment.

    Only what kills this process, or the machine's end, comes between the renames.
    """
    asides = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in files}
    first = next(iter(asides.values()))
    try:
        for path, content in files.items():
            asides[path].unlink(missing_ok=True)
            write_file(asides[path], content)
        _rename(asides)
    except BaseException:
        if first.exists():
            for aside in asides.values():
                aside.unlink(missing_ok=True)
        else:
            _rename({path: aside for path, aside in asides.items() if aside.exists()})
        raise


def _rename(asides: Mapping[Path, Path]) -> None:
    for path, aside in asides.items():
        aside.replace(path)


def _other_platforms(path: Path, embedded: Manifest, platform: str) -> dict[str, Artifact]:
    """Artifacts that an earlier run released for other platforms, of this same version."""
    if not path.is_file():
        return {}
    released, _ = load_manifest(path)
    if (released.plugin.id, released.plugin.version) != (embedded.plugin.id, embedded.plugin.version):
        return {}
    return {name: artifact for name, artifact in released.artifacts.items() if name != platform}
