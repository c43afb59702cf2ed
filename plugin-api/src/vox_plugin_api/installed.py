"""Find the plugin a worker was started for, and read its Plugin.toml, without importing it.

The manifest comes from the files of the entry point's distribution, as the host's discovery
reads it; asking the import system for a file's place would already run the plugin's code.
The host checks a manifest fully. Here only that is read which the handshake must agree with.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendError, BackendInfo

__all__ = ["ENTRY_POINT_GROUP", "InstalledPlugin", "describe_range", "find_plugin", "parse_protocol_range"]

ENTRY_POINT_GROUP = "vox_host.backends"
_MANIFEST_NAME = "Plugin.toml"
_BOUND = re.compile(r"\s*(>=|<=|==|>|<)\s*(\d+)\s*")
_NO_UPPER_BOUND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPlugin:
    """One plugin as its distribution describes it; none of its code has run."""

    plugin_id: str
    distribution: str
    version: str
    entry_point: metadata.EntryPoint
    manifest_path: Path
    manifest_digest: str
    protocol: m.ProtocolRange
    lane: str
    numerics: tuple[str, ...]
    capabilities: tuple[str, ...]
    execution: str

    def differences(self, info: BackendInfo) -> list[str]:
        """Return one line per fact in which the running backend and its manifest disagree."""
        pairs = [
            ("plugin.id", self.plugin_id, info.plugin_id),
            ("plugin.version", self.version, info.plugin_version),
            ("backend.lane", self.lane, info.lane),
            ("backend.numerics", sorted(self.numerics), sorted(info.numerics)),
            ("backend.capabilities", sorted(self.capabilities), sorted(info.capabilities)),
            ("backend.execution", self.execution, info.execution),
        ]
        return [
            f"{name}: the manifest says {stated!r}, the backend {found!r}"
            for name, stated, found in pairs
            if stated != found
        ]


def find_plugin(plugin_id: str) -> InstalledPlugin:
    """Return the installed plugin `plugin_id`.

    Raises:
        BackendError: there is none or more than one, or its manifest is missing or malformed.
    """
    entry_point = _find_entry_point(plugin_id)
    distribution = entry_point.dist
    if distribution is None:
        raise BackendError("plugin-not-found", f"entry point {plugin_id!r} belongs to no distribution")
    path = _find_manifest(distribution, plugin_id)
    content = path.read_bytes()
    manifest = _Manifest(path, plugin_id, content)
    manifest.must_equal("plugin", "version", distribution.version, "the distribution's version")
    return InstalledPlugin(
        plugin_id=manifest.text("plugin", "id"),
        distribution=distribution.name,
        version=manifest.text("plugin", "version"),
        entry_point=entry_point,
        manifest_path=path,
        manifest_digest=hashlib.sha256(content).hexdigest(),
        protocol=manifest.protocol(),
        lane=manifest.text("backend", "lane"),
        numerics=manifest.words("backend", "numerics"),
        capabilities=manifest.words("backend", "capabilities"),
        execution=manifest.text("backend", "execution") if manifest.has("backend", "execution") else "",
    )


def parse_protocol_range(specifier: str) -> m.ProtocolRange:
    """Return the whole numbers that a specifier such as `>=1,<2` allows.

    Raises:
        ValueError: it is not a list of bounds (`>=`, `>`, `<=`, `<`, `==`) on whole numbers, or
            allows none.
    """
    low, high = 0, _NO_UPPER_BOUND
    for part in specifier.split(","):
        match = _BOUND.fullmatch(part)
        if match is None:
            raise ValueError(f"expected bounds such as '>=1,<2', found {specifier!r}")
        operator, number = match[1], int(match[2])
        if operator in (">=", ">", "=="):
            low = max(low, number + (operator == ">"))
        if operator in ("<=", "<", "=="):
            high = min(high, number - (operator == "<"))
    if low > high:
        raise ValueError(f"{specifier!r} allows no version at all")
    return m.ProtocolRange(min=low, max=high)


def describe_range(protocol: m.ProtocolRange) -> str:
    """Return a range as a person reads it."""
    if protocol.max == _NO_UPPER_BOUND:
        return f"{protocol.min} or newer"
    return f"{protocol.min}" if protocol.min == protocol.max else f"{protocol.min} to {protocol.max}"


def _find_entry_point(plugin_id: str) -> metadata.EntryPoint:
    found = list(metadata.entry_points(group=ENTRY_POINT_GROUP, name=plugin_id))
    if len(found) == 1:
        return found[0]
    others = sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)})
    raise BackendError(
        "plugin-not-found",
        f"{len(found)} distributions here have the entry point {plugin_id!r}; exactly one is needed",
        facts={
            "group": ENTRY_POINT_GROUP,
            "distributions": sorted(e.dist.name for e in found if e.dist is not None),
            "plugins": others,
        },
    )


def _find_manifest(distribution: metadata.Distribution, plugin_id: str) -> Path:
    files = [file for file in distribution.files or [] if file.name == _MANIFEST_NAME]
    if len(files) != 1:
        raise BackendError(
            "invalid-manifest",
            f"distribution {distribution.name} {distribution.version} of plugin {plugin_id!r} "
            f"has {len(files)} files {_MANIFEST_NAME}; exactly one is needed",
            facts={"found": [str(file) for file in files]},
        )
    path = Path(str(files[0].locate()))
    if not path.is_file():
        raise BackendError(
            "invalid-manifest",
            f"{_MANIFEST_NAME} of plugin {plugin_id!r} is recorded as installed and missing",
            facts={"path": str(path)},
        )
    return path


class _Manifest:
    def __init__(self, path: Path, plugin_id: str, content: bytes) -> None:
        self._path = path
        self._plugin_id = plugin_id
        try:
            self._data: dict[str, Any] = tomllib.loads(content.decode("utf-8"))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise self._invalid(f"is no TOML: {error}") from None

    def text(self, table: str, key: str) -> str:
        value = self._value(table, key)
        if not isinstance(value, str):
            raise self._invalid(f"{table}.{key} must be text, found {value!r}")
        return value

    def has(self, table: str, key: str) -> bool:
        section = self._data.get(table)
        return isinstance(section, dict) and key in section

    def words(self, table: str, key: str) -> tuple[str, ...]:
        value = self._value(table, key)
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self._invalid(f"{table}.{key} must be a list of words, found {value!r}")
        return tuple(value)

    def must_equal(self, table: str, key: str, expected: str, meaning: str) -> None:
        if (found := self.text(table, key)) != expected:
            raise self._invalid(f"{table}.{key} must be {expected!r}, {meaning}, found {found!r}")

    def protocol(self) -> m.ProtocolRange:
        try:
            return parse_protocol_range(self.text("plugin", "protocol"))
        except ValueError as error:
            raise self._invalid(f"plugin.protocol: {error}") from None

    def _value(self, table: str, key: str) -> Any:
        if not self.has(table, key):
            raise self._invalid(f"has no {table}.{key}")
        return self._data[table][key]

    def _invalid(self, problem: str) -> BackendError:
        return BackendError(
            "invalid-manifest",
            f"invalid manifest of plugin {self._plugin_id!r}: {self._path} {problem}",
            facts={"plugin": self._plugin_id, "manifest": str(self._path)},
        )
