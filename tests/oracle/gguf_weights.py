"""The demo model's GGUF file as float32 weights under Hugging Face names, through `gguf` alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from oracle.float64_forward import Settings

_LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}


class GgufWeights:
    """Weights by name, dequantised when asked for and kept."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self._tensors = {_hf_name(t.name): t for t in self.reader.tensors}
        self.get = cache(self.dequantise)
        self.get64 = cache(lambda name: self.dequantise(name).astype(np.float64))
        """The same values, widened once: 2 GiB when all are asked for."""

    def settings(self) -> Settings:
        def field(name: str) -> object:
            return self.reader.fields[f"gemma3.{name}"].contents()

        layers = field("block_count")
        return Settings(
            family="gemma3",
            layers=layers,
            heads=field("attention.head_count"),
            kv_heads=field("attention.head_count_kv"),
            head_dim=field("attention.key_length"),
            eps=field("attention.layer_norm_rms_epsilon"),
            full_layers=frozenset(i for i in range(layers) if i % 6 == 5),
            window=field("attention.sliding_window"),
            theta=field("rope.freq_base"),
            local_theta=10000.0,
            scale=256**-0.5,
            embed_scale=field("embedding_length") ** 0.5,
            norm_offset=0.0,  # the conversion to GGUF added the 1
        )

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def config(self) -> dict[str, object]:
        """The same settings as a config.json."""
        s = self.settings()
        return {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "hidden_size": round(s.embed_scale**2),
            "intermediate_size": self._tensors["layers.0.mlp.up_proj.weight"].shape[1].item(),
            "num_hidden_layers": s.layers,
            "num_attention_heads": s.heads,
            "num_key_value_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "vocab_size": self._tensors["embed_tokens.weight"].shape[1].item(),
            "max_position_embeddings": self.reader.fields["gemma3.context_length"].contents(),
            "rms_norm_eps": s.eps,
            "rope_theta": s.theta,
            "rope_local_base_freq": s.local_theta,
            "sliding_window": s.window,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
        }

    def dequantise(self, name: str) -> npt.NDArray[np.float32]:
        """Return a weight that is not kept."""
        tensor = self._tensors[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"layers.{parts[1]}.{_LAYER[parts[2]]}.weight"
    return f"{_TOP[parts[0]]}.weight"
