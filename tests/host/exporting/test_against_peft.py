"""PEFT itself: what it writes gives its logits here, and what is exported gives ours there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fixtures.adapters import CONFIGS, adapter_tensors, write_base
from lanes.batches import Sequences
from lanes.tiny_models import open_model
from mens_core.adapters import copies
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.adapters.served import read_adapter
from oracle.adapted_rounding import difference_bound
from oracle.float64_forward import settings_of
from vox_host.errors import ModelError
from vox_host.exporting.peft_export import write_peft_folder
from vox_host.runs.open import open_adapter
from vox_host.whole_folder import whole_folder
from vox_plugin_api.backend import BackendError

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="peft is not installed: tests/requirements.txt names it")

IDS = np.random.default_rng(2).integers(0, 300, 40).tolist()


def their_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def randomise(model, seed=3):
    """A fresh adapter is zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * 0.5 / parameter.shape[1] ** 0.5
                )


def served_logits(base, source):
    """As a worker serves it, unmerged."""
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps

    lane = CpuTrainingOps(load_library())
    model = open_model(base, lane).model
    adapter = read_adapter(source.params(), model.config)
    adapted = model.adapted(make_loras(lane, adapter.plan, to_lane(lane, adapter.tensors)))
    batch = Sequences().step([(0, IDS)], all_logits=True)
    return lane.to_host(adapted.forward(batch, adapted.new_cache(2)).logits), adapter


