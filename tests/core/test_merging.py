"""An adapter folded into its base: the definition bit by bit, and nothing else touched."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lanes import every_lane
from lanes.batches import Sequences
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from lanes.training import a_config, finish, random_adapter
from mens_core.adapters import merging
from mens_core.adapters.apply import make_loras, to_lane
from mens_core.adapters.merging import Merging
from mens_core.adapters.plan import plan_adapter
from mens_core.adapters.served import layer_shapes
from oracle import update_integers as integers
from oracle.adapted_rounding import difference_bound
from oracle.float64_forward import settings_of
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import Checkpoint, read_json_object
from vox_plugin_api.families import parse_config, plan_tensors
from vox_plugin_api.families.tensors import stored_tensors
from vox_plugin_api.messages import RankAndAlpha

CASES = Path(__file__).parents[1] / "cases" / "hand" / "lora"
FAMILIES = list(BY_FAMILY)
SOME = ("q_proj", "layers.1.mlp.down_proj", "lm_head", "embed_tokens")


def bits(values) -> list:
    return np.ascontiguousarray(values, np.float32).view(np.uint32).tolist()


def from_bf16(raw) -> np.ndarray:
    return (np.frombuffer(bytes(raw), "<u2").astype(np.uint32) << 16).view(np.float32)


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, bfloat16 widened."""
    checkpoint = Checkpoint.open(path)
    found = {}
    for name, entry in checkpoint.items():
        raw = bytes(checkpoint.data(name))
        if entry.dtype == "BF16":
            found[name] = from_bf16(raw).reshape(entry.shape)
        else:
            kind = {"F32": "<f4", "F16": "<f2", "U8": "u1"}[entry.dtype]
            found[name] = np.frombuffer(raw, kind).reshape(entry.shape)
    return found


def weights_of(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


class Base:
    """A model on disk, and an adapter for it."""

    def __init__(self, path: Path, targets=SOME, *, rank=4, seed=1, alpha=8.0, exceptions=None) -> None:
        self.path = path
        self.config = parse_config(read_json_object(path / "config.json"))
        self.tensors_plan = plan_tensors(self.config, stored_tensors(Checkpoint.open(path)), source=str(path))
        config = a_config(targets, rank=rank, alpha=alpha).adapter
        config = config.model_copy(update={"exceptions": exceptions or {}})
        self.plan = plan_adapter(config, layer_shapes(self.config))
        self.scale = self.plan.matrices[0].scale
        self.adapter = random_adapter(self.plan.shapes, seed)

    def merge(self, ops, folder: Path, *, form="checkpoint", dtype=None):
        checkpoint = Checkpoint.open(self.path)
        work = Merging(
            self.config, checkpoint, self.tensors_plan, self.plan, self.adapter, ops, form=form, dtype=dtype
        )
        return finish(work.write(folder))

    def parts(self, layer):
        """A and B, so that the weight's update is B A: an embedding's table is the transpose of theirs."""
        a, b = (self.adapter[key] for key in adapter_keys(layer))
        return (b.T, a.T) if layer == "embed_tokens" else (a, b)

    def stored(self, layer) -> str:
        is_tied = layer == "lm_head" and self.config.tie_word_embeddings
        return self.tensors_plan.tensors["embed_tokens.weight" if is_tied else f"{layer}.weight"].name


def by_definition(w, a, b, scale) -> list:
    """docs/numerics.md 13.4 by integers alone: bits of the first 16 rows of w + (C128 of B A) * scale."""
    w, b = w[:16], b[:16]
    products = integers.example_product(bits(b.T), bits(a))
    factor = bits([scale])[0]
    return [
        [integers.add_scaled(y, d, factor) for y, d in zip(row, others, strict=True)]
        for row, others in zip(bits(w), products, strict=True)
    ]


@pytest.fixture(params=every_lane.EXACT)
def lane(request):
    return every_lane.make_training_lane(request.param, request.config)


@pytest.fixture
def kernels(request):
    return every_lane.make_training_lane("mens-cpu-ref", request.config)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapted_matrix_is_the_definition_s_and_all_else_is_copied(tmp_path, lane, family):
    base = Base(write_model(tmp_path / "base", BY_FAMILY[family]))
    merged = base.merge(lane, tmp_path / "merged")
    before, after = read(base.path), read(tmp_path / "merged")
    names = [matrix.name for matrix in base.plan.matrices]
    assert merged.matrices == tuple(names)
    assert merged.unchanged == merged.left_out == ()
    written = {"lm_head.weight" if name == "lm_head" else base.stored(name) for name in names}
    for name in ("lm_head", "embed_tokens", "layers.2.self_attn.q_proj", "layers.1.mlp.down_proj"):
        target = "lm_head.weight" if name == "lm_head" else base.stored(name)
        expected = by_definition(before[base.stored(name)], *base.parts(name), base.scale)
        assert bits(after[target])[:16] == expected
    for name, values in before.items():
        if name not in written:
            assert after[name].tobytes() == values.tobytes(), name
    assert set(after) == set(before) | written


def test_each_layer_is_folded_by_its_own_rank_and_alpha(tmp_path, lane):
    own = {
        "layers.0.self_attn.q_proj": RankAndAlpha(rank=2, alpha=3.0),
        "embed_tokens": RankAndAlpha(rank=3, alpha=1.0),
    }
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]), ["q_proj"], exceptions=own)
    base.merge(lane, tmp_path / "merged")
    before, after = read(base.path), read(tmp_path / "merged")
    scales = {matrix.name: matrix.scale for matrix in base.plan.matrices}
    assert len(set(scales.values())) == 3
    for name, scale in scales.items():
        stored = base.stored(name)
        assert bits(after[stored])[:16] == by_definition(before[stored], *base.parts(name), scale), name


