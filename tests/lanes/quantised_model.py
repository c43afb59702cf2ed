"""A tiny model twice: its matrices as GGML blocks of several formats, and dequantised to float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

from lanes.tiny_models import random_tensors, write_model
from vox_plugin_api.families import parse_config

FORMATS = ("Q8_0", "Q4_0", "Q5_0")


def write_both(
    path: Path, config: dict[str, Any], *, seed: int = 3, formats: Sequence[str] = FORMATS
) -> tuple[Path, Path]:
    """Write the quantised and the dequantised model into folders of `path`."""
    tensors = random_tensors(parse_config(config), seed)
    stored, plain, described = {}, {}, {}
    for number, (name, values) in enumerate(sorted(tensors.items())):
        if values.ndim == 1:
            stored[name] = plain[name] = values
            continue
        kind = gguf.GGMLQuantizationType[formats[number % len(formats)]]
        blocks = gguf.quants.quantize(values, kind)
        stored[name] = blocks.reshape(-1)
        described[name] = {"format": kind.name.lower(), "shape": list(values.shape)}
        plain[name] = np.asarray(gguf.quants.dequantize(blocks, kind), np.float32)
    quantised = path / "quantised"
    quantised.mkdir()
    (quantised / "config.json").write_text(json.dumps(config))
    (quantised / "quant-metadata.json").write_text(json.dumps({"version": 1, "tensors": described}))
    save_file(stored, quantised / "model.safetensors")
    return quantised, write_model(path / "plain", config, plain)
