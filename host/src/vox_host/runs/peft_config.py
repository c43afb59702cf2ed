"""Read PEFT's adapter_config.json, strictly.

A field that changes what the adapter computes is honoured or refused with the value found; one
that changes nothing is passed over only if it is known here; any other is refused, since nobody
can tell what it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vox_host.errors import ModelError
from vox_host.float32_range import HELD, is_held
from vox_plugin_api.strict_json import CheckpointError, read_json_object

__all__ = ["PeftConfig", "read_peft_config"]

_OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "alora_invocation_tokens": (None, []),
        "arrow_config": (None,),
        "bias": ("none", None),
        "ensure_weight_tying": (False, None),
        "fan_in_fan_out": (False, None),
        "kasa_config": (None,),
        "layer_replication": (None, []),
        "lora_bias": (False, None),
        "megatron_config": (None,),
        "modules_to_save": (None, []),
        "monteclora_config": (None,),
        "target_parameters": (None, []),
        "trainable_token_indices": (None, [], {}),
        "use_bdlora": (None, False),
        "use_dora": (False, None),
        "use_qalora": (False, None),
        "velora_config": (None,),
    }
)
"""What would change the result, and the values by which it does nothing."""

_SPOKEN = {"use_dora": "DoRA", "use_qalora": "QA-LoRA", "use_bdlora": "block-diagonal LoRA"}

_FIRST_VALUES = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialise that leave the base's weights alone; others moved a part of them into the adapter."""

