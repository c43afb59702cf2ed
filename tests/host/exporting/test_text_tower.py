"""A base that is the text model of a larger one: its names are kept, and so is what stands beside it."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from fixtures.adapters import CONFIGS, adapter_tensors, fold_here, import_base, write_adapter, write_base
from oracle.adapted_rounding import difference_bound
from oracle.float64_forward import settings_of
from vox_host.exporting import merged_folder
from vox_host.exporting.merging import MergeJob
from vox_host.exporting.peft_export import write_peft_folder
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.runs.open import open_adapter
from vox_host.settings import Settings
from vox_host.whole_folder import whole_folder

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
transformers = pytest.importorskip("transformers")

IDS = np.random.default_rng(2).integers(0, 280, 30).tolist()
TARGETS = ("q_proj", "up_proj", "lm_head")
PREFIX = "language_model.model."


def write_tower(folder):
    """Gemma 3 with a tiny vision model beside it, as transformers saves it."""
    import torch

    write_base(folder, "gemma3")
    ours = CONFIGS["gemma3"]
    shared = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    more = ("num_key_value_heads", "vocab_size", "max_position_embeddings", "sliding_window")
    text = {name: ours[name] for name in (*shared, *more, "query_pre_attn_scalar")}
    text["layer_types"] = ["sliding_attention", "full_attention"]
    text["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=290,
        boi_token_index=291,
        eoi_token_index=292,
        eos_token_id=1,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() == 1 else 1.0 / parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(folder)
    return folder


def load(folder):
    return transformers.Gemma3ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setattr(merged_folder, "fold", fold_here)
    base = import_base(tmp_path / "home", write_tower(tmp_path / "base"))
    adapter = open_adapter(write_adapter(tmp_path / "tuned", base.path, TARGETS))
    return MergeJob(
        settings=Settings(home=tmp_path / "home"), base=base, adapter=adapter, plugin=None, dtype="f32"
    )


def exact_logits(job):
    stored = load_file(job.base.path / "model.safetensors")
    tensors = {n.removeprefix(PREFIX): t for n, t in stored.items() if n.startswith(PREFIX)}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    adapter = adapter_tensors(job.base.path, TARGETS)
    updates = {
        key.removeprefix("base_model.model.").removeprefix("model.").replace("lora_A.", ""): (
            values,
            adapter[key.replace("lora_A", "lora_B")],
            2.0,
        )
        for key, values in adapter.items()
        if ".lora_A." in key
    }
    settings = dataclasses.replace(settings_of(CONFIGS["gemma3"]), logit_softcap=None)
    return difference_bound(settings, tensors, "lm_head.weight", IDS, updates)


@pytest.mark.parametrize("form", ["checkpoint", "hugging-face"])
def test_merged_it_is_still_the_larger_model(job, tmp_path, form):
    from oracle.transformers_float64 import float64_logits

    with whole_folder(tmp_path / "out") as folder:
        asyncio.run(merged_folder.write_merged_folder(job, folder, form))
    assert HuggingFaceSource(tmp_path / "out").architecture == "gemma3_text"
    before = load_file(job.base.path / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) - set(before) == {"language_model.lm_head.weight"}
    vision = [name for name in before if "vision" in name]
    assert vision and all(after[name].tobytes() == before[name].tobytes() for name in vision)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    exact, _, bound = exact_logits(job)
    assert np.abs(float64_logits(load(tmp_path / "out"), IDS) - exact).max() < bound


@pytest.mark.filterwarnings("error:.*missing adapter keys.*:UserWarning")
def test_peft_finds_its_layers_and_no_others(job, tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: tests/requirements.txt names it")
    from oracle.transformers_float64 import float64_logits

    with whole_folder(tmp_path / "out") as folder:
        write_peft_folder(job.adapter, folder, lambda *_: None, is_text_tower=True)
    model = peft.PeftModel.from_pretrained(load(job.base.path), tmp_path / "out")
    adapted = [name for name, _ in model.named_modules() if name.endswith("lora_A.default")]
    assert len(adapted) == 5 and not any("vision" in name for name in adapted)
    exact, bound, _ = exact_logits(job)
    assert np.abs(float64_logits(model, IDS) - exact).max() < bound
    # And what PEFT would write of it is read back as the same parameters.
    assert set(open_adapter(tmp_path / "out").key_map) == set(job.adapter.key_map)
