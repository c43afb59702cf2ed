"""Read the older layout of an adapter: candle_qlora_adapter.safetensors and its manifest.

Tensors are called `<layer>.lora_a.weight` [rank, columns] and `<layer>.lora_b.weight` [rows, rank].
What a layer is, `base_key_map` of adapter_manifest.json says by the name of the base's tensor.
The update is multiplied by alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.float32_range import HELD, is_held
from vox_host.runs.foreign_tensors import check_pairs, file_digest, layer_of_module, read_header
from vox_host.runs.layout import ADAPTER_MANIFEST, CHAT_TEMPLATE
from vox_host.runs.source import AdapterSource
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.messages import AdapterConfig
from vox_plugin_api.safetensors_file import TensorEntry
from vox_plugin_api.strict_json import CheckpointError, read_json_object

__all__ = ["OLDER_ADAPTER", "read_older_folder"]

OLDER_ADAPTER = "candle_qlora_adapter.safetensors"

_VERSIONS = ("version", "schema_version", "format_version", "manifest_version")
"""The words under which a manifest may say its version."""


def read_older_folder(path: Path) -> AdapterSource | None:
    """Read the adapter in the folder `path`; None: there is none of this layout.

    Raises:
        ModelError: `adapter-manifest` or `adapter-tensors`: it is not as the layout has it.
    """
    file, manifest = path / OLDER_ADAPTER, path / ADAPTER_MANIFEST
    if not file.exists():
        return None
    fields = _fields(manifest)
    rank, alpha = fields.get("rank"), fields.get("alpha")
    if type(rank) is not int or not 1 <= rank <= 4096:
        raise _wrong(manifest, fields, "rank", "a whole number from 1 to 4096")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not is_held(alpha):
        raise _wrong(manifest, fields, "alpha", f"0, or {HELD}")
    layers = _layers(manifest, fields)
    key_map, order = check_pairs(file, _tensors(file, layers), lambda _: rank)
    base = fields.get("base_model")
    template = path / CHAT_TEMPLATE
    notes = (f"{manifest}: alpha is 0, so the adapter changes nothing",) if alpha == 0 else ()
    return AdapterSource(
        folder=path,
        origin="older",
        file=file,
        sha256=file_digest(file),
        config=AdapterConfig(rank=rank, alpha=float(alpha), targets=list(order)),
        key_map=key_map,
        base_name=base if isinstance(base, str) and base else None,
        base_digest=None,
        chat_template=_template(template) if template.is_file() else None,
        notes=notes,
    )


def _template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            "template-malformed",
            f"{path} is not UTF-8 text (byte {error.start}); nothing was loaded",
            remedy="Take the file from whoever made the adapter.",
        ) from None


def _fields(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise ModelError(
            "adapter-incomplete",
            f"{path.parent} holds {OLDER_ADAPTER} and no {ADAPTER_MANIFEST}; nothing was loaded",
            remedy="Fetch it too: rank, alpha and the layers' names are in it.",
        )
    try:
        fields = read_json_object(path, code="adapter-manifest")
    except CheckpointError as error:
        raise ModelError(
            error.code,
            f"{error.message}; nothing was loaded",
            facts=list(error.facts.items()),
            remedy="Take adapter and manifest from where they came.",
        ) from None
    for word in _VERSIONS:
        if word in fields and fields[word] not in (3, "3", "v3"):
            raise _wrong(path, fields, word, "3")
    for word in ("use_rslora", "rank_stabilised", "use_dora"):
        if fields.get(word) not in (None, False):
            raise _wrong(path, fields, word, "false: this layout scales by alpha / rank")
    return fields


def _layers(path: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """Return our name of each layer that the manifest names."""
    key_map = fields.get("base_key_map")
    if not isinstance(key_map, dict) or not key_map or not all(isinstance(v, str) for v in key_map.values()):
        raise _wrong(path, fields, "base_key_map", "an object that names the base's tensor of each layer")
    order = fields.get("layer_order", list(key_map))
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(key_map):
        raise _wrong(path, fields, "layer_order", "the layers of base_key_map, each once")
    layers = {}
    for name, tensor in key_map.items():
        # A tied head is the embedding's tensor in the base.
        layer = "lm_head" if name == "lm_head" else layer_of_module(tensor.removesuffix(".weight"))
        if layer in (None, EMBEDDING_LAYER) or not tensor.endswith(".weight"):
            raise _wrong(
                path, fields, "base_key_map", f"a linear layer's weight for {name!r}, not {tensor!r:.80}"
            )
        layers[name] = layer
    return layers


def _tensors(file: Path, layers: Mapping[str, str]) -> list[tuple[str, str, TensorEntry]]:
    found, strangers = [], []
    seen = set()
    for key, entry in read_header(file).items():
        name, _, part = key.rpartition(".lora_")
        if name not in layers or part not in ("a.weight", "b.weight"):
            strangers.append(key)
            continue
        seen.add(name)
        found.append((layers[name], part[0].upper(), entry))
    missing = sorted(set(layers) - seen)
    if strangers or missing:
        parts = [
            *(
                [f"it holds {', '.join(sorted(strangers)[:5])}, which no layer there has"]
                if strangers
                else []
            ),
            *([f"it lacks the tensors of {', '.join(missing[:5])}"] if missing else []),
        ]
        raise ModelError(
            "adapter-tensors",
            f"{file} does not fit {ADAPTER_MANIFEST}: {'; '.join(parts)}; nothing was loaded",
            facts=[
                ("expected", [f"{name}.lora_{part}.weight" for name in sorted(layers)[:50] for part in "ab"]),
                ("found", sorted(strangers)[:100]),
            ],
            remedy="The two files are of different adapters: fetch both again.",
        )
    return found


def _wrong(path: Path, fields: Mapping[str, Any], name: str, wanted: str) -> ModelError:
    found = f"is {fields[name]!r:.120}" if name in fields else "is missing"
    return ModelError(
        "adapter-manifest",
        f"{path}: {name} {found}; wanted {wanted}; nothing was loaded",
        facts=[("field", name), ("expected", wanted), ("found", fields.get(name, "nothing"))],
        remedy="Take adapter and manifest from where they came.",
    )
