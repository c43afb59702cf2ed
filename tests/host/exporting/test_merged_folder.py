"""A merged model as a folder: imported, loaded, told apart from what it was made of."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from fixtures.adapters import CONFIGS, adapter_tensors, import_base
from lanes.batches import Sequences
from lanes.tiny_models import open_model
from oracle.float64_forward import forward, settings_of
from oracle.rounding import logit_bound
from vox_host.errors import ModelError, UsageError
from vox_host.exporting.merged_folder import write_merged_folder
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.model_manifest import MODEL_MANIFEST, read_manifest
from vox_host.models.tokenizer import Tokenizer
from vox_host.whole_folder import whole_folder
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.messages import AdapterConfig

IDS = np.random.default_rng(2).integers(0, 300, 50).tolist()


def write(job, out, form="checkpoint"):
    with whole_folder(out) as folder:
        return asyncio.run(write_merged_folder(job, folder, form))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def our_logits(folder):
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library

    lane = CpuOps(load_library().kernels)
    model = open_model(folder, lane).model
    batch = Sequences().step([(0, IDS)], all_logits=True)
    return lane.to_host(model.forward(batch, model.new_cache(2)).logits)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_it_is_imported_with_its_own_digest_and_says_what_it_was_made_of(make_job, tmp_path, family):
    job = make_job(family)
    merged = write(job, tmp_path / "out")
    imported = import_base(tmp_path / "home", tmp_path / "out", "merged")
    assert imported.digest != job.base.digest
    manifest = read_manifest(imported.path / MODEL_MANIFEST)
    assert manifest.merged_from is not None
    assert manifest.merged_from.base_digest == job.base.digest
    assert manifest.merged_from.adapter_digest == merged.adapter_digest
    assert imported.merged_from == manifest.merged_from
    assert imported.license == "tiny-1.0"
    assert (imported.path / "license" / "LICENSE").read_text() == "as you like"
    before = read_manifest(job.base.path / MODEL_MANIFEST)
    assert before.merged_from is None
    assert "merged_from" not in (job.base.path / MODEL_MANIFEST).read_text(), "as before there were any"
    same = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    assert all(manifest.files[name] == before.files[name] for name in same)


def test_the_same_merge_is_the_same_model_whatever_its_names(make_job, tmp_path):
    job = make_job("gemma3")
    write(job, tmp_path / "one")
    other = import_base(tmp_path / "home", tmp_path / "base", "called-otherwise")
    write(dataclasses.replace(job, base=other), tmp_path / "two")
    one, two = (HuggingFaceSource(tmp_path / name) for name in ("one", "two"))
    assert one.identity(lambda *_: None)["sha256"] == two.identity(lambda *_: None)["sha256"]


def test_the_template_that_trained_replaces_the_base_s(make_job, tmp_path):
    job = make_job("gemma3")
    job = dataclasses.replace(job, adapter=dataclasses.replace(job.adapter, chat_template="{{ mine }}"))
    write(job, tmp_path / "out")
    source = Tokenizer.load(tmp_path / "out").chat_template
    assert source is not None and source.source == "{{ mine }}"


@pytest.mark.parametrize(
    ("family", "targets", "is_tied"),
    [
        ("gemma3", ["lm_head"], False),
        ("gemma3", ["embed_tokens"], False),
        ("gemma3", ["q_proj"], True),
        ("qwen3", ["lm_head"], False),
    ],
)
def test_the_configuration_says_whether_the_head_is_the_embedding(
    make_job, tmp_path, family, targets, is_tied
):
    write(make_job(family, targets), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is is_tied
    # Read as such: a config that lied would be refused, or would give the base's logits.
    assert np.isfinite(our_logits(tmp_path / "out")).all()


@pytest.mark.parametrize(("dtype", "expected"), [(None, "float32"), ("f32", "float32"), ("bf16", "float32")])
def test_the_configuration_names_the_widest_dtype_there_is(make_job, tmp_path, dtype, expected):
    write(make_job("qwen3", dtype=dtype), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == expected


ATTENTION = ("q_proj", "v_proj", "down_proj")


def exact_tensors(job, targets=ATTENTION):
    """The merged weights in float64, from the folder that the base was made of."""
    tensors = {n.removeprefix("model."): t.astype(np.float64) for n, t in dequantised(job.base.path).items()}
    adapter = adapter_tensors(job.base.path, targets)
    config = AdapterConfig(**job.adapter.config.model_dump())
    if "embed_tokens" in targets:
        # Of tied ends, the other one stays what it was.
        tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
        a, b = (adapter[key].astype(float) for key in adapter_keys("embed_tokens"))
        delta = config.alpha / config.rank * b @ a
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + delta.T
    for key, a in adapter.items():
        if ".lora_A." in key:
            name = (
                key.removeprefix("base_model.model.")
                .removeprefix("model.")
                .replace("lora_A.weight", "weight")
            )
            b = adapter[key.replace("lora_A", "lora_B")]
            tensors[name] = tensors[name] + config.alpha / config.rank * b.astype(float) @ a.astype(float)
    return tensors


def dequantised(folder):
    import gguf

    metadata = folder / "quant-metadata.json"
    described = json.loads(metadata.read_text()) if metadata.exists() else {"tensors": {}}
    found = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if name in described["tensors"]:
            rows = values.reshape(described["tensors"][name]["shape"][0], -1)
            found[name] = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
        else:
            one = described.get("norms_include_one", False) and values.ndim == 1
            found[name] = values.astype(np.float64) - float(one)
    return found


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "quantised", "targets"),
    [
        *((family, quantised, ATTENTION) for family in CONFIGS for quantised in (False, True)),
        *((family, False, (*ATTENTION, "embed_tokens")) for family in CONFIGS),
    ],
)
def test_transformers_loads_it_for_hugging_face_and_gives_the_exact_logits(
    make_job, tmp_path, family, quantised, targets
):
    transformers = pytest.importorskip("transformers")
    from oracle.transformers_float64 import float64_logits

    job = make_job(family, targets, quantised=quantised, dtype="f32")
    merged = write(job, tmp_path / "out", "hugging-face")
    assert merged.left_out == []
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs = float64_logits(model, IDS)

    tensors = exact_tensors(job, targets)
    head = "lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"
    settings = settings_of(CONFIGS[family])
    exact, bound = logit_bound(settings, tensors, head, IDS)
    # The bound allows each weight (K + 12) u; merging and the norms' 1 round each by less than (r + 3) u.
    assert np.abs(theirs - exact).max() < bound
    assert np.abs(our_logits(tmp_path / "out") - exact).max() < 2 * bound
    base = {n.removeprefix("model."): t for n, t in dequantised(job.base.path).items()}
    plain = forward(settings, base.__getitem__, lambda _: base.get(head, base["embed_tokens.weight"]), IDS)
    assert np.abs(plain - exact).max() > 10 * bound, "the update is felt"


def test_out_is_whole_or_not_there(make_job, tmp_path, monkeypatch):
    import os

    job = make_job("gemma3")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError) as caught:
        write(job, tmp_path / "there")
    assert caught.value.code == "out-exists"
    with pytest.raises(UsageError) as caught:
        write(job, tmp_path / "no" / "out")
    assert caught.value.code == "out-folder"
    done = []
    sync = os.fsync

    def full(descriptor):
        done.append(descriptor)
        if len(done) > 6:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError) as caught:
        write(job, tmp_path / "out")
    monkeypatch.undo()
    assert caught.value.code == "export-failed" and "No space left" in caught.value.message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "home", "there", "tuned"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"base_digest": "x", "adapter_digest": "y"}'])
def test_a_merged_from_that_no_merge_wrote_is_refused(make_job, tmp_path, text):
    write(make_job("gemma3"), tmp_path / "out")
    (tmp_path / "out" / "merged-from.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        HuggingFaceSource(tmp_path / "out")
    assert caught.value.code == "merged-from"
