"""GGUF: the adapter beside its base, and the merged model, read by others and by our own importer."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import gguf
import numpy as np
import pytest

from fixtures.adapters import CONFIGS, adapter_tensors
from host.exporting.test_merged_folder import IDS, exact_tensors
from oracle.float64_forward import settings_of
from oracle.rounding import logit_bound
from vox_host.errors import ModelError
from vox_host.exporting.gguf_adapter import write_gguf_adapter
from vox_host.exporting.gguf_model import write_gguf_model
from vox_host.models.gguf_import import GgufSource
from vox_host.models.tokenizer import Tokenizer
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families import parse_config
from vox_plugin_api.messages import RankAndAlpha

TEXTS = ("the path to the hat", " a\n\tb<tool>ab", "thé 🦙 ", "  the  the   a", "")


def config_of(job):
    return parse_config(json.loads((job.base.path / "config.json").read_text()))


def write_model(job, folder):
    folder.mkdir()
    target = folder / "tuned.gguf"
    asyncio.run(write_gguf_model(job, config_of(job), folder, target))
    assert [path.name for path in folder.iterdir()] == ["tuned.gguf"]
    return target


def write_adapter_file(job, target):
    write_gguf_adapter(job.adapter, job.base, config_of(job), target, lambda *_: None)
    return target


@pytest.mark.parametrize("quantised", [False, True], ids=["float", "quantised"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_merged_file_is_imported_as_the_model_that_it_is(make_job, tmp_path, family, quantised):
    job = make_job(family, quantised=quantised, dtype="f32")
    source = GgufSource(write_model(job, tmp_path / "out"))
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    model.mkdir()
    scratch.mkdir()
    source.write(model, scratch, lambda *_: None)
    assert source.license.id == "tiny-1.0"
    found = Checkpoint.open(model)
    base = Checkpoint.open(job.base.path)
    exact = exact_tensors(job)
    for name in base:
        if any(target in name for target in ("q_proj", "v_proj", "down_proj")):
            values = np.frombuffer(bytes(found.data(name)), "<f4")
            assert np.abs(values - exact[name.removeprefix("model.")].ravel()).max() < 1e-5
        elif quantised or not name.endswith("norm.weight"):
            assert bytes(found.data(name)) == bytes(base.data(name)), name
    assert found.quant_metadata.norms_include_one is (family == "gemma3")
    before, after = Tokenizer.load(job.base.path), Tokenizer.load(model)
    for text in TEXTS:
        assert after.encode(text) == before.encode(text), text
    assert after.eos_ids == before.eos_ids
    assert after.chat_template is not None and after.chat_template.source == "{{ messages }}"


def test_an_update_of_a_tied_head_becomes_an_output_matrix(make_job, tmp_path):
    job = make_job("gemma3", ["lm_head"], dtype="bf16")
    reader = gguf.GGUFReader(write_model(job, tmp_path / "out"))
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (types["output.weight"], types["token_embd.weight"]) == ("BF16", "F32")


LAST_LAYER_SLIDES = {
    "sliding_window_pattern": None,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.mark.parametrize(
    ("change", "mention"),
    [({"query_pre_attn_scalar": 25}, "attention_scale"), (LAST_LAYER_SLIDES, "attention_kinds")],
)
def test_what_gguf_can_t_say_is_refused_by_name(make_job, tmp_path, monkeypatch, change, mention):
    monkeypatch.setitem(CONFIGS, "gemma3", {**CONFIGS["gemma3"], **change})
    job = make_job("gemma3")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError) as caught:
        asyncio.run(write_gguf_model(job, config_of(job), tmp_path / "out", tmp_path / "out" / "x.gguf"))
    assert caught.value.code == "gguf-inexpressible" and mention in caught.value.message
    assert list((tmp_path / "out").iterdir()) == []


def test_a_tokenizer_that_gguf_has_no_word_for_is_refused(make_job, tmp_path):
    job = make_job("gemma3")
    path = job.base.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "NFC"}
    path.write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError) as caught:
        asyncio.run(write_gguf_model(job, config_of(job), tmp_path / "out", tmp_path / "out" / "x.gguf"))
    assert caught.value.code == "gguf-tokenizer"


# --- the adapter on its own -------------------------------------------------------------------------


@pytest.mark.parametrize(("stabilised", "alpha"), [(False, 8.0), (True, 16.0)])
def test_the_adapter_file_has_what_llama_cpp_looks_for(make_job, tmp_path, stabilised, alpha):
    targets = ["q_proj", "lm_head", "embed_tokens"]
    job = make_job("qwen3", targets, rank_stabilised=stabilised)
    reader = gguf.GGUFReader(write_adapter_file(job, tmp_path / "a.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter" and fields["general.architecture"] == "qwen3"
    assert fields["adapter.type"] == "lora" and fields["adapter.lora.alpha"] == alpha
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert set(tensors) == {
        f"{base}.weight.lora_{part}"
        for base in ("blk.0.attn_q", "blk.1.attn_q", "output", "token_embd")
        for part in "ab"
    }
    values = adapter_tensors(job.base.path, targets)
    a, b = (values[key] for key in adapter_keys("embed_tokens"))
    assert np.array_equal(tensors["token_embd.weight.lora_a"].data, a.T), "there, rows of A are looked up"
    assert np.array_equal(tensors["token_embd.weight.lora_b"].data, b)
    key = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    assert np.array_equal(tensors["blk.1.attn_q.weight.lora_b"].data, values[key])


@pytest.mark.parametrize(
    ("exceptions", "says"),
    [
        ({"layers.0.self_attn.q_proj": RankAndAlpha(rank=4, alpha=2.0)}, "alphas of their own"),
        ({"layers.0.self_attn.q_proj": RankAndAlpha(rank=2, alpha=8.0)}, None),
    ],
)
def test_layers_may_have_ranks_of_their_own_there_and_one_alpha(make_job, tmp_path, exceptions, says):
    job = make_job("qwen3", ["q_proj"])
    config = job.adapter.config.model_copy(update={"exceptions": exceptions})
    job = dataclasses.replace(job, adapter=dataclasses.replace(job.adapter, config=config))
    if says is None:
        reader = gguf.GGUFReader(write_adapter_file(job, tmp_path / "a.gguf"))
        assert reader.fields["adapter.lora.alpha"].contents() == 8.0
        return
    with pytest.raises(ModelError, match=says) as caught:
        write_adapter_file(job, tmp_path / "a.gguf")
    assert caught.value.code == "gguf-alphas" and "--merged" in (caught.value.remedy or "")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("end", ["lm_head", "embed_tokens"])
def test_an_adapter_on_a_tied_end_has_no_place_there(make_job, tmp_path, end):
    job = make_job("gemma3", ["q_proj", end])
    with pytest.raises(ModelError) as caught:
        write_adapter_file(job, tmp_path / "a.gguf")
    assert caught.value.code == "gguf-tied-head" and "--merged" in (caught.value.remedy or "")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.oracle
@pytest.mark.parametrize("family", list(CONFIGS))
def test_llama_cpp_makes_the_same_tokens(make_job, tmp_path, family):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    job = make_job(family)
    model = llama_cpp.Llama(str(write_model(job, tmp_path / "out")), vocab_only=True, verbose=False)
    ours = Tokenizer.load(job.base.path)
    for text in TEXTS:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == ours.encode(text), text


@pytest.mark.oracle
def test_llama_cpp_gives_the_exact_logits_merged_and_with_the_adapter_beside_the_base(make_job, tmp_path):
    """Qwen3, float32: llama.cpp's GELU is a table of float16 values, and its quantised products round."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    targets = ("q_proj", "v_proj", "down_proj", "embed_tokens")
    job = make_job("qwen3", targets, dtype="f32")
    merged = write_model(job, tmp_path / "merged")
    # The base itself as GGUF: an adapter of which nothing is left.
    nothing = dataclasses.replace(
        job,
        adapter=dataclasses.replace(job.adapter, config=job.adapter.config.model_copy(update={"alpha": 0.0})),
    )
    base = write_model(nothing, tmp_path / "plain")
    lora = write_adapter_file(job, tmp_path / "lora.gguf")

    settings, tensors = settings_of(CONFIGS["qwen3"]), exact_tensors(job, targets)
    exact, bound = logit_bound(settings, tensors, "lm_head.weight", IDS)

    def logits(path, **options):
        model = llama_cpp.Llama(
            str(path), n_ctx=128, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0, **options
        )
        model.eval(IDS)
        return np.array(model.scores[: len(IDS)])

    assert np.abs(logits(merged) - exact).max() < bound
    assert np.abs(logits(base, lora_path=str(lora)) - exact).max() < 2 * bound
    assert np.abs(logits(base) - exact).max() > 10 * bound, "the update is felt"
