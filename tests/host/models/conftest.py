"""Small real models: GGUF files written by the gguf library, Hugging Face folders, the demo model."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fixtures import demo_model as demo_model_file
from vox_host.models.catalogue import Catalogue
from vox_host.models.gguf_import import GgufSource
from vox_host.models.gguf_tokenizer import QWEN2_WORDS
from vox_host.models.importing import import_model

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"
CASES = ROOT / "tests" / "cases"

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 512, 4, 2, 64, 2


@pytest.fixture(scope="session")
def texts():
    return json.loads((FIXTURES / "tokenizer-texts.json").read_text())


@pytest.fixture(scope="session")
def golden():
    return json.loads((FIXTURES / "tokenizer-golden.json").read_text())


@pytest.fixture(scope="session")
def demo_gguf():
    """The demo model's GGUF file."""
    return demo_model_file.demo_gguf()


@pytest.fixture(scope="session")
def demo_model(demo_gguf, tmp_path_factory):
    """The demo model's directory, as the import makes it."""
    store = Catalogue(tmp_path_factory.mktemp("store"))
    source = GgufSource(demo_gguf)
    imported = import_model(source, store, name="demo", accept_license=True, progress=lambda *_: None)
    yield imported.model.path
    shutil.rmtree(store.models_dir)


@pytest.fixture(scope="session")
def sentencepiece():
    """A small vocabulary of SentencePiece's kind, as GGUF metadata holds it."""
    return sentencepiece_vocabulary()


def sentencepiece_vocabulary():
    Type = gguf.TokenType
    tokens = [(name, Type.CONTROL) for name in ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>")]
    tokens += [("\n\n", Type.USER_DEFINED), ("  ", Type.USER_DEFINED)]
    tokens += [(f"<0x{byte:02X}>", Type.BYTE) for byte in range(256)]
    words = (
        "he th the ▁the an in ▁a nd and ▁and er re ea at ▁t ou hat that ▁that house ho us se ll hell hello"
    )
    tokens += [(piece, Type.NORMAL) for piece in [*words.split(), "lo", "▁hello", "tt", "ttt"]]
    tokens += [(letter, Type.NORMAL) for letter in "▁etaoinshrdlu"]
    scores = [-1000.0 if kind != Type.NORMAL else -float(i) for i, (_, kind) in enumerate(tokens)]
    return [t for t, _ in tokens], scores, [int(kind) for _, kind in tokens]


@pytest.fixture(scope="session")
def byte_level(texts):
    """A tokenizer of Qwen's kind, trained on a few texts by the tokenizers library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=701,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tensor_names():
    """(name, rows, columns) of every matrix and (name, length) of every vector, as GGUF calls them."""
    matrices, vectors = [], [("output_norm", HIDDEN)]
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        matrices += [
            (f"{block}.attn_q", HEADS * HEAD_DIM, HIDDEN),
            (f"{block}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN),
            (f"{block}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN),
            (f"{block}.attn_output", HIDDEN, HEADS * HEAD_DIM),
            (f"{block}.ffn_gate", INNER, HIDDEN),
            (f"{block}.ffn_up", INNER, HIDDEN),
            (f"{block}.ffn_down", HIDDEN, INNER),
        ]
        vectors += [(f"{block}.attn_q_norm", HEAD_DIM), (f"{block}.attn_k_norm", HEAD_DIM)]
        vectors += [(f"{block}.attn_norm", HIDDEN), (f"{block}.ffn_norm", HIDDEN)]
    return matrices, vectors


BLOCK_TYPES = [
    gguf.GGMLQuantizationType.Q6_K,
    gguf.GGMLQuantizationType.Q5_K,
    gguf.GGMLQuantizationType.Q4_K,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q5_0,
    gguf.GGMLQuantizationType.Q4_0,
]


@pytest.fixture(scope="session")
def write_gguf(sentencepiece, byte_level):
    """Return a function that writes a small complete model and returns what it put in."""

    def write(path, architecture="gemma3", *, seed=1, head=False, drop=(), extra=(), keys=None):
        generator = np.random.default_rng(seed)
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_license("apache-2.0")
        writer.add_context_length(1024)
        writer.add_embedding_length(HIDDEN)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        rows = add_tokenizer(writer, architecture)
        if architecture == "gemma3":
            writer.add_sliding_window(512)
        for key, value in (keys or {}).items():
            add = writer.add_string if isinstance(value, str) else writer.add_uint32
            add(key, value)
        matrices, vectors = tensor_names()
        # First and with an odd number of rows: what follows it lies unaligned.
        matrices.insert(0, ("token_embd", rows, HIDDEN))
        if head:
            matrices.append(("output", rows, HIDDEN))
        if architecture == "gemma3":
            for layer in range(LAYERS):
                names = (f"blk.{layer}.post_attention_norm", f"blk.{layer}.post_ffw_norm")
                vectors += [(name, HIDDEN) for name in names]
        vectors += [(name, HIDDEN) for name in extra]
        written = {}
        for i, (name, count, columns) in enumerate(matrices):
            if name in drop:
                continue
            kind = BLOCK_TYPES[i % len(BLOCK_TYPES)]
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = generator.integers(0, 256, (count, columns // block * size), dtype=np.uint8)
            written[f"{name}.weight"] = (kind.name, data)
        for name, length in vectors:
            if name not in drop:
                written[f"{name}.weight"] = ("F32", generator.standard_normal(length).astype(np.float32))
        for name, (kind, data) in written.items():
            raw = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, data, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return written

    def add_tokenizer(writer, architecture):
        if architecture == "gemma3":
            tokens, scores, types = sentencepiece
            writer.add_tokenizer_model("llama")
            writer.add_token_list(tokens)
            writer.add_token_scores(scores)
            writer.add_token_types(types)
            writer.add_bos_token_id(2)
            writer.add_eos_token_id(1)
            writer.add_unk_token_id(3)
            writer.add_pad_token_id(0)
            writer.add_add_bos_token(True)
            writer.add_add_space_prefix(False)
            return len(tokens)
        describe_byte_level(writer, byte_level)
        return byte_level.get_vocab_size()

    return write


def describe_byte_level(writer, tokenizer):
    """Describe a byte-level tokenizer as llama.cpp's converter does."""
    described = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.get)
    special = {token["content"]: token["special"] for token in described["added_tokens"]}
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[special.get(token)] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in described["model"]["merges"]])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_eot_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)


@pytest.fixture(scope="session")
def add_byte_level():
    """Return the function that describes a byte-level tokenizer to a GGUFWriter."""
    return describe_byte_level


@pytest.fixture
def hugging_face_folder(tmp_path):
    """A complete tiny model in two shards, with a tokenizer and a licence."""
    folder = tmp_path / "tiny-qwen3"
    shutil.copytree(CASES / "hand/ckpt/C5_two_shards_ok", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CASES / "hand/tok/T1_template_bos" / name, folder / name)
    (folder / "LICENSE").write_text("Do what you like.\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@pytest.fixture
def seeded():
    return random.Random(20261130)


@pytest.fixture(scope="session")
def run_python():
    """Return a function that runs a Python text in a process of its own."""

    def run(text, *arguments, **environment):
        return subprocess.run(
            [sys.executable, "-c", text, *map(str, arguments)],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run
