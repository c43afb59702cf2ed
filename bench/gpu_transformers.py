"""The other side of gpu.py: a Qwen3 of the same shape in transformers, bf16, random weights."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["decode_theirs", "measure_transformers"]

CONTEXT, STEPS = 128, 32
PROMPTS, LENGTH = 4, 2048


def measure_transformers(shape: Mapping[str, Any], layers: int, batches: list[int]) -> dict[str, Any]:
    """Decode with a static cache, compiled and replayed as a CUDA graph; prefill with SDPA."""
    import torch
    import transformers

    settings = {k: v for k, v in shape.items() if k not in ("architectures", "model_type", "torch_dtype")}
    config = transformers.Qwen3Config(**{**settings, "num_hidden_layers": layers})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    result: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "decode": {},
    }
    with torch.inference_mode():
        ids = torch.randint(0, 1000, (PROMPTS, LENGTH), device="cuda")
        speeds = []
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(ids, logits_to_keep=1)
            torch.cuda.synchronize()
            speeds.append(PROMPTS * LENGTH / (time.perf_counter() - began))
        result["prefill"] = {f"{PROMPTS}x{LENGTH}": float(np.median(speeds[1:]))}
        print(f"transformers, prefill: {result['prefill']}", flush=True)
    for batch in batches:
        result["decode"][str(batch)] = decode_theirs(model, batch, CONTEXT, STEPS)
    return result


def decode_theirs(model: Any, batch: int, context: int, steps: int) -> float:
    """Return tokens/s of greedy steps behind `context` tokens: a static cache, compiled, as a CUDA graph."""
    import torch
    import transformers

    with torch.inference_mode():
        step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        cache = transformers.StaticCache(config=model.config, max_cache_len=256)
        model(
            torch.randint(0, 1000, (batch, context), device="cuda"),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        tokens = torch.zeros((batch, 1), dtype=torch.long, device="cuda")
        position = torch.full((1,), context, dtype=torch.long, device="cuda")
        for i in range(6 + steps):
            if i == 6:
                torch.cuda.synchronize()
                began = time.perf_counter()
            out = step(
                tokens,
                past_key_values=cache,
                use_cache=True,
                cache_position=position,
                position_ids=position.expand(batch, 1),
            )
            tokens = out.logits[:, -1:].argmax(-1).clone()
            position = position + 1
        torch.cuda.synchronize()
        return batch * steps / (time.perf_counter() - began)
