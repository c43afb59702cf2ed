"""Read a folder that PEFT wrote: adapter_config.json and adapter_model.safetensors.

Which layers are adapted, the file's tensors say, and every one of them must be what the
configuration asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import ModelError
from vox_host.runs.foreign_tensors import check_pairs, file_digest, layer_of_module, read_header
from vox_host.runs.layout import ADAPTER_CONFIG, ADAPTER_MODEL, CHAT_TEMPLATE
from vox_host.runs.peft_config import PeftConfig, read_peft_config
from vox_host.runs.peft_rules import PeftRules
from vox_host.runs.source import AdapterSource
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.messages import AdapterConfig, RankAndAlpha
from vox_plugin_api.safetensors_file import TensorEntry

__all__ = ["read_peft_folder"]

_COPY = ".base_layer.weight"
_COPIED = ("lm_head", EMBEDDING_LAYER)
"""Layers whose own weights PEFT saves beside their updates."""
_PICKLED = "adapter_model.bin"
_MAX_TEMPLATE_BYTES = 4 << 20


def read_peft_folder(path: Path) -> AdapterSource | None:
    """Read the adapter in the folder `path`; None: PEFT wrote none there.

    Raises:
        ModelError: `adapter-pickled`, `adapter-incomplete`, `adapter-config`, `adapter-unsupported`,
            `adapter-expression` or `adapter-tensors`: what is there can't be served as PEFT would.
    """
    config_path, file = path / ADAPTER_CONFIG, path / ADAPTER_MODEL
    if not file.exists() and (path / _PICKLED).exists():
        raise ModelError(
            "adapter-pickled",
            f"{path / _PICKLED} is a pickle, which can run code and is not read; nothing was loaded",
            facts=[("expected", ADAPTER_MODEL), ("found", _PICKLED)],
            remedy="Load it with PEFT where you trust it, and save it with safe_serialization=True.",
        )
    if not config_path.exists() and not file.exists():
        return None
    for there in (config_path, file):
        if not there.exists():
            raise ModelError(
                "adapter-incomplete",
                f"{path} lacks {there.name}; nothing was loaded",
                facts=[("expected", [ADAPTER_CONFIG, ADAPTER_MODEL])],
                remedy="Fetch it too: PEFT writes both.",
            )
    config = read_peft_config(config_path)
    found, copies = _tensors(file)
    modules = {tensor.layer: tensor.module for tensor in found}
    rules = PeftRules(config, [*modules.values(), *map(_causal, modules)], source=config_path)
    key_map, layers = check_pairs(
        file,
        [(tensor.layer, tensor.part, tensor.entry) for tensor in found],
        lambda layer: rules.rank(modules[layer]),
    )
    notes = _hold_against_targets(config, rules, file, {layer: modules[layer] for layer in layers})
    common = RankAndAlpha(rank=config.rank, alpha=config.alpha)
    own = {
        layer: RankAndAlpha(rank=rules.rank(modules[layer]), alpha=rules.alpha(modules[layer]))
        for layer in layers
    }
    if all(by.alpha == 0 for by in own.values()):
        notes += (f"{config_path}: lora_alpha is 0, so the adapter changes nothing",)
    return AdapterSource(
        folder=path,
        origin="peft",
        file=file,
        sha256=file_digest(file),
        config=AdapterConfig(
            rank=config.rank,
            alpha=config.alpha,
            targets=[layer for layer in layers if own[layer] == common],
            rank_stabilised=config.rank_stabilised,
            dropout=config.dropout,
            exceptions={layer: by for layer, by in own.items() if by != common},
        ),
        key_map=key_map,
        base_copies=copies,
        base_name=config.base_name,
        base_digest=None,
        chat_template=_template(path / CHAT_TEMPLATE),
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the file, and what it is."""

    layer: str
    """As we call it."""
    module: str
    """As the model that was trained calls it."""
    part: str
    """"A" or "B"."""
    entry: TensorEntry


def _tensors(file: Path) -> tuple[list[_Tensor], dict[str, str]]:
    """Return every tensor of an update, and the keys of what is a copy of the base's own, by layer.

    Raises:
        ModelError: a key is none of a low-rank update on a layer of a language model.
    """
    found, strangers = [], []
    copies: dict[str, str] = {}
    for key, entry in read_header(file).items():
        name = key.removeprefix("base_model.model.")
        if name.endswith(_COPY) and layer_of_module(name.removesuffix(_COPY)) in _COPIED:
            copies[layer_of_module(name.removesuffix(_COPY)) or ""] = key
            continue
        module, _, end = name.rpartition(".lora_")
        layer = layer_of_module(module)
        name, _, rest = end.partition(".")
        # A parameter of an embedding, a module of its own elsewhere.
        is_embedding = name.startswith("embedding_")
        part = name.removeprefix("embedding_")
        ends = ("", "default") if is_embedding else ("weight", "default.weight")
        if (
            layer is None
            or part not in ("A", "B")
            or rest not in ends
            or is_embedding != (layer == EMBEDDING_LAYER)
        ):
            strangers.append(key)
        else:
            found.append(_Tensor(layer, module, part, entry))
    strangers += [key for layer, key in copies.items() if layer not in {tensor.layer for tensor in found}]
    if strangers:
        raise _no_place(file, sorted(strangers))
    return found, copies


