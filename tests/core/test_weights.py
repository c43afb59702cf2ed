"""Every tensor of a checkpoint is accounted for: used, unused or missing, each by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lanes.batches import Sequences
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import GEMMA3, QWEN3, open_model, random_tensors, write_model
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError
from vox_plugin_api.families import parse_config, plan_tensors, stored_tensors

CASES = Path(__file__).parents[1] / "cases"
INDEX = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] in ("C7", "C8")]


def plan(path):
    config = parse_config(json.loads((path / "config.json").read_text()))
    return plan_tensors(config, stored_tensors(Checkpoint.open(path)), source=str(path))


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        plan(path)
    assert str(path) in caught.value.message
    assert caught.value.remedy
    return caught.value


def logits(path, ids=(1, 5, 9, 3)):
    model = open_model(path, NumpyLane()).model
    batch = Sequences().step([(0, list(ids))], all_logits=True)
    return model.forward(batch, model.new_cache(1)).logits


def test_the_cases_of_this_part_are_all_here():
    ids = [case["id"] for case in INDEX]
    assert {i: ids.count(i) for i in ids} == {"C7": 3, "C8": 5}


@pytest.mark.parametrize("case", INDEX, ids=lambda c: Path(c["file"]).stem)
def test_a_published_case_gives_its_answer(case):
    path, expect = CASES / case["file"], case["expect"]
    if expect["kind"] == "error":
        error = refusal(path)
        for word in expect["must_mention"]:
            assert word in error.message
        return
    found = plan(path)
    match path.name:
        case "C7_head_dim_ok":
            assert found.tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 32)
            assert found.tensors["layers.0.self_attn.o_proj.weight"].shape == (32, 64)
        case "C8_tied_ok":
            assert found.notes == ()
        case "C8_tied_with_other_head":
            assert len(found.notes) == 1
            assert "lm_head.weight" in found.notes[0]
            assert found.unused == ("lm_head.weight",)
            assert logits(path).tobytes() == logits(path.with_name("C8_tied_ok")).tobytes()
        case "C8_tied_no_embed":
            assert len(found.notes) == 1
            assert "lm_head.weight is used for both" in found.notes[0]
            assert "model.embed_tokens.weight" in found.notes[0]
            assert found.used.count("lm_head.weight") == 1
        case other:
            pytest.fail(f"no answer is checked for {other}")
    assert np.isfinite(logits(path)).all()


def test_a_wrong_head_width_is_explained_in_the_terms_of_the_config():
    error = refusal(CASES / "hand/ckpt/C7_head_dim_removed")
    assert "self_attn.q_proj.weight is [64,32]; config implies [32,32] (head_dim=16 derived)" in error.message
    assert "set head_dim" in error.message


def test_two_shards_give_the_logits_of_one_file():
    whole, sharded = CASES / "hand/ckpt/C7_head_dim_ok", CASES / "hand/ckpt/C5_two_shards_ok"
    assert logits(sharded).tobytes() == logits(whole).tobytes()


def test_what_is_left_over_is_named(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    tensors["extra.thing"] = np.zeros(3, np.float32)
    found = plan(write_model(tmp_path, QWEN3, tensors))
    assert found.unused == ("extra.thing", "model.layers.0.self_attn.q_proj.bias")
    assert any("model.layers.0.self_attn.q_proj.bias" in note for note in found.notes)
    assert any("extra.thing" in note and "not read" in note for note in found.notes)
    assert set(found.used) | set(found.unused) == set(tensors)
    assert found.parameters == sum(t.size for t in tensors.values()) - 64 - 3


def test_all_that_is_missing_is_counted_and_listed(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    missing = sorted(n for n in tensors if "layers.1." in n)
    for name in missing:
        del tensors[name]
    error = refusal(write_model(tmp_path, QWEN3, tensors))
    assert error.code == "weights-missing"
    assert error.facts["missing"] == missing
    assert f"lacks {len(missing)} of the tensors" in error.message


def as_tower(config):
    """`config` as the text tower of a multimodal model."""
    inner = {k: v for k, v in config.items() if k != "architectures"}
    return {"model_type": "some_vision_model", "text_config": inner, "vision_config": {"depth": 1}}


@pytest.mark.parametrize("layout", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
def test_a_text_tower_is_read_and_its_vision_tower_is_not(tmp_path, config, layout):
    plain = random_tensors(parse_config(config))
    tower = {name.replace("model.", layout, 1): t for name, t in plain.items()}
    if "lm_head.weight" in tower and layout == "language_model.model.":
        tower["language_model.lm_head.weight"] = tower.pop("lm_head.weight")
    tower["vision_tower.blocks.0.weight"] = np.full((4, 4), np.nan, np.float32)
    path = write_model(tmp_path / "tower", as_tower(config), tower)
    found = plan(path)
    assert found.unused == ("vision_tower.blocks.0.weight",)
    expected = logits(write_model(tmp_path / "plain", config, plain))
    assert logits(path).tobytes() == expected.tobytes()


def test_two_possible_text_models_are_not_guessed_between(tmp_path):
    tensors = random_tensors(parse_config(GEMMA3), prefix="model.language_model.")
    tensors |= random_tensors(parse_config(GEMMA3), prefix="language_model.model.")
    assert refusal(write_model(tmp_path, as_tower(GEMMA3), tensors)).code == "weights-ambiguous"


def test_an_odd_storage_type_is_refused_by_name(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    error = refusal(write_model(tmp_path, QWEN3, tensors))
    assert error.code == "weights-format"
    for word in ("model.norm.weight", "F64", "bf16".upper()):
        assert word in f"{error.message} {error.facts}"


def quantised(path, names, *, include_one=False):
    """`path` with some matrices as raw Q8_0 blocks; returns the dequantised values."""
    gguf = pytest.importorskip("gguf")
    config = GEMMA3 | {"hidden_size": 64, "intermediate_size": 96}
    tensors = random_tensors(parse_config(config))
    values, table = dict(tensors), {}
    kind = gguf.GGMLQuantizationType.Q8_0
    for name in names:
        blocks = gguf.quants.quantize(tensors[name], kind)
        values[name] = gguf.quants.dequantize(blocks, kind)
        table[name] = {"format": "q8_0", "shape": list(tensors[name].shape)}
        tensors[name] = blocks.reshape(-1)
    if include_one:
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] = tensors[name] + np.float32(1)
    write_model(path, config, tensors)
    metadata = {"version": 1, "tensors": table, "norms_include_one": include_one}
    (path / "quant-metadata.json").write_text(json.dumps(metadata))
    return config, values


@pytest.mark.parametrize("include_one", [False, True])
def test_quantised_matrices_and_norms_with_their_one_are_the_same_model(tmp_path, include_one):
    names = ["model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight"]
    config, values = quantised(tmp_path / "q", names, include_one=include_one)
    found = plan(tmp_path / "q")
    assert found.tensors["embed_tokens.weight"].format == "q8_0"
    assert found.tensors["embed_tokens.weight"].shape == (97, 64)
    expected = logits(write_model(tmp_path / "f", config, values))
    assert logits(tmp_path / "q").tobytes() == expected.tobytes()


def test_blocks_without_metadata_are_not_taken_for_numbers(tmp_path):
    quantised(tmp_path, ["model.embed_tokens.weight"])
    (tmp_path / "quant-metadata.json").unlink()
    error = refusal(tmp_path)
    assert error.code == "weights-format"
    assert "quant-metadata.json" in error.message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_are_widened_exactly(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    half = {
        name: torch.from_numpy(t).to(getattr(torch, dtype))
        for name, t in random_tensors(parse_config(QWEN3)).items()
    }
    save_torch(half, write_model(tmp_path / "half", QWEN3) / "model.safetensors")
    wide = {name: t.float().numpy() for name, t in half.items()}
    expected = logits(write_model(tmp_path / "wide", QWEN3, wide))
    assert logits(tmp_path / "half").tobytes() == expected.tobytes()


def test_an_untied_head_is_used(tmp_path):
    tensors = random_tensors(parse_config(QWEN3))
    before = logits(write_model(tmp_path, QWEN3, tensors))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
    save_file(tensors, tmp_path / "model.safetensors")
    np.testing.assert_allclose(logits(tmp_path), 2 * before, rtol=1e-6)


def test_a_lane_that_takes_a_matrix_in_pieces_gives_their_pages_back(tmp_path, monkeypatch):
    released = []
    monkeypatch.setattr(
        Checkpoint, "release", lambda self, name, nbytes=None: released.append((name, nbytes))
    )

    class InPieces(NumpyLane):
        def load_matrix(self, stored):
            for end in (64, stored.data.nbytes):
                stored.taken(end)
            return super().load_matrix(stored)

    open_model(write_model(tmp_path / "m", QWEN3), InPieces())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert next(n for of, n in released if of == name) == 64
    assert (name, None) in released
