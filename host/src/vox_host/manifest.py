"""Plugin.toml, version 1: typed, strict, and every problem at once.

Pure but for `load_manifest`. A manifest says what a plugin is, what it can do and what it
needs; the copy inside a wheel has no `[artifacts]`, the released one beside the artifacts
equals it plus `[artifacts]`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import tomli
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from vox_host.errors import PluginError
from vox_host.requirements import parse_requirement
from vox_plugin_api.messages import Capability, Numerics

__all__ = [
    "FILE_NAME",
    "Artifact",
    "BackendSection",
    "Manifest",
    "PluginSection",
    "RequiresSection",
    "differences_from_embedded",
    "find_source_manifest",
    "load_manifest",
    "parse_manifest",
]

FILE_NAME = "Plugin.toml"
# A manifest is a page of text; a bigger file under that name is something else.
_MAX_BYTES = 256 * 1024


def _check_id(value: object) -> object:
    if isinstance(value, str) and (not value or canonicalize_name(value) != value):
        raise ValueError(
            f"{value!r} is not a normalised distribution name; write {canonicalize_name(value) or 'a name'!r}"
        )
    return value


def _check_version(value: object) -> object:
    if isinstance(value, str):
        try:
            Version(value)
        except InvalidVersion:
            raise ValueError(f"{value!r} is not a version (PEP 440)") from None
    return value


def _check_protocol(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError(
            f'expected a version specifier in quotes like ">=1,<2", found {type(value).__name__} {value!r}'
        )
    try:
        specifiers = SpecifierSet(value)
    except InvalidSpecifier:
        raise ValueError(f'{value!r} is not a version specifier; write one like ">=1,<2"') from None
    if not len(specifiers):
        raise ValueError('it is empty and would accept any protocol; write one like ">=1,<2"')
    return value


def _check_device(value: object) -> object:
    if isinstance(value, str):
        parse_requirement(value)
    return value


def _check_sha256(value: object) -> object:
    if not isinstance(value, str):
        return value
    if not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise ValueError(f"a sha256 is 64 hex digits; found {len(value)} characters: {value!r}")
    return value.lower()


def _check_file(value: object) -> object:
    if not isinstance(value, str):
        return value
    path = PurePosixPath(value)
    if not value or value.endswith("/"):
        raise ValueError(f"{value!r} does not name a file")
    if "\\" in value or "\0" in value:
        raise ValueError(f"{value!r} holds a backslash or NUL; write the path with '/'")
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", value):
        raise ValueError(f"{value!r} leads outside the folder of {FILE_NAME}; artifacts stay inside it")
    return value


def _unique(value: object) -> object:
    if isinstance(value, list):
        repeated = sorted({str(item) for item in value if value.count(item) > 1})
        if repeated:
            raise ValueError(f"named more than once: {', '.join(repeated)}")
    return value


_Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PluginSection(_Section):
    """Who the plugin is."""

    id: Annotated[str, BeforeValidator(_check_id)] = Field(
        description="The plugin's name; equals the distribution's and the entry point's."
    )
    version: Annotated[str, BeforeValidator(_check_version)] = Field(
        description="The plugin's version; equals the distribution's."
    )
    protocol: Annotated[str, BeforeValidator(_check_protocol)] = Field(
        description='The worker protocols it speaks, as a version specifier: ">=1,<2".'
    )
    summary: str = Field(min_length=1, max_length=200, description="One line for lists.")


class BackendSection(_Section):
    """What it can do."""

    lane: _Word = Field(description="cpu, cuda, metal, or a new word for another kind of machine.")
    priority: int | None = Field(
        default=None,
        ge=-1000,
        le=1000,
        description="Among plugins that fit, the highest is taken; absent: 0 in the cpu lane, 50 elsewhere.",
    )
    numerics: Annotated[list[Numerics], BeforeValidator(_unique), Field(min_length=1)] = Field(
        description='"canonical": the bits of docs/numerics.md; "fast": its own.'
    )
    capabilities: Annotated[list[Capability], BeforeValidator(_unique), Field(min_length=1)] = Field(
        description="What a request may ask of it; anything else is refused before it starts."
    )
    execution: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Where its kernels run, if not on the device that its lane names (a test): shown "
        "wherever the lane is.",
    )


class RequiresSection(_Section):
    """What it needs of the machine."""

    os: Annotated[list[Literal["linux", "macos", "windows"]], BeforeValidator(_unique)] = Field(
        min_length=1, description="Operating systems it runs on."
    )
    arch: Annotated[list[Literal["x86_64", "aarch64"]], BeforeValidator(_unique)] | None = Field(
        default=None, min_length=1, description="Processor architectures; absent: any."
    )
    devices: Annotated[list[Annotated[str, BeforeValidator(_check_device)]], BeforeValidator(_unique)] = (
        Field(
            default=[],
            description='Requirements like "nvidia :: compute_capability >= 8.0"; one device must meet all.',
        )
    )


class Artifact(_Section):
    """One platform's file in a released manifest."""

    file: Annotated[str, BeforeValidator(_check_file)] = Field(
        description="Path relative to Plugin.toml, inside its folder: a wheel or a native library."
    )
    sha256: Annotated[str, BeforeValidator(_check_sha256)] = Field(
        description="The file's SHA-256, 64 hex digits."
    )
    size: int = Field(gt=0, description="The file's size in bytes.")


_Platform = Annotated[str, Field(pattern=r"^[a-z0-9]+-[a-z0-9_]+$")]


