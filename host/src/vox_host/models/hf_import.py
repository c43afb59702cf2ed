"""Import a Hugging Face folder: safetensors, sharded or not, copied as they are.

The folder is read strictly first (headers, index, config.json, tokenizer.json); then its files
are copied, never linked: a model of the store doesn't change when the folder does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.family_check import check_family
from vox_host.models.model_manifest import LICENSE_FOLDER, MERGED_FROM, model_digest, read_merged_from
from vox_host.models.safetensors_write import Progress, copy_hashed
from vox_host.models.source import Contents, License, as_model_error
from vox_host.models.token_ids import check_token_ids
from vox_host.models.tokenizer import Tokenizer
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError, read_json_object
from vox_plugin_api.families import stored_tensors, text_model_type

__all__ = ["HuggingFaceSource"]

_REQUIRED = ("config.json", "tokenizer.json")
_OPTIONAL = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    MERGED_FROM,
    "quant-metadata.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_INDEX = "model.safetensors.index.json"
_TERMS = re.compile(r"(.*[._-])?(licen[cs]e|notice|terms|use_policy)([._-].*)?", re.IGNORECASE)
_FRONT_MATTER_LICENSE = re.compile(r"^license(?:_name)?:[ \t]*['\"]?([A-Za-z0-9._+-]{1,80})", re.MULTILINE)
_FRONT_MATTER_LINK = re.compile(r"^license_link:[ \t]*['\"]?(https?://[^\s'\"]{1,200})", re.MULTILINE)


class HuggingFaceSource:
    """A folder in Hugging Face's layout."""

    def __init__(self, path: Path) -> None:
        """Read and check the folder `path`: everything but the weights themselves.

        Raises:
            ModelError: a file is missing, malformed, or of a kind that isn't read.
        """
        self.path = path
        self.called = path.resolve().name
        """What the record of the import calls it."""
        try:
            checkpoint = Checkpoint.open(path)
            config, config_source = _config(path), str(path / "config.json")
            self.architecture = text_model_type(config, source=config_source)
            self.notes = check_family(
                config, stored_tensors(checkpoint), config_source=config_source, weights_source=str(path)
            )
            generation = path / "generation_config.json"
            check_token_ids(
                config,
                read_json_object(generation, code="config-invalid") if generation.is_file() else {},
                config_source=config_source,
                generation_source=str(generation),
            )
        except CheckpointError as error:
            raise as_model_error(error) from None
        _check_tokenizer(path)
        self.merged_from = read_merged_from(path)
        self.files = _files(path, checkpoint)
        self.default_name = re.sub(r"[^a-z0-9._-]+", "-", path.resolve().name.lower()).strip("-._") or "model"
        self.license = _license(path)
        self._digests: dict[str, str] | None = None

    def needed_bytes(self) -> int:
        """Return the size of the files to be copied."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self, progress: Progress) -> dict[str, Any]:
        """Return the folder's name and the digest over its files; reads them unless `write` just did."""
        digests = self._digests or self._copy(None, progress)
        return {"kind": "huggingface", "file": self.called, "sha256": model_digest(digests)}

    def write(self, target: Path, scratch: Path, progress: Progress) -> Contents:
        """Copy the files into `target`."""
        self._digests = self._copy(target, progress)
        return Contents(self.architecture, self._digests, self.merged_from)

    def _copy(self, target: Path | None, progress: Progress) -> dict[str, str]:
        total = self.needed_bytes()
        step = "checking" if target is None else "copying"
        digests: dict[str, str] = {}
        done = 0
        for file in self.files:
            name = LICENSE_FOLDER + file.name if _TERMS.fullmatch(file.name) else file.name
            copy = None
            if target is not None:
                copy = target / name
                copy.parent.mkdir(exist_ok=True)
            digests[name] = copy_hashed(file, copy, step=step, progress=progress, done=done, total=total)
            done += file.stat().st_size
        return digests


def _config(path: Path) -> dict[str, Any]:
    source = path / "config.json"
    # A pipe or a device is there all the same: reading it says what it is.
    if not source.exists():
        raise CheckpointError(
            "config-missing",
            f"{source} does not exist: a model's constants are in it",
            remedy="Name the folder that holds it, with the weights and the tokenizer.",
        )
    return read_json_object(source, code="config-invalid")


def _check_tokenizer(path: Path) -> None:
    """Read the tokenizer's files once as a server would."""
    if not (path / "tokenizer.json").is_file():
        raise _no_tokenizer(path)
    try:
        Tokenizer.load(path)
    except ModelError as error:
        raise ModelError(
            error.code,
            f"{error.message}; nothing was imported",
            facts=error.facts,
            remedy="Fetch the tokenizer's files again from where the model came from.",
        ) from None


def _no_tokenizer(path: Path) -> ModelError:
    others = [n for n in ("tokenizer.model", "vocab.json", "merges.txt") if (path / n).exists()]
    return ModelError(
        "tokenizer-missing",
        f"{path} holds no tokenizer.json; nothing was imported",
        facts=[("found instead", others)] if others else [],
        remedy="Fetch it too; or let transformers load the tokenizer and save it, which writes one.",
    )


def _files(path: Path, checkpoint: Checkpoint) -> list[Path]:
    names = [*_REQUIRED, *(name for name in _OPTIONAL if (path / name).is_file())]
    weights = [file.name for file in checkpoint.files]
    if weights != ["model.safetensors"]:
        names.append(_INDEX)
    terms = [p.name for p in path.iterdir() if p.is_file() and _TERMS.fullmatch(p.name)]
    return [path / name for name in dict.fromkeys([*names, *sorted(terms), *weights])]


def _license(path: Path) -> License:
    readme = path / "README.md"
    if readme.is_file():
        with readme.open("rb") as file:
            text = file.read(64 * 1024).decode("utf-8", "replace")
        if text.startswith("---"):
            front_matter = text[3:].split("\n---", 1)[0]
            names = _FRONT_MATTER_LICENSE.findall(front_matter)
            if names:
                # license_name says more than "other", and comes after it.
                link = _FRONT_MATTER_LINK.search(front_matter)
                return License(names[-1], link[1] if link else f"stated in {readme}")
    terms = sorted(p.name for p in path.iterdir() if p.is_file() and _TERMS.fullmatch(p.name))
    if terms:
        return License("unknown", f"read {path / terms[0]}")
    return License("unknown", "the folder states no licence; look where you got it")
