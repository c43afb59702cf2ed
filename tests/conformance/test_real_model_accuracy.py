"""The CPU lane on the demo model against true float64, over every position of three texts.

One pass makes the logits of all three parties; the tests below each look at one promise.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fixtures.demo_model import demo_gguf
from lanes.tiny_models import open_model
from mens_core.models.model import Model
from mens_core.ops import BLOCK, Batch, Ops
from oracle.float64_forward import hidden_states, logits_of
from oracle.gguf_weights import GgufWeights
from oracle.llama_kl import TEXTS, divergence
from vox_host.models.catalogue import Catalogue
from vox_host.models.importing import import_model, open_source

pytestmark = [pytest.mark.real_model, pytest.mark.oracle, pytest.mark.timeout(900)]

LLAMA = json.loads((Path(__file__).parents[1] / "fixtures" / "llama_kl.json").read_text())["texts"]
CHUNK = 256


@dataclass
class Measured:
    """What the tests look at; one entry per position."""

    positions: int = 0
    worst_float: float = 0.0
    """Largest difference of any logit between the lane on float32 weights and float64."""
    quantised_kl: list[float] = field(default_factory=list)
    llama_kl: list[float] = field(default_factory=list)


def float_model(quantised: Path, weights: GgufWeights, target: Path) -> Path:
    """The same model with every weight dequantised to float32 by the `gguf` package."""
    target.mkdir()
    shutil.copy(quantised / "config.json", target)
    metadata = json.loads((quantised / "quant-metadata.json").read_text())
    (target / "quant-metadata.json").write_text(json.dumps({**metadata, "tensors": {}}))
    save_file(
        {f"model.{name}": np.ascontiguousarray(weights.get(name)) for name in weights.names()},
        target / "model.safetensors",
    )
    return target


def logits(model: Model, ops: Ops, token_ids: list[int]):
    """Yield (first position, logits of up to CHUNK positions)."""
    blocks = -(-len(token_ids) // BLOCK)
    cache = model.new_cache(blocks)
    table = np.arange(blocks, dtype=np.int32)[None]
    for start in range(0, len(token_ids), CHUNK):
        part = np.array(token_ids[start : start + CHUNK], np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        batch = Batch(part, rows + start, np.array([0, len(part)], np.int32), table, rows)
        result = model.forward(batch, cache)
        assert not result.faults
        yield start, ops.to_host(result.logits)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    gguf = demo_gguf()
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library

    folder = tmp_path_factory.mktemp("models")
    import_model(
        open_source(str(gguf), environment=os.environ),
        Catalogue(folder),
        name="demo",
        accept_license=True,
        progress=lambda *_: None,
    )
    weights = GgufWeights(gguf)
    kernels = load_library().kernels
    quantised_ops, float_ops = CpuOps(kernels), CpuOps(kernels)
    quantised = open_model(folder / "demo", quantised_ops).model
    in_float = open_model(float_model(folder / "demo", weights, folder / "float"), float_ops).model
    settings, head = weights.settings(), weights.get("embed_tokens.weight")
    result = Measured()
    for text in sorted(TEXTS.glob("*.txt")):
        ids = LLAMA[text.stem]["token_ids"]
        hidden = hidden_states(settings, weights.get, ids)
        both = zip(logits(in_float, float_ops, ids), logits(quantised, quantised_ops, ids), strict=True)
        for (start, floats), (_, rows) in both:
            true = logits_of(settings, weights.get, head, hidden[start : start + len(rows)])
            result.worst_float = max(result.worst_float, float(np.abs(true - floats).max()))
            result.quantised_kl += [divergence(a, b) for a, b in zip(true, rows, strict=True)]
        result.llama_kl += LLAMA[text.stem]["kl"]
        result.positions += len(ids)
    return result


def test_float_weights_give_every_logit_within_1e_4_of_float64(measured):
    assert measured.positions >= 2000
    assert measured.worst_float < 1e-4, measured.worst_float


def test_the_quantised_file_loses_no_more_than_llama_cpp_does_on_it(measured):
    """Paired by position: mean KL to float64, ours over llama.cpp's, with a bootstrap interval."""
    ours, theirs = np.array(measured.quantised_kl), np.array(measured.llama_kl)
    assert len(ours) == len(theirs) >= 2000
    ratio = ours.mean() / theirs.mean()
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(ours), (2000, len(ours)))
    low, high = np.percentile([ours[draw].mean() / theirs[draw].mean() for draw in draws], [2.5, 97.5])
    print(f"\nmean KL {ours.mean():.6f}, llama.cpp {theirs.mean():.6f}")
    print(f"ratio {ratio:.4f} [{low:.4f}, {high:.4f}]")
    assert ratio <= 1.05, (ratio, low, high)
    # The interval must be narrow enough to mean something, and must not exclude equality from above.
    assert high - low < 0.15 and low <= 1.0 + 0.05, (low, high)
