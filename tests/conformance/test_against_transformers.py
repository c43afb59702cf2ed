"""Random small models: our float64 forward, `transformers` in float64, and the lanes agree.

The checkpoints are written by `transformers` itself, so names, settings and shards are what a
hub delivers today.
"""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lanes.batches import Sequences
from lanes.numpy_lane import NumpyLane
from lanes.tiny_models import open_model
from oracle.float64_forward import Settings, forward
from oracle.rounding import logit_bound

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
transformers = pytest.importorskip("transformers")

SHAPES = [  # heads, kv heads, head_dim, hidden size
    (4, 2, 16, 40),
    (4, 4, 8, 32),
    (6, 1, 32, 48),
    (2, 2, 64, 24),
]


def qwen3(shape, tied):
    heads, kv_heads, head_dim, hidden = shape
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=101,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    settings = Settings(
        family="qwen3",
        layers=3,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-6,
        full_layers=frozenset(range(3)),
        window=None,
        theta=1e6,
        scale=head_dim**-0.5,
    )
    return transformers.Qwen3ForCausalLM(config), settings


def gemma3(shape, tied):
    heads, kv_heads, head_dim, hidden = shape
    config = transformers.Gemma3TextConfig(
        hidden_size=hidden,
        intermediate_size=56,
        num_hidden_layers=7,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=101,
        max_position_embeddings=512,
        sliding_window=9,
        query_pre_attn_scalar=20,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    settings = Settings(
        family="gemma3",
        layers=7,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-6,
        full_layers=frozenset({5}),
        window=9,
        theta=1e6,
        local_theta=1e4,
        linear_factor=8.0,
        scale=20**-0.5,
        embed_scale=float(np.float32(hidden**0.5)),
        norm_offset=1.0,
        logit_softcap=3.0,
    )
    return transformers.Gemma3ForCausalLM(config), settings


def randomise(model, seed):
    """Their initialisation is too tame to show a mistake."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.2 if parameter.dim() == 1 else 1.4 / parameter.shape[1] ** 0.5
        mean = 1.0 if parameter.dim() == 1 and "Gemma3" not in type(model).__name__ else 0.0
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + mean)
        assert parameter.dtype == torch.float32, name


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("make", [qwen3, gemma3])
def test_all_three_agree(tmp_path, make, shape, is_tied):
    from oracle.transformers_float64 import float64_logits

    is_sharded = (SHAPES.index(shape) % 2 == 1) is is_tied
    model, settings = make(shape, is_tied)
    randomise(model, seed=SHAPES.index(shape))
    model.save_pretrained(tmp_path, max_shard_size="40KB" if is_sharded else "1GB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) is is_sharded
    ids = np.random.default_rng(11).integers(0, 101, 140).tolist()

    tensors = {name.removeprefix("model."): t for file in files for name, t in load_file(file).items()}
    head = "lm_head.weight" if "lm_head.weight" in tensors else "embed_tokens.weight"
    assert (head == "embed_tokens.weight") is is_tied
    exact = forward(settings, tensors.__getitem__, lambda _: tensors[head], ids)
    theirs = float64_logits(model, ids)
    assert np.abs(exact - theirs).max() < 1e-10

    _, bound = logit_bound(settings, tensors, head, ids)
    assert bound < 1e-2
    found = numpy_logits(tmp_path, ids)
    assert np.abs(found - theirs).max() < bound


def numpy_logits(path, ids):
    loaded = open_model(path, NumpyLane())
    batch = Sequences().step([(0, ids)], all_logits=True)
    return loaded.model.forward(batch, loaded.model.new_cache(2)).logits


def test_a_checkpoint_with_inv_freq_gives_the_same_logits(tmp_path):
    model, _ = qwen3(SHAPES[0], tied=True)
    randomise(model, seed=1)
    model.save_pretrained(tmp_path)
    ids = list(range(1, 40))
    before = numpy_logits(tmp_path, ids)
    tensors = load_file(tmp_path / "model.safetensors")
    for i in range(3):
        name = f"model.layers.{i}.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.full(8, 0.5, np.float32)  # wrong on purpose
    save_file(tensors, tmp_path / "model.safetensors")
    assert numpy_logits(tmp_path, ids).tobytes() == before.tobytes()
    assert any("inv_freq" in note for note in open_model(tmp_path, NumpyLane()).notes)


def test_the_old_spelling_of_the_settings_is_the_same_model(tmp_path):
    model, _ = gemma3(SHAPES[0], tied=True)
    randomise(model, seed=2)
    model.save_pretrained(tmp_path)
    ids = list(range(1, 60))
    before = numpy_logits(tmp_path, ids)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types"):
        del config[key]
    config |= {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert numpy_logits(tmp_path, ids).tobytes() == before.tobytes()


def test_yarn_agrees_with_their_table(tmp_path):
    import torch

    model, settings = qwen3(SHAPES[0], tied=True)
    randomise(model, seed=3)
    config = model.config
    config.rope_parameters = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1000000.0,
    }
    scaled = transformers.Qwen3ForCausalLM(config)
    scaled.load_state_dict(model.state_dict())
    scaled.save_pretrained(tmp_path)
    ids = np.random.default_rng(12).integers(0, 101, 140).tolist()
    with torch.no_grad():
        theirs = scaled.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    tensors = {n.removeprefix("model."): t for n, t in load_file(tmp_path / "model.safetensors").items()}
    rotary = scaled.model.rotary_emb
    settings = dataclasses.replace(
        settings, inv_freq=rotary.inv_freq.double().numpy(), rotary_factor=rotary.attention_scaling
    )
    exact, bound = logit_bound(settings, tensors, "embed_tokens.weight", ids)
    assert np.abs(numpy_logits(tmp_path, ids) - exact).max() < bound
    assert np.abs(theirs - exact).max() < bound
    unscaled = dataclasses.replace(settings, rotary_factor=1.0)
    wrong = forward(unscaled, tensors.__getitem__, lambda _: tensors["embed_tokens.weight"], ids)
    assert np.abs(wrong - exact).max() > bound, "the attention factor is felt"