def test_a_rank_beyond_128_is_folded_in_chunks(tmp_path, lane):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]), ["layers.0.self_attn.k_proj"], rank=131)
    base.merge(lane, tmp_path / "merged")
    name = base.stored("layers.0.self_attn.k_proj")
    w, (a, b) = read(base.path)[name], base.parts("layers.0.self_attn.k_proj")
    assert bits(read(tmp_path / "merged")[name])[:4] == by_definition(w[:4], a, b[:4], base.scale)


def test_l6_the_sum_of_all_terms_is_rounded_once_to_bfloat16(tmp_path, lane):
    """Case L6."""
    case = json.loads((CASES / "L6_merge_rounding.json").read_text())
    config = BY_FAMILY["qwen3"]
    tensors = random_tensors(parse_config(config))
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = np.full(tensors[name].shape, from_bf16(bytes.fromhex(case["W_bf16_hex"]))[0])
    base = Base(
        write_model(tmp_path / "base", config, tensors),
        ["layers.0.self_attn.k_proj"],
        rank=len(case["A"]),
        alpha=len(case["A"]) * case["scale"],
    )
    rows, columns = tensors[name].shape
    key = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
    base.adapter[key.format("A")] = np.repeat(np.array(case["A"], np.float32), columns, axis=1)
    base.adapter[key.format("B")] = np.repeat(np.array(case["B"], np.float32), rows, axis=0)
    base.merge(lane, tmp_path / "merged", dtype="bf16")
    checkpoint = Checkpoint.open(tmp_path / "merged")
    expected = next(
        c["expect"]["value"]["merged_bf16_hex"]
        for c in json.loads((CASES.parents[1] / "INDEX.json").read_text())
        if c["id"] == "L6"
    )
    assert bytes(checkpoint.data(name)).hex() == expected * (rows * columns)


def test_bfloat16_is_the_float32_result_rounded_to_nearest_even(tmp_path, kernels):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]))
    base.merge(kernels, tmp_path / "f32", dtype="f32")
    base.merge(kernels, tmp_path / "bf16", dtype="bf16")
    single, half = read(tmp_path / "f32"), Checkpoint.open(tmp_path / "bf16")
    for matrix in base.plan.matrices:
        name = base.stored(matrix.name)
        assert half[name].dtype == "BF16"
        expected = [integers.round_bfloat16(b) for b in np.ravel(bits(single[name])).tolist()]
        assert np.frombuffer(bytes(half.data(name)), "<u2").tolist() == expected


def test_lanes_threads_repeats_and_parts_give_the_same_bytes(tmp_path, request, monkeypatch):
    from mens_cpu_ref.library import load_library

    base = Base(write_model(tmp_path / "base", BY_FAMILY["gemma3"]))
    made = []
    for number, (name, threads, part) in enumerate(
        [
            ("mens-cpu-ref", 1, 16 << 20),
            ("mens-cpu-ref", 2, 16 << 20),
            ("mens-cpu-ref", 2, 16 << 20),
            ("mens-cpu-ref", 2, 1000),
            ("mens-cpu-ref:reference", 1, 16 << 20),
        ]
    ):
        ops = every_lane.make_training_lane(name, request.config)
        load_library().set_threads(threads)
        monkeypatch.setattr(merging, "_PART_BYTES", part)
        merged = base.merge(ops, tmp_path / str(number))
        made.append((weights_of(tmp_path / str(number)), dict(merged.files)))
    assert all(one == made[0] for one in made[1:])