class Manifest(_Section):
    """A whole Plugin.toml."""

    schema_version: Literal[1] = Field(alias="schema", description="The version of this format.")
    plugin: PluginSection
    backend: BackendSection
    requires: RequiresSection
    artifacts: dict[_Platform, Artifact] = Field(
        default={}, description="Only in a released manifest: the artifact per platform, like linux-x86_64."
    )

    @property
    def priority(self) -> int:
        """The declared priority, else the lane's: `auto` prefers an accelerator that says nothing.

        What only plays one comes last, whatever it declares.
        """
        if self.backend.execution is not None:
            return -1000
        if self.backend.priority is not None:
            return self.backend.priority
        return 0 if self.backend.lane == "cpu" else 50

    def accepts_protocol(self, version: int) -> bool:
        """Say whether the plugin speaks protocol `version`."""
        return SpecifierSet(self.plugin.protocol).contains(str(version), prereleases=True)


def parse_manifest(
    data: bytes,
    *,
    source: str,
    expected_id: str | None = None,
    expected_version: str | None = None,
    entry_points: tuple[str, ...] | None = None,
) -> Manifest:
    """Return the manifest in `data`; `source` is its path for messages.

    The expected values are the distribution's name and version, and the names it registers
    in the entry point group, where they are known.

    Raises:
        PluginError: it is not a valid manifest; one fact per problem, keyed by its dotted path.
    """
    if len(data) > _MAX_BYTES:
        raise _invalid(source, [("(file)", f"{len(data)} bytes is too long for a manifest")])
    try:
        document = tomli.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _invalid(source, [("(file)", f"not UTF-8 at byte {error.start}")]) from None
    except (tomli.TOMLDecodeError, RecursionError) as error:
        raise _invalid(source, [("(file)", f"not TOML: {error}")]) from None
    problems = _names_that_differ(document, expected_id, expected_version, entry_points)
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        problems = [_describe(item) for item in error.errors()] + problems
        raise _invalid(source, problems) from None
    if problems:
        raise _invalid(source, problems)
    return manifest


def load_manifest(path: Path, **expected: Any) -> tuple[Manifest, str]:
    """Read the manifest at `path`; return it with the SHA-256 of its bytes.

    Raises:
        PluginError: it can't be read or is not valid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise PluginError(
            "manifest-unreadable",
            f"{path} can't be read: {error.strerror or error}",
            facts=[("path", str(path))],
            remedy="Allow this user to read it, or name a folder that has one.",
        ) from None
    return parse_manifest(data, source=str(path), **expected), hashlib.sha256(data).hexdigest()


# Not the package's own: environments, build results, tests.
_NOT_SOURCE = {"build", "dist", "node_modules", "site-packages", "test", "tests", "venv"}


def find_source_manifest(folder: Path) -> Path:
    """Return the one Plugin.toml among a source folder's packages.

    Raises:
        PluginError: there is none, or more than one.
    """
    found: list[Path] = []
    pending = [folder]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.name == FILE_NAME and path.is_file():
                found.append(path)
            elif (
                path.is_dir()
                and not path.is_symlink()
                and path.name[0] != "."
                and path.name not in _NOT_SOURCE
            ):
                pending.append(path)
    if len(found) == 1:
        return found[0]
    names = ", ".join(sorted(str(path.relative_to(folder)) for path in found)) or "none"
    raise PluginError(
        "manifest-missing" if not found else "manifest-twice",
        f"the sources in {folder} must hold exactly one {FILE_NAME}; found {names}",
        facts=[("path", str(folder))],
        remedy=f"Put {FILE_NAME} inside the package, as package data.",
    )


def differences_from_embedded(released: Manifest, embedded: Manifest) -> list[tuple[str, str]]:
    """Compare a released manifest with the copy in its wheel: equal but for `[artifacts]`.

    Return one line per differing dotted path.
    """
    left = _flatten(released.model_dump(by_alias=True, exclude={"artifacts"}))
    right = _flatten(embedded.model_dump(by_alias=True, exclude={"artifacts"}))
    return [
        (path, f"released {left.get(path)!r}, in the wheel {right.get(path)!r}")
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flatten(item, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def _names_that_differ(
    document: dict[str, Any],
    expected_id: str | None,
    expected_version: str | None,
    entry_points: tuple[str, ...] | None,
) -> list[tuple[str, str]]:
    section = document.get("plugin")
    if not isinstance(section, dict):
        return []
    problems = []
    found_id, found_version = section.get("id"), section.get("version")
    if isinstance(found_id, str):
        if expected_id is not None and found_id != expected_id:
            problems.append(("plugin.id", f"is {found_id!r}, but the distribution is {expected_id!r}"))
        if entry_points is not None and found_id not in entry_points:
            named = ", ".join(map(repr, entry_points)) or "nothing"
            problems.append(
                ("plugin.id", f"is {found_id!r}, but the entry point group vox_host.backends names {named}")
            )
    if isinstance(found_version, str) and expected_version is not None and found_version != expected_version:
        problems.append(
            ("plugin.version", f"is {found_version!r}, but the distribution is version {expected_version!r}")
        )
    return problems


def _describe(item: Any) -> tuple[str, str]:
    path = _dotted(item["loc"])
    kind, found = item["type"], item.get("input")
    if kind == "missing":
        return path, "is missing"
    if kind == "extra_forbidden":
        return path, "is not a known key"
    message = str(item["msg"]).removeprefix("Value error, ")
    if kind == "value_error":
        return path, message
    return path, f"{message[0].lower()}{message[1:]}; found {type(found).__name__} {found!r:.80}"


def _dotted(location: tuple[Any, ...]) -> str:
    text = ""
    for part in location:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "(file)"


def _invalid(source: str, problems: list[tuple[str, str]]) -> PluginError:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return PluginError(
        "manifest-invalid",
        f"invalid manifest {source}: {count}; the plugin was not loaded",
        facts=problems,
        remedy="docs/writing-a-plugin.md lists every key of Plugin.toml.",
    )