_HONOURED = frozenset(
    {
        "alpha_pattern",
        "base_model_name_or_path",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
_HARMLESS = frozenset(
    {
        "auto_mapping",  # how PEFT finds a class of its own
        "corda_config",  # of an initialisation
        "eva_config",
        "inference_mode",
        "loftq_config",  # PEFT ignores it unless init_lora_weights is "loftq"
        "lora_ga_config",
        "megatron_core",  # the name of a package
        "peft_version",
        "qalora_group_size",  # of use_qalora
        "revision",
        "runtime_config",  # where PEFT computes
    }
)

_ALPHA = f"0, or {HELD}"
_MOST_DROPOUT = 1 - 2**-24
"""The largest float32 below 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """What a configuration asks for."""

    rank: int
    alpha: float
    dropout: float
    rank_stabilised: bool
    base_name: str | None
    targets: tuple[str, ...] | str | None
    """Names, or a regular expression; None: nothing to hold against: absent, or "all-linear"."""
    excluded: tuple[str, ...] | str | None
    layer_numbers: frozenset[int] | None
    """The decoder layers that are adapted; None: all."""
    layer_patterns: tuple[str, ...]
    """Behind which of these, as expressions, the number of a layer stands; none: behind anything."""
    ranks: Mapping[str, int]
    """Of modules with a rank of their own, by an expression (`peft_rules`); in the file's order."""
    alphas: Mapping[str, float]
    """Likewise."""


def read_peft_config(path: Path) -> PeftConfig:
    """Read the file `path`.

    Raises:
        ModelError: `adapter-config`: it can't be read, or a field is of the wrong type or out of bounds;
            `adapter-unsupported`: it asks for what is not computed here, every field with its value.
    """
    fields = _fields(path)
    _refuse_what_is_not_computed(path, fields)
    read = _Reader(path, fields)
    targets = read.names("target_modules")
    numbers = read.numbers("layers_to_transform")
    if isinstance(targets, str) and numbers is not None:
        raise read.error("layers_to_transform", "nothing beside a target_modules that is an expression")
    return PeftConfig(
        rank=read.whole("r", least=1, most=4096),
        alpha=read.alpha("lora_alpha"),
        dropout=read.share("lora_dropout"),
        rank_stabilised=read.boolean("use_rslora", default=False),
        base_name=read.text("base_model_name_or_path"),
        targets=None if targets == "all-linear" else targets,
        excluded=read.names("exclude_modules"),
        layer_numbers=numbers,
        layer_patterns=read.listed("layers_pattern"),
        ranks=read.by_expression("rank_pattern", lambda value: type(value) is int and 1 <= value <= 4096),
        alphas=read.by_expression("alpha_pattern", _is_alpha),
    )


def _fields(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path, code="adapter-config")
    except CheckpointError as error:
        raise ModelError(
            error.code,
            f"{error.message}; nothing was loaded",
            facts=list(error.facts.items()),
            remedy=error.remedy,
        ) from None


def _refuse_what_is_not_computed(path: Path, fields: Mapping[str, Any]) -> None:
    """Everything that is not served here, in one error."""
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelError(
            "adapter-unsupported",
            f"{path}: peft_type is {kind!r:.60}; adapters of LORA are served, no others; nothing was loaded",
            facts=[("expected", "LORA"), ("found", kind)],
            remedy="Merge the adapter with PEFT, and import the merged model.",
        )
    problems = []
    for name, values in _OFF.items():
        value = fields.get(name)
        if not _is_one_of(value, values):
            spoken = f" ({_SPOKEN[name]})" if name in _SPOKEN else ""
            problems.append(f"{name}{spoken} is {value!r:.80}")
    how = fields.get("init_lora_weights", True)
    if not _is_one_of(how, _FIRST_VALUES):
        problems.append(f"init_lora_weights is {how!r:.80}, which changes the base model's own weights")
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM", "FEATURE_EXTRACTION"):
        problems.append(f"task_type is {task!r:.80}, where CAUSAL_LM is served")
    unknown = sorted(set(fields) - set(_OFF) - _HONOURED - _HARMLESS)
    problems += [f"{name} (unknown here) is {fields[name]!r:.80}" for name in unknown]
    if problems:
        raise ModelError(
            "adapter-unsupported",
            f"{path} asks for what is not computed here: {'; '.join(problems)}; nothing was loaded",
            facts=[("file", str(path)), ("problems", problems)],
            remedy="Merge the adapter with PEFT (`merge_and_unload`), and import the merged model.",
        )


def _is_alpha(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_held(value)


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    # 0 == False in Python, but a file that says 0 says something else.
    return any(type(value) is type(known) and value == known for known in values)


class _Reader:
    """Typed access to the fields of one configuration."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path = path
        self.fields = fields

    def error(self, name: str, wanted: str) -> ModelError:
        there = name in self.fields
        found = f"is {self.fields[name]!r:.80}" if there else "is missing"
        return ModelError(
            "adapter-config",
            f"{self.path}: {name} {found}; wanted {wanted}; nothing was loaded",
            facts=[("field", name), ("expected", wanted), ("found", self.fields.get(name, "nothing"))],
            remedy="Fetch the file again, or save the adapter again with PEFT.",
        )

    def whole(self, name: str, *, least: int, most: int) -> int:
        value = self.fields.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.error(name, f"a whole number from {least} to {most}")
        return value

    def alpha(self, name: str) -> float:
        value: Any = self.fields.get(name)
        if not _is_alpha(value):
            raise self.error(name, _ALPHA)
        return float(value)

    def share(self, name: str) -> float:
        value = self.fields.get(name, 0.0)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _MOST_DROPOUT:
            raise self.error(name, "a number from 0 up, below 1 as float32 too")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        value = self.fields.get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, "a text")
        return value or None

    def names(self, name: str) -> tuple[str, ...] | str | None:
        value = self.fields.get(name)
        if value is None or isinstance(value, str):
            return value or None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of names, or a text")
        return tuple(value)

    def listed(self, name: str) -> tuple[str, ...]:
        value = self.names(name)
        return (value,) if isinstance(value, str) else value or ()

    def by_expression(self, name: str, is_right: Callable[[Any], bool]) -> dict[str, Any]:
        value = self.fields.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(map(is_right, value.values())):
            wanted = "whole numbers from 1 to 4096" if name == "rank_pattern" else f"of each: {_ALPHA}"
            raise self.error(name, f"an object with {wanted}")
        return value

    def numbers(self, name: str) -> frozenset[int] | None:
        value = self.fields.get(name)
        if value is None:
            return None
        listed = value if isinstance(value, list) else [value]
        if not all(type(number) is int for number in listed):
            raise self.error(name, "a whole number, or a list of them")
        # PEFT takes no number for all of them.
        return frozenset(listed) or None