def test_no_more_than_a_part_of_a_matrix_is_in_memory(tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(merging, "_PART_BYTES", 1000)
    asked = []
    embed = type(kernels).embed

    def note(self, table, ids, scale, *, name):
        asked.append(len(ids))
        return embed(self, table, ids, scale, name=name)

    monkeypatch.setattr(type(kernels), "embed", note)
    Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"])).merge(kernels, tmp_path / "merged")
    assert max(asked) * 56 * 4 <= 1400
    assert sum(asked) == 3 * 64 + 40 + 97 + 97


@pytest.mark.parametrize("zero", ["_A", "_B"])
def test_an_update_that_is_zero_leaves_its_matrix_as_it_is(tmp_path, kernels, zero):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["gemma3"]))
    for key in base.adapter:
        if zero in key:
            base.adapter[key] = np.zeros_like(base.adapter[key])
    merged = base.merge(kernels, tmp_path / "merged", dtype="bf16")
    assert merged.matrices == () and not merged.is_untied
    assert merged.unchanged == tuple(matrix.name for matrix in base.plan.matrices)
    before, after = read(base.path), read(tmp_path / "merged")
    assert {n: v.tobytes() for n, v in after.items()} == {n: v.tobytes() for n, v in before.items()}


def test_a_tied_output_matrix_becomes_one_of_its_own(tmp_path, kernels):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["gemma3"]), ["lm_head"])
    merged = base.merge(kernels, tmp_path / "merged")
    assert merged.is_untied
    before, after = read(base.path), read(tmp_path / "merged")
    embedding = before["model.embed_tokens.weight"]
    assert after["model.embed_tokens.weight"].tobytes() == embedding.tobytes()
    assert bits(after["lm_head.weight"])[:16] == by_definition(embedding, *base.parts("lm_head"), base.scale)
    assert (
        not Base(write_model(tmp_path / "b", BY_FAMILY["qwen3"]), ["lm_head"])
        .merge(kernels, tmp_path / "c")
        .is_untied
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_embedding_leaves_the_head_as_it_was_and_is_what_was_served(tmp_path, kernels, family):
    """In float32 the merged table holds the very rows that serving makes, so that all bytes are equal."""
    config = BY_FAMILY[family] | {"tie_word_embeddings": True}
    base = Base(write_model(tmp_path / "base", config), ["embed_tokens"])
    merged = base.merge(kernels, tmp_path / "merged", dtype="f32")
    assert merged.is_untied
    assert merged.matrices == ("embed_tokens",)
    before, after = read(base.path), read(tmp_path / "merged")
    assert after["lm_head.weight"].tobytes() == before["model.embed_tokens.weight"].tobytes()
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    ids = np.random.default_rng(5).integers(0, 97, 60).tolist()
    model = open_model(base.path, kernels).model
    served = model.adapted(make_loras(kernels, base.plan, to_lane(kernels, base.adapter)))
    folded = open_model(tmp_path / "merged", kernels).model
    logits = [kernels.to_host(logits_of(one, ids)).tobytes() for one in (model, served, folded)]
    assert logits[0] != logits[1]
    assert logits[1] == logits[2]


def test_a_stale_head_beside_a_tied_embedding_is_not_taken_for_the_new_one(tmp_path, kernels):
    config = BY_FAMILY["gemma3"]
    tensors = random_tensors(parse_config(config))
    embedding = tensors["model.embed_tokens.weight"]
    path = write_model(tmp_path / "base", config, tensors | {"lm_head.weight": embedding + 1})
    base = Base(path, ["lm_head"])
    base.merge(kernels, tmp_path / "merged")
    expected = by_definition(embedding, *base.parts("lm_head"), base.scale)
    assert bits(read(tmp_path / "merged")["lm_head.weight"])[:16] == expected
    other = Base(path, ["q_proj"])
    other.merge(kernels, tmp_path / "still")
    assert read(tmp_path / "still")["lm_head.weight"].tobytes() == (embedding + 1).tobytes()


# --- a quantised base -----------------------------------------------------------------------------

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
WIDE = {
    "gemma3": BY_FAMILY["gemma3"] | SIZES | {"sliding_window_pattern": 2},
    "qwen3": BY_FAMILY["qwen3"] | SIZES,
}


def quantised(path: Path, family: str) -> Path:
    """As an import from GGUF leaves it: Q8_0 matrices, norms with Gemma's 1 in them."""
    config = WIDE[family]
    stored, described = {}, {}
    for name, values in random_tensors(parse_config(config), 3).items():
        if values.ndim == 1:
            stored[name] = values + np.float32(family == "gemma3")
            continue
        blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        stored[name] = blocks.reshape(-1)
        described[name] = {"format": "q8_0", "shape": list(values.shape)}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    metadata = {"version": 1, "norms_include_one": family == "gemma3", "tensors": described}
    (path / "quant-metadata.json").write_text(json.dumps(metadata))
    save_file(stored, path / "model.safetensors")
    return path


def dequantised(path: Path) -> dict[str, np.ndarray]:
    metadata = json.loads((path / "quant-metadata.json").read_text())["tensors"]
    return {
        name: np.asarray(
            gguf.quants.dequantize(
                values.reshape(metadata[name]["shape"][0], -1), gguf.GGMLQuantizationType.Q8_0
            ),
            np.float32,
        )
        if name in metadata
        else values
        for name, values in read(path).items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_quantised_base_only_adapted_matrices_become_floats(tmp_path, lane, family):
    base = Base(quantised(tmp_path / "base", family))
    base.merge(lane, tmp_path / "merged", dtype="f32")
    (tmp_path / "merged" / "config.json").write_bytes((base.path / "config.json").read_bytes())
    before, after = read(base.path), read(tmp_path / "merged")
    plain = dequantised(base.path)
    changed = {("lm_head.weight" if m.name == "lm_head" else base.stored(m.name)) for m in base.plan.matrices}
    for matrix in base.plan.matrices:
        target = "lm_head.weight" if matrix.name == "lm_head" else base.stored(matrix.name)
        expected = by_definition(plain[base.stored(matrix.name)], *base.parts(matrix.name), base.scale)
        assert bits(after[target])[:16] == expected
    assert all(after[name].tobytes() == before[name].tobytes() for name in before if name not in changed)
    checkpoint = Checkpoint.open(tmp_path / "merged")
    assert checkpoint.quant_metadata.norms_include_one is (family == "gemma3")
    packed = {name for name, values in before.items() if values.dtype == np.uint8}
    assert set(checkpoint.quant_metadata.tensors) == packed - changed
    model = open_model(base.path, lane)
    assert model.plan.prefix == "model."


@pytest.mark.parametrize("family", FAMILIES)
def test_for_hugging_face_everything_is_a_float_and_norms_lack_the_one(tmp_path, kernels, family):
    base = Base(quantised(tmp_path / "base", family), ["q_proj"])
    base.merge(kernels, tmp_path / "merged", form="hugging-face", dtype="f32")
    assert not (tmp_path / "merged" / "quant-metadata.json").exists()
    plain, after = dequantised(base.path), read(tmp_path / "merged")
    assert set(after) == set(plain)
    for name, values in plain.items():
        if values.ndim == 1:
            expected = values - np.float32(family == "gemma3")
        elif "q_proj" in name:
            continue
        else:
            expected = values
        assert after[name].tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_for_gguf_norms_are_float32_and_have_the_one_and_blocks_stay(tmp_path, kernels, family):
    for number, path in enumerate(
        [quantised(tmp_path / "q", family), write_model(tmp_path / "f", WIDE[family], seed=3)]
    ):
        base = Base(path, ["q_proj"])
        base.merge(kernels, tmp_path / f"merged{number}", form="gguf", dtype="f32")
        before, after = read(path), read(tmp_path / f"merged{number}")
        one = np.float32(family == "gemma3" and number == 1)
        for name, values in before.items():
            if values.ndim == 1 and values.dtype == np.float32:
                assert after[name].tobytes() == (values + one).tobytes(), name
            elif "q_proj" not in name:
                assert after[name].tobytes() == values.tobytes()
        metadata = Checkpoint.open(tmp_path / f"merged{number}").quant_metadata
        assert metadata.norms_include_one is (family == "gemma3")


# --- near the adapter that was served ----------------------------------------------------------------


def logits_of(model, ids):
    return model.forward(Sequences().step([(0, ids)], all_logits=True), model.new_cache(2)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_logits_are_near_the_served_adapter_s(tmp_path, kernels, family):
    config = BY_FAMILY[family]
    base = Base(write_model(tmp_path / "base", config), (*SOME, "v_proj", "o_proj", "up_proj"))
    merged = base.merge(kernels, tmp_path / "merged", dtype="f32")
    written = config | ({"tie_word_embeddings": False} if merged.is_untied else {})
    (tmp_path / "merged" / "config.json").write_text(json.dumps(written))
    ids = np.random.default_rng(5).integers(0, 97, 60).tolist()
    model = open_model(base.path, kernels).model
    loras = make_loras(kernels, base.plan, to_lane(kernels, base.adapter))
    served = kernels.to_host(logits_of(model.adapted(loras), ids))
    folded = kernels.to_host(logits_of(open_model(tmp_path / "merged", kernels).model, ids))

    tensors = {name.removeprefix("model."): values for name, values in read(base.path).items()}
    tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"])
    updates = {
        f"{m.name}.weight": (*base.parts(m.name), float(Fraction(base.scale))) for m in base.plan.matrices
    }
    exact, served_bound, merged_bound = difference_bound(
        settings_of(config), tensors, "lm_head.weight", ids, updates
    )
    assert served_bound + merged_bound < 1e-2
    assert np.abs(served - exact).max() < served_bound
    assert np.abs(folded - exact).max() < merged_bound
    assert served.tobytes() != folded.tobytes(), "merging is another model"
    plain = kernels.to_host(logits_of(model, ids))
    assert np.abs(plain - served).max() > 10 * (served_bound + merged_bound), "the update is felt"


# --- what goes wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_a", "in_b", "dtype", "says"),
    [
        (3.0e38, 2.0, "f32", "float32"),
        (1.0e20, 1.0e20, "bf16", "float32"),
        (3.4e38, 1.0, "bf16", "bfloat16"),
    ],
)
def test_a_number_that_the_format_lacks_is_named_by_matrix_and_row(tmp_path, lane, in_a, in_b, dtype, says):
    layer = "layers.1.mlp.up_proj"
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]), [layer], rank=1, alpha=1.0)
    a, b = base.parts(layer)
    a[:], b[:] = 0, 0
    a[0, 7], b[5, 0] = in_a, in_b
    with pytest.raises(BackendError) as caught:
        base.merge(lane, tmp_path / "merged", dtype=dtype)
    assert caught.value.error.code == "merge-not-finite"
    assert caught.value.error.facts == {"matrix": "layers.1.mlp.up_proj", "row": 5, "dtype": says}
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_an_end_half_way_and_a_folder_that_is_there_leave_nothing(tmp_path, kernels, monkeypatch):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]))
    (tmp_path / "there").mkdir()
    with pytest.raises(BackendError) as caught:
        base.merge(kernels, tmp_path / "there")
    assert caught.value.error.code == "folder-exists"

    checkpoint = Checkpoint.open(base.path)
    work = Merging(
        base.config, checkpoint, base.tensors_plan, base.plan, base.adapter, kernels,
        form="checkpoint", dtype=None,
    ).write(tmp_path / "half")  # fmt: skip
    next(work)
    assert (tmp_path / ".half.partial").exists()
    work.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "there"]

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BackendError) as caught:
        base.merge(kernels, tmp_path / "merged")
    monkeypatch.undo()
    assert caught.value.error.code == "save-failed"
    assert "No space left on device" in caught.value.error.message
    assert caught.value.error.remedy == "Make room or name another folder, and repeat the command."
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "there"]


def test_every_byte_is_on_disk_before_the_folder_has_its_name(tmp_path, kernels, monkeypatch):
    done: list[object] = []
    sync, rename = os.fsync, Path.rename

    def note_sync(descriptor):
        sync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def note_rename(path, target):
        done.append("rename")
        return rename(path, target)

    base = Base(quantised(tmp_path / "base", "gemma3"))
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    base.merge(kernels, tmp_path / "merged")
    at, folder = done.index("rename"), tmp_path / "merged"
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "quant-metadata.json"]
    assert set(done[:at]) == {path.stat().st_ino for path in (folder, *folder.iterdir())}
    assert done[at + 1 :] == [tmp_path.stat().st_ino]


def test_a_merged_file_is_read_by_an_outside_reader(tmp_path, kernels):
    base = Base(write_model(tmp_path / "base", BY_FAMILY["qwen3"]))
    base.merge(kernels, tmp_path / "merged")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert {n: v.tobytes() for n, v in found.items()} == {
        n: v.tobytes() for n, v in read(tmp_path / "merged").items()
    }