def bound_of(base, family, adapter):
    tensors = {n.removeprefix("model."): t for n, t in load_file(base / "model.safetensors").items()}
    tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
    updates = {}
    for matrix in adapter.plan.matrices:
        a, b = (adapter.tensors[key] for key in matrix.keys)
        if matrix.is_embedding:
            a, b = b.T, a.T
        updates[f"{matrix.name}.weight"] = (a, b, matrix.scale)
    exact, served, _ = difference_bound(settings_of(CONFIGS[family]), tensors, "lm_head.weight", IDS, updates)
    return exact, served


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", {"target_modules": "all-linear"}),
        ("qwen3", {"target_modules": ["q_proj", "up_proj"], "use_rslora": True, "layers_to_transform": [1]}),
        ("qwen3", {"target_modules": r".*layers\.1\.mlp\.(up|gate)_proj", "lora_dropout": 0.1}),
        ("qwen3", {"target_modules": ["lm_head", "v_proj"]}),
        ("qwen3", {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_rslora": True}),
        ("gemma3", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("gemma3", {"target_modules": r".*(embed_tokens|layers\.1\..*up_proj)"}),
        (
            "gemma3",
            {
                "target_modules": ["q_proj", "v_proj", "up_proj", "embed_tokens"],
                "rank_pattern": {
                    "layers.0.self_attn.q_proj": 2,
                    r".*\.1\.self_attn\.q_proj": 7,
                    "^model.embed_tokens": 3,
                },
                "alpha_pattern": {r"layers\.\d\.mlp.up_proj": 3.5, "v_proj": 1},
                "exclude_modules": ["layers.0.mlp.up_proj"],
                "use_rslora": True,
            },
        ),
        (
            "qwen3",
            {
                "target_modules": ["q_proj", "k_proj", "o_proj"],
                "rank_pattern": {"q_proj": 2, "k_proj": 3, "o_proj": 5},
                "alpha_pattern": {"o_proj": 20},
                "layers_to_transform": [0],
                "layers_pattern": "layers",
            },
        ),
    ],
)  # fmt: skip
def test_an_adapter_that_peft_wrote_gives_peft_s_logits(tmp_path, family, options):
    from oracle.transformers_float64 import float64_logits

    base = write_base(tmp_path / "base", family)
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(their_model(base), config)
    randomise(model)
    model.save_pretrained(tmp_path / "adapter")
    source = open_adapter(tmp_path / "adapter")
    ours, adapter = served_logits(base, source)
    assert ours.tobytes() == served_logits(base, open_adapter(tmp_path / "adapter"))[0].tobytes()
    theirs = float64_logits(model, IDS)
    exact, bound = bound_of(base, family, adapter)
    assert bound < 1e-2
    # Theirs is float64 but for the scale, which is float32 here.
    assert np.abs(theirs - exact).max() < bound
    assert np.abs(ours - theirs).max() < bound
    with model.disable_adapter():
        assert np.abs(float64_logits(model, IDS) - theirs).max() > 10 * bound, "the update is felt"
    # Written again by us, it is the same adapter to both.
    with whole_folder(tmp_path / "again") as folder:
        write_peft_folder(source, folder, lambda *_: None)
    again, _ = served_logits(base, open_adapter(tmp_path / "again"))
    assert again.tobytes() == ours.tobytes()
    other = peft.PeftModel.from_pretrained(their_model(base), tmp_path / "again")
    assert np.abs(float64_logits(other, IDS) - exact).max() < bound


@pytest.mark.parametrize("family", list(CONFIGS))
def test_an_adapter_of_ours_gives_ours_in_peft(tmp_path, family):
    from fixtures.runs import a_checkpoint, a_run, some_facts
    from mens_core.adapters.file import safetensors_bytes
    from oracle.transformers_float64 import float64_logits
    from vox_host.runs.manifest import BaseModelRecord
    from vox_host.runs.publish import publish_adapter

    base = write_base(tmp_path / "base", family)
    targets = ("q_proj", "up_proj", "lm_head", "embed_tokens")
    tensors = adapter_tensors(base, targets)
    layers = sorted({key.split(".lora_")[0] for key in tensors}, key=lambda key: f"{key}.lora_".encode())
    order = tuple(key.removeprefix("base_model.model.").removeprefix("model.") for key in layers)
    run = a_run(tmp_path / "run")
    checkpoint, _ = a_checkpoint(run.checkpoint(1), safetensors_bytes(tensors))
    facts = some_facts(
        base_model=BaseModelRecord(name="base", digest="ab" * 32, path=str(base)),
        targets=targets,
        layer_order=order,
        base_key_map={layer: f"model.{layer}.weight" for layer in order},
    )
    publish_adapter(run, checkpoint, facts)
    source = open_adapter(run.path)
    ours, adapter = served_logits(base, source)
    exact, bound = bound_of(base, family, adapter)
    with whole_folder(tmp_path / "exported") as folder:
        write_peft_folder(source, folder, lambda *_: None)
    # The run's own folder is one of PEFT's too.
    for path in (tmp_path / "exported", run.path):
        model = peft.PeftModel.from_pretrained(their_model(base), path)
        theirs = float64_logits(model, IDS)
        assert np.abs(theirs - exact).max() < bound
        assert np.abs(ours - theirs).max() < bound


def test_an_adapter_of_the_older_layout_is_exported_under_whole_names(tmp_path):

    from host.runs.test_older_layout import write
    from oracle.transformers_float64 import float64_logits

    base = write_base(tmp_path / "base", "qwen3")
    ours = adapter_tensors(base, ["layers.1.self_attn.q_proj", "lm_head"])
    names = {"lm_head": "lm_head", "layers.1.self_attn.q_proj": "model.layers.1.self_attn.q_proj"}
    tensors = {
        f"{layer}.lora_{part.lower()}.weight": ours[f"base_model.model.{module}.lora_{part}.weight"]
        for layer, module in names.items()
        for part in "AB"
    }
    manifest = {
        "rank": 4,
        "alpha": 8,
        "base_model": str(base),
        "base_key_map": {layer: f"{module}.weight" for layer, module in names.items()},
    }
    write(tmp_path / "older", manifest, tensors)
    source = open_adapter(tmp_path / "older")
    with whole_folder(tmp_path / "exported") as folder:
        write_peft_folder(source, folder, lambda *_: None)
    logits, adapter = served_logits(base, source)
    exact, bound = bound_of(base, "qwen3", adapter)
    theirs = float64_logits(peft.PeftModel.from_pretrained(their_model(base), tmp_path / "exported"), IDS)
    assert np.abs(theirs - exact).max() < bound
    assert np.abs(logits - theirs).max() < bound


def test_an_order_of_patterns_that_peft_s_file_lost_is_refused_as_peft_refuses_it(tmp_path):
    """PEFT sorts the entries as it saves them, so that another one comes first in the file."""
    base = write_base(tmp_path / "base", "qwen3")
    patterns = {"layers.0.self_attn.q_proj": 2, r".*\.q_proj": 7}
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], rank_pattern=patterns)
    peft.get_peft_model(their_model(base), config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(RuntimeError, match="size mismatch"):
        peft.PeftModel.from_pretrained(their_model(base), tmp_path / "adapter")
    with pytest.raises(ModelError) as caught:
        open_adapter(tmp_path / "adapter")
    assert "with rank 7 it would be" in caught.value.message


@pytest.mark.parametrize("family", list(CONFIGS))
def test_copies_of_the_base_that_peft_saves_are_held_against_it(tmp_path, family, monkeypatch):
    # Some rows at a time, as of tables that are large.
    monkeypatch.setattr(copies, "_PART_BYTES", 5000)
    base = write_base(tmp_path / "base", family)
    targets = ["lm_head", "embed_tokens", "q_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=targets)
    peft.get_peft_model(their_model(base), config).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    source = open_adapter(tmp_path / "adapter")
    assert set(source.base_copies) >= {"embed_tokens"}
    assert set(source.base_copies.values()) | set(source.key_map.values()) == set(tensors)
    for layer, key in source.base_copies.items():
        changed = tensors[key].copy()
        changed[211, 3] = np.nextafter(changed[211, 3], np.float32(9))
        save_file({**tensors, key: changed}, file)
        with pytest.raises(BackendError) as caught:
            load(base, open_adapter(tmp_path / "adapter"))
        assert caught.value.error.code == "adapter-base"
        assert f"copy of {layer}" in caught.value.error.message
        assert caught.value.error.facts["row"] == 211
        save_file({**tensors, key: tensors[key][:-1].copy()}, file)
        with pytest.raises(BackendError) as caught:
            load(base, open_adapter(tmp_path / "adapter"))
        assert caught.value.error.code == "adapter-tensors"
    save_file(tensors, file)
    report = load(base, open_adapter(tmp_path / "adapter"))
    assert not any("quantised" in warning for warning in report.warnings)


def test_a_copy_is_not_compared_with_a_quantised_base_and_one_without_an_update_is_refused(tmp_path):
    base = write_base(tmp_path / "base", "qwen3", quantised=True)
    plain = write_base(tmp_path / "plain", "qwen3")
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["lm_head"])
    peft.get_peft_model(their_model(plain), config).save_pretrained(tmp_path / "adapter")
    source = open_adapter(tmp_path / "adapter")
    assert any("lm_head" in w and "not compared" in w for w in load(base, source).warnings)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    copy = source.base_copies["lm_head"]
    save_file(tensors | {copy.replace("lm_head", "model.embed_tokens"): tensors[copy]}, file)
    with pytest.raises(ModelError) as caught:
        open_adapter(tmp_path / "adapter")
    assert "have no update" in caught.value.message


def load(base, source):
    """What a worker says of it."""
    from mens_core.backend import MensBackend
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps
    from vox_plugin_api import messages as m
    from vox_plugin_api.backend import BackendInfo

    info = BackendInfo("mens-test", "1", "cpu", ("canonical",), ("generate", "adapters"))
    backend = MensBackend(info, lambda params: CpuTrainingOps(load_library()), lambda: None)
    params = m.LoadModelParams(model_dir=str(base), model_digest="ab" * 32, adapter=source.params())
    (*_, reply) = backend.load_model(params)
    return reply.result


def test_our_recorded_defaults_are_those_that_peft_writes(tmp_path):
    """What a field means is known for one version; a field that a newer one adds shows here."""
    peft.LoraConfig(r=4, task_type="CAUSAL_LM").save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    recorded = Path(__file__).parents[1] / "runs" / "peft-0.21-defaults.json"
    expected = json.loads(recorded.read_text()) | {"inference_mode": False}
    for name in ("r", "lora_alpha", "target_modules"):
        del written[name]
    assert written == expected
