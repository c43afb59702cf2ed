"""What `--model` names: a model of the store, or a run or adapter folder and the model it lies on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vox_host.app.adapter_fit import check_fit
from vox_host.errors import IntegrityError, ModelError, UsageError, VoxError
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.quoted import quoted
from vox_host.runs.open import is_adapter_folder, open_adapter
from vox_host.runs.source import AdapterSource

__all__ = ["NamedModel", "find_named_model", "find_stored_model"]

_TRIES = 5


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of the store, with an adapter or as it is."""

    base: InstalledModel
    adapter: AdapterSource | None = None

    @property
    def name(self) -> str:
        """What it is served as: the adapter folder's name, else the model's."""
        return self.base.name if self.adapter is None else self.adapter.name


def find_named_model(catalogue: Catalogue, text: str, *, base: str | None = None) -> NamedModel:
    """Return what `text` names.

    A name of the store comes before a folder of that name, which can be named as `./NAME`.

    Args:
        base: the store's name of the model that an adapter lies on; None: what the adapter says.

    Raises:
        UsageError: there is nothing of that name, or its base can't be told.
        ModelError, IntegrityError: what is there is not whole, or not what was recorded; the base
            is another model than the adapter was trained on, or has no place for one of its tensors.
    """
    path = Path(text)
    if (catalogue.models_dir / text).is_dir() and path.name == text:
        if base is not None:
            raise UsageError(
                "usage",
                f"--base {base}: {text!r} is a model of the store, not an adapter; nothing was started",
                remedy=f"Leave --base out, or name the adapter's folder as ./{text}.",
            )
        return NamedModel(catalogue.find(text))
    if path.is_dir() or path.name != text:
        if path.is_dir() and not is_adapter_folder(path) and (path / "config.json").exists():
            raise UsageError(
                "model-not-imported",
                f"{path} holds a model, no adapter; nothing was started",
                remedy=f"`vox-host model import {quoted(path)}`, then serve it by its name.",
            )
        return _with_its_base(catalogue, path, base)
    return NamedModel(catalogue.find(text))


def _with_its_base(catalogue: Catalogue, path: Path, base: str | None) -> NamedModel:
    """Return the adapter in a folder and the model it lies on; a publish meanwhile is followed."""
    for _ in range(_TRIES):
        source = open_adapter(path)
        model = _base_of(catalogue, source, base)
        try:
            check_fit(source, model)
        except VoxError:
            latest = open_adapter(path)
            if (latest.file, latest.sha256) == (source.file, source.sha256):
                raise
            continue
        return NamedModel(model, source)
    raise ModelError(
        "run-busy",
        f"the adapter of {path} changed each of the {_TRIES} times that it was read; nothing was started",
        remedy="Try again.",
    )


def find_stored_model(catalogue: Catalogue, text: str, *, what: str) -> InstalledModel:
    """Return the model of the store that `text` names, for what takes no adapter.

    Args:
        what: is done with a model alone, as in "training on an adapter is not offered".

    Raises:
        UsageError: there is none of that name; a run or an adapter is told from a name that can't be.
    """
    path = Path(text)
    is_stored = path.name == text and (catalogue.models_dir / text).is_dir()
    if not is_stored and is_adapter_folder(path):
        raise UsageError(
            "adapter-not-taken",
            f"--model {text}: {what} an adapter is not offered; nothing was started",
            facts=[
                ("expected", "a model of the store, by name"),
                ("found", "an adapter's folder"),
            ],
            remedy=f"Name its base model, or fold it in first: "
            f"`vox-host merge {quoted(text)} --name NAME`, then --model NAME.",
        )
    return catalogue.find(text)


def _base_of(catalogue: Catalogue, source: AdapterSource, named: str | None) -> InstalledModel:
    if named is not None:
        return _checked(catalogue.find(named), source)
    models = [entry for entry in catalogue.list() if isinstance(entry, InstalledModel)]
    same = [model for model in models if model.digest == source.base_digest]
    if same:
        return next((model for model in same if model.name == source.base_name), same[0])
    name = source.base_name or ""
    # A hub's name or a path ends with what the store is likely to call it.
    for candidate in (name, name.rstrip("/").rpartition("/")[2].lower()):
        if candidate and any(entry.name == candidate for entry in catalogue.list()):
            return _checked(catalogue.find(candidate), source)
    if source.base_digest is not None:
        expected = f"{name or 'a model'}, sha256:{source.base_digest}"
        raise UsageError(
            "adapter-base-missing",
            f"the base model of {source.folder} is not in the store; nothing was started",
            facts=[("expected", expected), ("models", [model.name for model in models])],
            remedy="Import it as it was when the adapter was trained: `vox-host model import SOURCE`.",
        )
    raise UsageError(
        "adapter-base-unknown",
        f"which model {source.folder} lies on can't be told; nothing was started",
        facts=[("it says", source.base_name or "nothing"), ("models", [model.name for model in models])],
        remedy="Name the model with --base NAME.",
    )


def _checked(model: InstalledModel, source: AdapterSource) -> InstalledModel:
    if source.base_digest is not None and source.base_digest != model.digest:
        raise IntegrityError(
            "adapter-base",
            f"{source.folder} was trained on another model than {model.name!r}; nothing was started",
            facts=[
                ("base model", source.base_name),
                ("expected", f"sha256:{source.base_digest}"),
                ("found", f"sha256:{model.digest}"),
            ],
            remedy="Import the model that it was trained on, or train an adapter of this one.",
        )
    return model
