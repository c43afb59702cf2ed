"""What serving the demo model costs: load time, tokens per second, peak memory; beside llama.cpp.

Both sides run the same file with the same threads, in turn (A B A B ...), in processes of
their own. llama.cpp is measured through llama-cpp-python where that is installed.

    python bench/serving.py --gguf MODEL.gguf --model gemma-3-270m [--out bench/results]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import psutil

PROMPT = "Water boils at a temperature of"
LLAMA = """
import json, sys, time
from llama_cpp import Llama
path, threads, tokens, prefill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
began = time.perf_counter()
llama = Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False)
load_s = time.perf_counter() - began
llama.eval(llama.tokenize(sys.argv[5].encode()))
began = time.perf_counter()
for _ in range(tokens):
    llama.eval([llama.sample(temp=0.0)])
decode = tokens / (time.perf_counter() - began)
llama.reset()
ids = [(5 * i) % 20000 + 100 for i in range(prefill)]
began = time.perf_counter()
llama.eval(ids)
speed = prefill / (time.perf_counter() - began)
print(json.dumps({"load_s": load_s, "decode_tokens_per_s": decode, "prefill_tokens_per_s": speed}))
"""


LOAD = """
import sys, time
from mens_cpu_ref.plugin import backend
from vox_plugin_api.messages import LoadModelParams
lane = backend()
began = time.perf_counter()
params = LoadModelParams(model_dir=sys.argv[1], model_digest="0" * 64, threads=int(sys.argv[2]))
for reply in lane.load_model(params):
    pass
print(time.perf_counter() - began)
"""


class PeakMemory(threading.Thread):
    """Sample the proportional set size of a process and its children, and keep the highest sum."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.root = psutil.Process(pid)
        self.peak_bytes = 0
        self.parts: dict[str, int] = {}
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.02):
            parts: dict[str, int] = {}
            try:
                for process in [self.root, *self.root.children(recursive=True)]:
                    parts[f"{process.name()} {process.pid}"] = process.memory_full_info().pss
            except psutil.Error:
                continue
            if sum(parts.values()) > self.peak_bytes:
                self.peak_bytes, self.parts = sum(parts.values()), parts


@contextmanager
def serving(model: str, threads: int):
    """Start `vox-host serve`; yield its port, the seconds until ready, and the memory sampler."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vox_host",
        "serve",
        "--model",
        model,
        "--port",
        str(port),
        "--threads",
        str(threads),
    ]
    began = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    memory = PeakMemory(server.pid)
    memory.start()
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit(
                    f"serve ended with status {server.returncode}: {server.stderr.read().decode()[-2000:]}"
                )
            try:
                if request(port, "GET", "/health")["status"] == "ok":
                    break
            except OSError:
                time.sleep(0.02)
        yield port, time.perf_counter() - began, memory
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        memory.stop.set()


def request(port: int, method: str, path: str, body: dict | None = None) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, json.dumps(body) if body else None, {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def completion(port: int, model: str, prompt, tokens: int) -> tuple[float, dict]:
    began = time.perf_counter()
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = request(port, "POST", "/v1/completions", body)
    return time.perf_counter() - began, answer


def measure_vox(model: str, threads: int, tokens: int, prefill: int) -> dict:
    """Decode from the difference of a long and a short answer, so that prefill and HTTP cancel."""
    with serving(model, threads) as (port, ready_s, memory):
        completion(port, model, PROMPT, 4)
        short_s, _ = completion(port, model, PROMPT, 1)
        long_s, answer = completion(port, model, PROMPT, tokens + 1)
        made = answer["usage"]["completion_tokens"] - 1
        ids = [(5 * i) % 20000 + 100 for i in range(prefill)]
        prefill_s, _ = completion(port, model, ids, 1)
        began = time.perf_counter()
        answers: list = [None] * 8
        workers = [
            threading.Thread(
                target=lambda i=i: answers.__setitem__(i, completion(port, model, PROMPT, tokens))
            )
            for i in range(8)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        together_s = time.perf_counter() - began
        together = sum(answer["usage"]["completion_tokens"] for _, answer in answers)
    return {
        "ready_s": ready_s,
        "decode_tokens_per_s": made / (long_s - short_s),
        "prefill_tokens_per_s": prefill / prefill_s,
        "decode_8_tokens_per_s": together / together_s,
        "peak_pss_mib": memory.peak_bytes / 2**20,
        "peak_pss_parts_mib": {name: round(size / 2**20, 1) for name, size in memory.parts.items()},
    }


def measure_load(model: str, threads: int) -> float:
    """Seconds the installed lane needs to load the model, its files in the page cache."""

    def show(*arguments: str) -> dict:
        command = [sys.executable, "-m", "vox_host", *arguments, "--json"]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    python = show("plugin", "show", "mens-cpu-ref")["python"]
    load = [python, "-I", "-B", "-c", LOAD, show("model", "show", model)["path"], str(threads)]
    return float(subprocess.run(load, capture_output=True, text=True, check=True).stdout)


def measure_llama(gguf: Path, threads: int, tokens: int, prefill: int) -> dict | None:
    arguments = [sys.executable, "-c", LLAMA, str(gguf), str(threads), str(tokens), str(prefill), PROMPT]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print("llama.cpp was not measured:", done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours, theirs = [], []
    for index in range(options.rounds):
        load_s = measure_load(options.model, options.threads)
        ours.append(
            {"load_s": load_s} | measure_vox(options.model, options.threads, options.tokens, options.prefill)
        )
        other = measure_llama(options.gguf, options.threads, options.tokens, options.prefill)
        theirs += [other] if other else []
        print(
            f"round {index + 1}: vox {json.dumps(ours[-1])}\n         llama.cpp {json.dumps(other)}",
            file=sys.stderr,
        )
    names = (
        "load_s",
        "ready_s",
        "decode_tokens_per_s",
        "prefill_tokens_per_s",
        "decode_8_tokens_per_s",
        "peak_pss_mib",
    )
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"processor": cpu_name(), "threads": options.threads, "system": platform.platform()},
        "file": options.gguf.name,
        "rounds": options.rounds,
        "vox_median": {name: round(statistics.median(row[name] for row in ours), 2) for name in names},
        "vox": ours,
        "llama_cpp": theirs,
    }
    if theirs:
        shared = ("decode_tokens_per_s", "prefill_tokens_per_s")
        report["llama_cpp_median"] = {
            n: round(statistics.median(row[n] for row in theirs), 2) for n in shared
        }
        report["ratio_median"] = {
            n: round(statistics.median(a[n] / b[n] for a, b in zip(ours, theirs, strict=True)), 3)
            for n in shared
        }
    print(json.dumps({k: v for k, v in report.items() if k not in ("vox", "llama_cpp")}, indent=1))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"serving-{report['date']}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
