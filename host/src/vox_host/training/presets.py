"""Presets: named sets of training options, read from manifests/presets.toml.

A preset fills in what the command line left open and nothing else. `auto` takes the first preset
made for the kind of device that the chosen plugin runs on, so that no machine gets another
vendor's; a name that isn't there is an error, never a default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from vox_host.errors import PluginError, UsageError
from vox_host.float32_range import HELD, is_held

__all__ = ["AUTO", "Preset", "PresetName", "Vendor", "choose_preset", "load_presets", "presets_path"]

AUTO = "auto"
PresetName = str
Vendor = Literal["cpu", "nvidia", "apple"]


def _check_held(value: float) -> float:
    if not is_held(value):
        raise ValueError(f"found {value:g}; wanted {HELD}")
    return value


Held = Annotated[float, AfterValidator(_check_held)]
"""A number that goes to the worker as float32."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Preset(_Strict):
    """One named set. Numbers count optimizer steps, rows of data or tokens, as said."""

    summary: str = Field(min_length=1)
    vendors: list[Vendor] = Field(min_length=1)
    """The kinds of device it is made for."""
    is_automatic: bool = True
    """False: `auto` never takes it."""
    floor_mb: int = Field(ge=0)
    """Memory (10^6 bytes) that must be free for `auto` to take it."""
    rank: int = Field(ge=1, le=4096)
    alpha: Held = Field(gt=0, allow_inf_nan=False)
    targets: list[str] = Field(min_length=1)
    dropout: float = Field(default=0.0, ge=0, le=0.999)
    learning_rate: Held = Field(gt=0, allow_inf_nan=False)
    """The peak."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_share: float = Field(default=0.0, ge=0, lt=1)
    """Of all steps."""
    weight_decay: Held = Field(default=0.0, ge=0, allow_inf_nan=False)
    max_gradient_norm: Held | None = Field(default=1.0, gt=0, allow_inf_nan=False)
    batch_size: int = Field(ge=1, le=1 << 16)
    """Examples of one optimizer step."""
    max_length: int = Field(ge=2)
    """Tokens of the longest example."""
    evaluations: int = Field(default=10, ge=1)
    """Over a run, and as many checkpoints, where nobody chose how often."""
    most_held_out: int | None = Field(default=None, ge=0)
    """Rows at most that are held out where nobody chose how many; None: as many as for any preset."""
    steps: int | None = Field(default=None, ge=1)
    epochs: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Preset:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give steps or epochs, one of them")
        return self


class _File(_Strict):
    schema_version: Literal[1] = Field(alias="schema")
    presets: dict[PresetName, Preset] = Field(min_length=1)


def presets_path() -> Path:
    """Return where the file is: inside the installed package, or at the top of a clone."""
    packaged = Path(__file__).parents[1] / "manifests" / "presets.toml"
    return packaged if packaged.is_file() else Path(__file__).parents[4] / "manifests" / "presets.toml"


def load_presets(path: Path | None = None) -> Mapping[PresetName, Preset]:
    """Return the presets of the file, in its order.

    Raises:
        PluginError: it can't be read, or something in it is not right; all problems are named.
    """
    file = presets_path() if path is None else path
    remedy = "Put back the file that came with vox-host: install it again, or check it out of the repository."
    try:
        read = _File.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise PluginError(
            "presets-invalid", f"{file} can't be read: {error}; nothing was started", remedy=remedy
        ) from None
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        raise PluginError(
            "presets-invalid",
            f"{file} is not a file of presets; nothing was started",
            facts=problems,
            remedy=remedy,
        ) from None
    if AUTO in read.presets:
        raise PluginError(
            "presets-invalid",
            f"{file} names a preset {AUTO!r}, which is not a preset's name; nothing was started",
            remedy=remedy,
        )
    return read.presets


def choose_preset(
    name: str, presets: Mapping[PresetName, Preset], *, vendor: Vendor, budget_bytes: int | None
) -> PresetName:
    """Return the name of the preset to use.

    Args:
        vendor: of the device that the chosen plugin runs on.
        budget_bytes: memory that may be planned with there; None: not known, so no floor is held against it.

    Raises:
        UsageError: there is none of that name, or for `auto` none that fits.
    """
    if name != AUTO:
        if name not in presets:
            near = difflib.get_close_matches(name, [*presets, AUTO], n=1)
            hint = f" (there is {near[0]!r})" if near else ""
            raise UsageError(
                "preset-unknown",
                f"no preset is called {name!r}{hint}; nothing was started",
                facts=[("presets", [*presets, AUTO])],
                remedy="Name one of those, or leave --preset out.",
            )
        return name
    ours = {
        key: preset for key, preset in presets.items() if preset.is_automatic and vendor in preset.vendors
    }
    for key, preset in ours.items():
        if budget_bytes is None or preset.floor_mb * 1_000_000 <= budget_bytes:
            return key
    raise UsageError(
        "preset-none-fits",
        f"no preset made for {vendor} fits the {(budget_bytes or 0) / 1e6:.0f} MB that are free here; "
        "nothing was started",
        facts=[(key, f"needs {preset.floor_mb} MB") for key, preset in ours.items()],
        remedy="Free some memory, or name a preset yourself: an explicit choice is never changed.",
    )
