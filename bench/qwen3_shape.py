"""Write a GGUF file of Qwen3-0.6B's shape with random weights, as Q8_0 or bf16.

    python bench/qwen3_shape.py --format q8_0 --out /tmp/qwen3-0.6b-q8_0.gguf

Speed does not depend on the values, so a few rows are drawn and repeated. The tokenizer is a
byte-level one whose other tokens nothing produces.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 28, 16, 8, 128, 151936
TYPES = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "bf16": gguf.GGMLQuantizationType.BF16}
FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "bf16": gguf.LlamaFileType.MOSTLY_BF16}
DRAWN_ROWS = 64


def matrix(rows: int, columns: int, kind: gguf.GGMLQuantizationType, rng: np.random.Generator) -> np.ndarray:
    """Random weights [rows, columns] as the bytes of their file rows."""
    drawn = rng.normal(0, columns**-0.5, (DRAWN_ROWS, columns)).astype(np.float32)
    return np.tile(quantize(drawn, kind), (rows // DRAWN_ROWS, 1))


def write(path: Path, weight_format: str) -> None:
    """Write the file; an existing one is replaced."""
    kind, rng = TYPES[weight_format], np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name("Qwen3-0.6B shape, random weights")
    writer.add_file_type(FILE_TYPES[weight_format])
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCABULARY)
    add_tokenizer(writer)

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", matrix(rows, columns, kind, rng), raw_dtype=kind)

    def add_norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    add("token_embd", VOCABULARY, HIDDEN)
    add_norm("output_norm", HIDDEN)
    for i in range(LAYERS):
        layer = f"blk.{i}"
        for norm, width in (
            ("attn_norm", HIDDEN),
            ("ffn_norm", HIDDEN),
            ("attn_q_norm", HEAD_DIM),
            ("attn_k_norm", HEAD_DIM),
        ):
            add_norm(f"{layer}.{norm}", width)
        add(f"{layer}.attn_q", HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{layer}.attn_output", HIDDEN, HEADS * HEAD_DIM)
        add(f"{layer}.ffn_gate", FFN, HIDDEN)
        add(f"{layer}.ffn_up", FFN, HIDDEN)
        add(f"{layer}.ffn_down", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """One token per byte, one merge, and fillers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]
    tokens = [*letters, "aa", "<|endoftext|>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    tokens += [f"filler-{i}" for i in range(VOCABULARY - len(tokens))]
    kinds += [gguf.TokenType.NORMAL] * (VOCABULARY - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(tokens.index("<|endoftext|>"))


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=TYPES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    write(options.out, options.format)


if __name__ == "__main__":
    main()