def _no_place(file: Path, strangers: list[str]) -> ModelError:
    why = {
        "lora_magnitude_vector": "the magnitudes of DoRA, which is not computed here",
        "base_layer": "copies of base weights that have no update; save with save_embedding_layers=False",
        ".bias": "biases, which change the result and are not computed here",
        "modules_to_save": "whole layers that were trained",
    }
    reasons = [text for part, text in why.items() if any(part in key for key in strangers)]
    listed = ", ".join(strangers[:5]) + (f" and {len(strangers) - 5} more" if len(strangers) > 5 else "")
    return ModelError(
        "adapter-tensors",
        f"{file} holds tensors that have no place here: {listed}"
        f"{''.join(f'; these are {reason}' for reason in reasons)}; nothing was loaded",
        facts=[
            ("file", str(file)),
            ("expected", "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight and the like"),
            ("found", strangers[:100]),
        ],
        remedy="Merge the adapter with PEFT (`merge_and_unload`), and import the merged model."
        if reasons
        else "Layers are called model.layers.0.self_attn.q_proj and the like: this is of another kind.",
    )


def _hold_against_targets(
    config: PeftConfig, rules: PeftRules, file: Path, modules: Mapping[str, str]
) -> tuple[str, ...]:
    """Refuse tensors that PEFT would not use; return notes on what is named and has none."""
    strangers = [
        layer
        for layer, module in modules.items()
        # A text model within a larger one is saved under names that differ from those in the configuration.
        if not rules.is_wanted(module)
        and not rules.is_wanted(_causal(layer))
        and not _is_named_elsewhere(config, layer)
    ]
    if strangers:
        raise ModelError(
            "adapter-tensors",
            f"{file} holds updates of layers that {ADAPTER_CONFIG} doesn't ask for: "
            f"{', '.join(strangers[:5])}; PEFT would leave them out, and nothing was loaded",
            facts=[
                ("found", strangers[:100]),
                ("target_modules", _plain(config.targets)),
                ("exclude_modules", _plain(config.excluded)),
                ("layers_to_transform", config.layer_numbers and sorted(config.layer_numbers)),
                ("layers_pattern", list(config.layer_patterns)),
            ],
            remedy="The two files are of different adapters: fetch both again.",
        )
    notes = []
    targets = () if isinstance(config.targets, str) else config.targets or ()
    idle = [name for name in targets if not any(_fits(name, *pair) for pair in modules.items())]
    if idle:
        notes.append(f"{file} holds no update of {', '.join(idle)}, which {ADAPTER_CONFIG} names")
    idle = rules.idle_entries()
    if idle:
        notes.append(
            f"{', '.join(idle)} of rank_pattern or alpha_pattern in {ADAPTER_CONFIG} fits no layer with an "
            "update; as in PEFT, it changes nothing"
        )
    return tuple(notes)


def _is_named_elsewhere(config: PeftConfig, layer: str) -> bool:
    """Whether a target is the layer's whole name below other prefixes; nothing else bears on it then."""
    targets = () if isinstance(config.targets, str) else config.targets or ()
    return not config.excluded and any(layer_of_module(target) == layer for target in targets)


def _fits(target: str, layer: str, module: str) -> bool:
    names = (module, _causal(layer))
    return layer_of_module(target) == layer or any(n == target or n.endswith(f".{target}") for n in names)


def _causal(layer: str) -> str:
    """What a causal language model of its own calls the layer."""
    return layer if layer == "lm_head" else f"model.{layer}"


def _plain(names: tuple[str, ...] | str | None) -> list[str] | str | None:
    return list(names) if isinstance(names, tuple) else names


def _template(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(data) > _MAX_TEMPLATE_BYTES:
            raise ValueError(f"it has more than {_MAX_TEMPLATE_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(
            "adapter-template",
            f"{path} can't be read as a chat template: {error}; nothing was loaded",
            remedy="Save it as UTF-8, or take it out of the folder.",
        ) from None
