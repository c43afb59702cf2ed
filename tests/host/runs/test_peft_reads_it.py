"""Outside oracle: PEFT loads what a run has published, every tensor of it, and computes what is served."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fixtures.runs import some_facts
from lanes import every_lane
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import ALL_TARGETS, a_config, random_adapter
from mens_core.adapters.file import safetensors_bytes
from mens_core.adapters.plan import plan_adapter
from mens_core.adapters.served import layer_shapes
from mens_core.backend import MensBackend
from vox_host.runs.base_tensors import base_key_map
from vox_host.runs.layout import RunDirectory
from vox_host.runs.manifest import BaseModelRecord
from vox_host.runs.open import open_adapter
from vox_host.runs.publish import publish_adapter
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendInfo
from vox_plugin_api.checkpoint import read_json_object
from vox_plugin_api.families import parse_config

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning"),
]

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
TARGETS = {"qwen3": ALL_TARGETS, "gemma3": ("q_proj", "v_proj", "layers.2.mlp.up_proj", "embed_tokens")}


def published(tmp_path: Path, family: str, *, rank_stabilised: bool) -> tuple[Path, RunDirectory]:
    # transformers hands a null rope_scaling on; ours means the same without it.
    config = {k: v for k, v in BY_FAMILY[family].items() if v is not None}
    model = write_model(tmp_path / "model", config)
    ours = parse_config(read_json_object(model / "config.json"))
    adapter = a_config(TARGETS[family], rank=4, alpha=7.0, rank_stabilised=rank_stabilised).adapter
    plan = plan_adapter(adapter, layer_shapes(ours))
    checkpoint = tmp_path / "step"
    checkpoint.mkdir()
    (checkpoint / "adapter.safetensors").write_bytes(safetensors_bytes(random_adapter(plan.shapes)))
    layers = [matrix.name for matrix in plan.matrices]
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    facts = some_facts(
        base_model=BaseModelRecord(name="model", digest="ab" * 32, path=str(model)),
        rank=4, alpha=7.0, targets=TARGETS[family], rank_stabilised=rank_stabilised, dropout=0.0,
        layer_order=tuple(layers), base_key_map=base_key_map(layers, model),
    )  # fmt: skip
    publish_adapter(run, checkpoint, facts)
    return model, run


def served_logits(model: Path, run: RunDirectory, config: pytest.Config) -> np.ndarray:
    """Of the last position, by the CPU lane with the adapter."""
    lane = every_lane.make_training_lane("mens-cpu-ref", config)
    info = BackendInfo("mens-test", "1", "cpu", ("canonical",), ("generate", "trace", "adapters"))
    backend = MensBackend(info, lambda params: lane, lambda: None)
    params = m.LoadModelParams(
        model_dir=str(model), model_digest="ab" * 32, adapter=open_adapter(run.path).params()
    )
    list(backend.load_model(params))
    *_, traced = backend.trace(m.TraceParams(token_ids=IDS))
    last = traced.result.operators[-1].name
    *_, reply = backend.trace(m.TraceParams(token_ids=IDS, slices=[last]))
    return np.frombuffer(reply.slices[0], "<f4")


@pytest.mark.parametrize("rank_stabilised", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_peft_computes_what_is_served(tmp_path, request, family, rank_stabilised):
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    torch = pytest.importorskip("torch", reason="torch is not installed here")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    path, run = published(tmp_path, family, rank_stabilised=rank_stabilised)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        plain = base(torch.tensor([IDS])).logits[0, -1].numpy()
        adapted = peft.PeftModel.from_pretrained(base, run.path)
        theirs = adapted(torch.tensor([IDS])).logits[0, -1].numpy()
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if ".lora_" in name}
    assert loaded == set(open_adapter(run.path).key_map), "PEFT has the very layers that we have"
    ours = served_logits(path, run, request.config)
    moved = np.abs(theirs - plain).max()
    assert moved > 0.05
    # Both are float32 of another order of sums: a thousandth of what the adapter does is far above that.
    assert np.abs(ours - theirs).max() < moved * 1e-3
    assert hashlib.sha256(run.adapter_model.read_bytes()).hexdigest() == open_adapter(run.path).sha256
