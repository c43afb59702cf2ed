"""Models that are drawn for a comparison: what a store takes them for, the same on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from gpu.drawn_store import add_drawn_model
from gpu.float_copy import add_float_copy
from gpu.shape_model import QWEN3_06B, write_shape
from lanes.every_lane import make_lane
from vox_host.models.catalogue import Catalogue
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_plugin_api.checkpoint import Checkpoint

TINY = {
    **QWEN3_06B,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("weight_format", ["bf16", "q8_0"])
def test_a_drawn_model_is_one_of_the_store_and_holds_the_shape_s_bytes(tmp_path, weight_format):
    folder = add_drawn_model(tmp_path / "models", "drawn", TINY, weight_format, layers=2)
    model = Catalogue(tmp_path / "models").find("drawn")
    assert (model.state, model.architecture) == ("ok", "qwen3")
    assert verify_files(model, lambda *_: None) == len([*folder.iterdir()]) - 1
    shards, whole = (
        Checkpoint.open(folder),
        write_shape(tmp_path / "whole", weight_format, layers=2, shape=TINY),
    )
    expected = Checkpoint.open(whole)
    assert set(shards) == set(expected) and "lm_head.weight" in expected
    assert shards.quant_metadata == expected.quant_metadata
    for name in expected:
        assert bytes(shards.data(name)) == bytes(expected.data(name)), name
        assert (shards[name].dtype, shards[name].shape) == (expected[name].dtype, expected[name].shape)


def test_a_drawn_model_has_one_token_for_each_byte_and_the_digest_of_every_machine(tmp_path):
    folder = add_drawn_model(tmp_path / "models", "drawn", TINY, "bf16", layers=1)
    tokenizer = Tokenizer.load(folder)
    text = "".join(chr(c) for c in range(33, 127))
    ids = tokenizer.encode(text)
    assert len(ids) == len(set(ids)) == len(text) and tokenizer.eos_ids == {256}
    # Records are compared across machines: nothing of this one may be in the files.
    digest = Catalogue(tmp_path / "models").find("drawn").digest
    assert digest == "6f3d9ebd10da5fdcfdcb1dc7b1f96580cc5bb741e5da511c7a0c65ce43fdd261"


def test_a_float_copy_has_what_the_quantised_weights_stand_for(request, tmp_path):
    make_lane("mens-cpu-ref", request.config)
    models = tmp_path / "models"
    source = add_drawn_model(models, "drawn", TINY, "q8_0", layers=1)
    add_float_copy(source, models / "floats")
    assert Catalogue(models).find("floats").state == "ok"
    quantised, floats = Checkpoint.open(source), Checkpoint.open(models / "floats")
    assert not floats.quant_metadata.tensors and set(floats) == set(quantised)
    for name, tensor in quantised.quant_metadata.tensors.items():
        rows, columns = tensor.shape
        blocks = np.frombuffer(quantised.data(name), np.uint8).reshape(-1, 34)
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        weights = scales * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
        found = np.frombuffer(floats.data(name), np.uint16).astype(np.uint32) << 16
        apart = np.abs(found.view(np.float32).reshape(rows, columns) - weights.reshape(rows, columns))
        # Half a unit of bfloat16's eight bits.
        assert np.all(apart <= np.abs(weights.reshape(rows, columns)) * np.float32(2**-8)), name
