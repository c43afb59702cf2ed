"""Read a folder that PEFT wrote: adapter_config.json and adapter_model.safetensors.

Which layers are adapted, the file's tensors say, and every one of them must be what the
configuration asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vox_host.errors import ModelError
from vox_host.runs.foreign_tensors import check_pairs, file_digest, layer_of_module, read_header
from vox_host.runs.layout import ADAPTER_CONFIG, ADAPTER_MODEL, CHAT_TEMPLATE
from vox_host.runs.peft_config import PeftConfig, read_peft_config
from vox_host.runs.source import AdapterSource
from vox_plugin_api.messages import AdapterConfig
from vox_plugin_api.safetensors_file import TensorEntry

__all__ = ["read_peft_folder"]

_PICKLED = "adapter_model.bin"
_MAX_TEMPLATE_BYTES = 4 << 20


def read_peft_folder(path: Path) -> AdapterSource | None:
    """Read the adapter in the folder `path`; None: PEFT wrote none there.

    Raises:
        ModelError: `adapter-pickled`, `adapter-incomplete`, `adapter-config`, `adapter-unsupported` or
            `adapter-tensors`: what is there can't be served as PEFT would.
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
    key_map, layers = check_pairs(file, _tensors(file), config.rank)
    notes = _hold_against_targets(config, file, layers)
    if config.alpha == 0:
        notes += (f"{config_path}: lora_alpha is 0, so the adapter changes nothing",)
    return AdapterSource(
        folder=path,
        origin="peft",
        file=file,
        sha256=file_digest(file),
        config=AdapterConfig(
            rank=config.rank,
            alpha=config.alpha,
            targets=list(layers),
            rank_stabilised=config.rank_stabilised,
            dropout=config.dropout,
        ),
        key_map=key_map,
        base_name=config.base_name,
        base_digest=None,
        chat_template=_template(path / CHAT_TEMPLATE),
        notes=notes,
    )


def _tensors(file: Path) -> list[tuple[str, str, TensorEntry]]:
    """Return layer, part and tensor of each key.

    Raises:
        ModelError: a key is none of a low-rank update on a linear layer of a language model.
    """
    found, strangers = [], []
    for key, entry in read_header(file).items():
        module, _, part = key.removeprefix("base_model.model.").rpartition(".lora_")
        layer = layer_of_module(module)
        name, _, rest = part.partition(".")
        if layer is None or name not in ("A", "B") or rest not in ("weight", "default.weight"):
            strangers.append(key)
        else:
            found.append((layer, name, entry))
    if strangers:
        raise _no_place(file, sorted(strangers))
    return found


def _no_place(file: Path, strangers: list[str]) -> ModelError:
    why = {
        "lora_magnitude_vector": "the magnitudes of DoRA, which is not computed here",
        "lora_embedding_": "updates of an embedding; those of linear layers are served",
        "base_layer": "copies of base weights, which PEFT saves with save_embedding_layers; save without it",
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


def _hold_against_targets(config: PeftConfig, file: Path, layers: Sequence[str]) -> tuple[str, ...]:
    """Refuse tensors that PEFT would not use; return a note on targets that have none."""
    strangers = [
        layer
        for layer in layers
        if (config.targets is not None and not _names(config.targets, layer))
        or (config.excluded is not None and _names(config.excluded, layer))
        or not _is_transformed(config, layer)
    ]
    if strangers:
        raise ModelError(
            "adapter-tensors",
            f"{file} holds updates of layers that {ADAPTER_CONFIG} doesn't ask for: "
            f"{', '.join(strangers[:5])}; PEFT would leave them out, and nothing was loaded",
            facts=[
                ("found", strangers[:100]),
                ("target_modules", config.targets and list(config.targets)),
                ("exclude_modules", config.excluded and list(config.excluded)),
                ("layers_to_transform", config.layer_numbers and sorted(config.layer_numbers)),
            ],
            remedy="The two files are of different adapters: fetch both again.",
        )
    idle = [name for name in config.targets or () if not any(_names([name], layer) for layer in layers)]
    if idle:
        return (f"{file} holds no update of {', '.join(idle)}, which {ADAPTER_CONFIG} names",)
    return ()


def _is_transformed(config: PeftConfig, layer: str) -> bool:
    numbers = config.layer_numbers
    return numbers is None or (layer != "lm_head" and int(layer.split(".")[1]) in numbers)


def _names(targets: Sequence[str], layer: str) -> bool:
    """PEFT's rule: a whole name, or its last parts; its names may lie below prefixes that ours lack."""
    whole = layer if layer == "lm_head" else f"model.{layer}"
    return any(
        whole == target or whole.endswith(f".{target}") or layer_of_module(target) == layer
        for target in targets
    )


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
            "adapter-template", f"{path} can't be read as a chat template: {error}; nothing was loaded"
        ) from None
