"""Programs that measure one side in a process of its own; each prints one JSON object.

`vox` and `read` run in the installed plugin's environment, without the host: model directory in,
tokens out. `llama` is llama.cpp through llama-cpp-python, `transformers` a model of the same shape
with random float32 weights (its speed does not depend on them).
"""

from __future__ import annotations

READ = """
import json, sys, time
import numpy as np
from mens_cpu_ref.arrays import WeightMemory, address_of
from mens_cpu_ref.library import load_library
library = load_library()
library.set_threads(int(sys.argv[1]))
memory, folded, times = WeightMemory().take(1 << 30), np.zeros(1, np.uint64), []
memory.fill(1)
for _ in range(7):
    began = time.perf_counter()
    library.kernels["read"](address_of(memory), memory.nbytes, address_of(folded))
    times.append(time.perf_counter() - began)
speed = [2**30 / t / 1e9 for t in sorted(times)]
print(json.dumps({"best_gb_per_s": speed[0], "median_gb_per_s": speed[3]}))
"""

VOX = """
import json, resource, sys, time
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.plugin import backend
from vox_plugin_api import messages as m
path, threads, tokens, prefill, users = sys.argv[1], *map(int, sys.argv[2:6])
load_matrix, held = CpuOps.load_matrix, []

def counted(self, stored):
    # What a matrix takes in memory, which need not be what it takes in the file.
    matrix = load_matrix(self, stored)
    held.append(matrix.nbytes)
    return matrix

CpuOps.load_matrix = counted
lane = backend()
began = time.perf_counter()
for _ in lane.load_model(m.LoadModelParams(model_dir=path, model_digest="0" * 64, threads=threads,
                                           context_length=2048)):
    pass
load_s = time.perf_counter() - began
greedy = m.SamplingParams(temperature=0.0)
ids = [(5 * i) % 20000 + 100 for i in range(2048)]

def start(count, new, first=0, sampling=greedy):
    # Another beginning for each prompt that is timed: what earlier ones computed would be reused.
    prompt = ids[first : first + count]
    return lane.generate(m.GenerateParams(token_ids=prompt, max_tokens=new, sampling=sampling))

def stamps(streams):
    # When each token of any stream came; the streams take turns, as in the worker's loop.
    times, running = [], list(streams)
    while running:
        for stream in list(running):
            reply = next(stream, None)
            if reply is None or reply.result is None:
                continue
            times += [time.perf_counter()] * len(reply.result.tokens)
            if reply.result.finish_reason is not None:
                running.remove(stream)
    return times

def decode(streams):
    times = stamps(streams)
    first = len(streams)
    return (len(times) - first) / (times[-1] - times[first - 1])

stamps([start(8, 4)])
result = {"load_s": load_s, "weight_bytes": sum(held)}
result["decode_tokens_per_s"] = max(decode([start(8, tokens + 1)]) for _ in range(2))
if prefill:
    times = []
    for first in (1, 2):
        began = time.perf_counter()
        times.append(stamps([start(prefill, 1, first)])[0] - began)
    result["prefill_tokens_per_s"] = prefill / min(times)
if users:
    result["decode_8_tokens_per_s"] = decode([start(8 + i, tokens + 1) for i in range(users)])
    # Drawn tokens need every output: a greedy one of up to four sequences is found without most of them.
    drawn = m.SamplingParams(temperature=0.8, seed=7)
    result["drawn_tokens_per_s"] = max(decode([start(8, tokens + 1, 0, drawn)]) for _ in range(2))
    result["drawn_8_tokens_per_s"] = decode([start(8 + i, tokens + 1, 0, drawn) for i in range(users)])
result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(result))
"""

LLAMA = """
import json, resource, sys, time
from llama_cpp import Llama
path, threads, tokens, prefill = sys.argv[1], *map(int, sys.argv[2:5])
began = time.perf_counter()
llama = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
result = {"load_s": time.perf_counter() - began}
ids = [(5 * i) % 20000 + 100 for i in range(2048)]

def decode():
    llama.reset()
    llama.eval(ids[:8])
    began = time.perf_counter()
    for _ in range(tokens):
        llama.eval([llama.sample(temp=0.0)])
    return tokens / (time.perf_counter() - began)

def read():
    llama.reset()
    began = time.perf_counter()
    llama.eval(ids[:prefill])
    return prefill / (time.perf_counter() - began)

result["decode_tokens_per_s"] = max(decode() for _ in range(2))
if prefill:
    result["prefill_tokens_per_s"] = max(read() for _ in range(2))
result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(result))
"""

TRANSFORMERS = """
import json, resource, sys, time
import torch
from transformers import AutoModelForCausalLM, AutoConfig, Gemma3TextConfig, Qwen3Config
config, threads, tokens, prefill = json.loads(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(threads)
kind = Gemma3TextConfig if config["model_type"] == "gemma3_text" else Qwen3Config
allowed = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype", "rope_scaling")}
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(kind(**allowed), dtype=torch.float32)
model = model.to_empty(device="cpu").eval()
with torch.no_grad():
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.fill_(0.01)
ids = torch.tensor([[(5 * i) % 20000 + 100 for i in range(prefill)]])
result = {}
with torch.inference_mode():
    def read():
        began = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return prefill / (time.perf_counter() - began)
    result["prefill_tokens_per_s"] = max(read() for _ in range(2))
    out = model(ids[:, :8], use_cache=True)
    began = time.perf_counter()
    for _ in range(tokens):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=out.past_key_values, use_cache=True)
    result["decode_tokens_per_s"] = tokens / (time.perf_counter() - began)
result["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(result))
"""

LLAMA_WHOLE = """
import sys
from llama_cpp import Llama
path, threads, tokens = sys.argv[1], *map(int, sys.argv[2:4])
llama = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
llama.eval(llama.tokenize(sys.argv[4].encode()))
made = []
for _ in range(tokens):
    made.append(llama.sample(temp=0.0))
    llama.eval(made[-1:])
print(llama.detokenize(made).decode(errors="replace"))
"""
