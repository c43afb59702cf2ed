"""The other side of inference_gpu.py: a Qwen3 of the same shape in transformers, bf16, random weights.

A decode step is transformers' own modules over its static cache, greedy, replayed as a CUDA graph.
`graph`: the kernels that torch runs eagerly, captured as they are. `layers`: each decoder layer compiled by
torch.compile (all layers are one compiled function, given other weights and another cache) and the head
likewise, then captured: what compiling the whole model gives, ready in seconds instead of minutes.
`compile` is the whole model by `torch.compile(mode="reduce-overhead")`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["WAYS", "decode_theirs", "make_step", "measure_transformers"]

CONTEXT, STEPS, ROOM = 160, 32, 256
PROMPTS, LENGTH = 4, 2048
WAYS = ("graph", "layers", "compile")
WARM = 6


def measure_transformers(
    shape: Mapping[str, Any],
    layers: int,
    batches: Sequence[int],
    ways: Sequence[str] = ("graph", "layers"),
    rounds: int = 3,
) -> dict[str, Any]:
    """Prefill with SDPA, and decode behind 160 tokens: tokens/s, medians; and what a way took to set up."""
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
        "set_up_s": {},
    }
    with torch.inference_mode():
        ids = torch.randint(0, 1000, (PROMPTS, LENGTH), device="cuda")
        speeds = []
        for _ in range(rounds + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(ids, logits_to_keep=1)
            torch.cuda.synchronize()
            speeds.append(PROMPTS * LENGTH / (time.perf_counter() - began))
        result["prefill"] = {f"{PROMPTS}x{LENGTH}": float(np.median(speeds[1:]))}
        print(f"transformers, prefill: {result['prefill']}", flush=True)
    for way in ways:
        result["decode"][way], result["set_up_s"][way] = {}, {}
        for batch in batches:
            speed, seconds = decode_theirs(model, batch, CONTEXT, STEPS, way=way, rounds=rounds)
            result["decode"][way][str(batch)] = speed
            result["set_up_s"][way][str(batch)] = seconds
            print(
                f"transformers, {way}, batch {batch}: {speed:.0f} tokens/s, set up {seconds:.1f} s",
                flush=True,
            )
    return result


def decode_theirs(
    model: Any, batch: int, context: int, steps: int, *, way: str = "layers", rounds: int = 1
) -> tuple[float, float]:
    """Return tokens/s of greedy steps behind `context` tokens, and the seconds until the first replay."""
    import torch

    with torch.no_grad():
        began = time.perf_counter()
        step = make_step(model, batch, context, way)
        tokens = torch.zeros((batch, 1), dtype=torch.long, device=model.device)
        position = torch.full((batch, 1), context, dtype=torch.long, device=model.device)

        def advance() -> None:
            tokens.copy_(step(tokens, position))
            position.add_(1)

        replay = advance if way == "compile" else _captured(advance)
        for _ in range(WARM):
            replay()
        torch.cuda.synchronize()
        set_up = time.perf_counter() - began
        speeds = []
        for _ in range(rounds):
            position.fill_(context)
            _rewind(step.cache, context)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                replay()
            torch.cuda.synchronize()
            speeds.append(batch * steps / (time.perf_counter() - began))
    return float(np.median(speeds)), set_up


class _Step:
    """tokens, positions [batch, 1] to the next tokens; the cache holds what came before."""

    def __init__(self, cache: Any, call: Callable[[Any, Any], Any]) -> None:
        self.cache = cache
        self._call = call

    def __call__(self, tokens: Any, position: Any) -> Any:
        return self._call(tokens, position)


def make_step(model: Any, batch: int, context: int, way: str) -> _Step:
    """Return a step behind `context` drawn tokens, prefilled into a static cache of its own."""
    import torch
    import transformers

    cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    torch.manual_seed(3)
    ids = torch.randint(0, 1000, (batch, context), device=model.device)
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if way == "layers":
        return _Step(cache, _by_layers(model, cache))

    def whole(tokens: Any, position: Any) -> Any:
        out = model(tokens, past_key_values=cache, use_cache=True, position_ids=position)
        return out.logits[:, -1:].argmax(-1)

    if way == "compile":
        return _Step(cache, torch.compile(whole, mode="reduce-overhead", fullgraph=True, dynamic=False))
    return _Step(cache, whole)


def _by_layers(model: Any, cache: Any) -> Callable[[Any, Any], Any]:
    """The forward of `Qwen3ForCausalLM` by its own modules; each layer is the same compiled function."""
    import torch
    from transformers.cache_utils import Cache

    inner = model.model
    layers = list(inner.layers)
    caches = [_alone(Cache(layers=[layer])) for layer in cache.layers]

    def one(layer: Any, hidden: Any, mask: Any, position: Any, rotary: Any, own: Any) -> Any:
        return layer(
            hidden,
            attention_mask=mask,
            position_ids=position,
            past_key_values=own,
            use_cache=True,
            position_embeddings=rotary,
        )

    def last(hidden: Any) -> Any:
        return model.lm_head(inner.norm(hidden))[:, -1:].argmax(-1)

    compiled = torch.compile(one, dynamic=False)
    head = torch.compile(last, dynamic=False)
    places = torch.arange(ROOM, device=model.device)

    def step(tokens: Any, position: Any) -> Any:
        hidden = inner.embed_tokens(tokens)
        rotary = inner.rotary_emb(hidden, position)
        mask = (places[None, :] <= position)[:, None, None, :]
        indices = [layer.self_attn.layer_idx for layer in layers]
        try:
            for layer, own in zip(layers, caches, strict=True):
                # Each has a cache of one layer: an index of its own would be compiled anew.
                layer.self_attn.layer_idx = 0
                hidden = compiled(layer, hidden, mask, position, rotary, own)
        finally:
            for layer, index in zip(layers, indices, strict=True):
                layer.self_attn.layer_idx = index
        return head(hidden)

    return step


def _alone(cache: Any) -> Any:
    """The same memory, without the mark that ties a compiled function to one address."""
    for layer in cache.layers:
        for name in ("keys", "values", "cumulative_length"):
            tensor = getattr(layer, name, None)
            if hasattr(tensor, "_dynamo_static_input_type"):
                del tensor._dynamo_static_input_type
    return cache


def _rewind(cache: Any, length: int) -> None:
    for layer in cache.layers:
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length.fill_(length)


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
