"""What a wheel holds, read without unpacking it: name, version, entry points, manifest."""

from __future__ import annotations

import configparser
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from installer.sources import WheelFile as InstallerWheel
from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from vox_host.errors import IntegrityError, PluginError
from vox_host.manifest import FILE_NAME, Manifest, differences_from_embedded, parse_manifest

__all__ = ["InspectedWheel", "inspect_wheel"]

GROUP = "vox_host.backends"
_MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class InspectedWheel:
    """A wheel that may be placed."""

    path: Path
    name: str
    version: str
    manifest: Manifest
    manifest_name: str
    """Where Plugin.toml lies in the wheel, and under site-packages after installation."""


def inspect_wheel(path: Path, *, released: Manifest | None = None) -> InspectedWheel:
    """Check a wheel's structure, record, tags, names and manifest.

    Raises:
        PluginError: it is not a plugin's wheel for this interpreter; every reason is named.
        IntegrityError: its contents are not what its own RECORD says.
    """
    try:
        with InstallerWheel.open(path) as wheel:
            try:
                wheel.validate_record(validate_contents=True)
            except ValueError as error:
                # installer's exception is not exported; it lists every file that differs.
                issues = getattr(error, "issues", [str(error)])
                raise IntegrityError(
                    "wheel-record-mismatch",
                    f"{path.name} does not hold what its RECORD says; nothing was installed",
                    facts=[("file", str(path)), ("problems", "\n".join(map(str, issues[:10])))],
                    remedy="Build or download the wheel again.",
                ) from None
            metadata = HeaderParser().parsestr(wheel.read_dist_info("METADATA"))
            entry_points = _entry_points(wheel)
        with zipfile.ZipFile(path) as archive:
            name = _manifest_name(archive, path)
            data = archive.read(name)
    except (OSError, zipfile.BadZipFile, InvalidWheelFilename, ValueError, KeyError, AssertionError) as error:
        raise PluginError(
            "wheel-unreadable",
            f"{path} is not a readable wheel; nothing was installed",
            facts=[("reason", f"{type(error).__name__}: {error}")],
            remedy="Build or download the wheel again.",
        ) from None
    distribution = canonicalize_name(metadata["Name"] or "")
    version = str(metadata["Version"] or "")
    manifest = parse_manifest(
        data,
        source=f"{path}!{name}",
        expected_id=distribution,
        expected_version=version,
        entry_points=entry_points,
    )
    if released is not None:
        different = differences_from_embedded(released, manifest)
        if different:
            raise PluginError(
                "manifest-differs",
                f"the released manifest is not the one in {path.name}; nothing was installed",
                facts=different,
                remedy="A released manifest equals the wheel's plus [artifacts]; get the release again.",
            )
    _check_tags(path)
    return InspectedWheel(path, distribution, version, manifest, name)


def _manifest_name(archive: zipfile.ZipFile, path: Path) -> str:
    names = [
        info
        for info in archive.infolist()
        if info.filename.rpartition("/")[2] == FILE_NAME and ".dist-info/" not in info.filename
    ]
    if len(names) != 1:
        found = ", ".join(info.filename for info in names) or "none"
        raise PluginError(
            "manifest-missing" if not names else "manifest-twice",
            f"{path.name} must hold exactly one {FILE_NAME}; found {found}; nothing was installed",
            facts=[("file", str(path))],
            remedy=f"Ship {FILE_NAME} inside the package, as package data.",
        )
    if names[0].file_size > _MAX_TEXT_BYTES:
        raise PluginError(
            "manifest-invalid",
            f"{FILE_NAME} in {path.name} is {names[0].file_size} bytes; nothing was installed",
            facts=[("most", f"{_MAX_TEXT_BYTES} bytes")],
            remedy=f"Ship a {FILE_NAME} that says what docs/writing-a-plugin.md asks for, and no more.",
        )
    if ".data/" in names[0].filename:
        raise PluginError(
            "manifest-missing",
            f"{names[0].filename} in {path.name} is not inside an importable package; nothing was installed",
            remedy=f"Ship {FILE_NAME} inside the package, as package data.",
        )
    return names[0].filename


def _entry_points(wheel: InstallerWheel) -> tuple[str, ...]:
    if "entry_points.txt" not in wheel.dist_info_filenames:
        return ()
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(wheel.read_dist_info("entry_points.txt"))
    return tuple(parser[GROUP]) if parser.has_section(GROUP) else ()


def _check_tags(path: Path) -> None:
    tags = parse_wheel_filename(path.name)[3]
    supported = set(sys_tags())
    if not tags & supported:
        raise PluginError(
            "wheel-for-another-platform",
            f"{path.name} does not fit this machine and Python; nothing was installed",
            facts=[
                ("made for", ", ".join(sorted(map(str, tags)))),
                ("this machine takes", f"{next(iter(sys_tags()))} and the like"),
            ],
            remedy="Get the wheel for this platform, or install from source.",
        )
