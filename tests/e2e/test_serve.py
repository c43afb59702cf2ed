"""`vox-host serve` on the real model: killed workers, killed hosts, many users, memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from e2e.serving import is_ready, serving, wait_until
from fixtures.processes import still_alive

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]
MODEL = "gemma-3-270m"
PROMPT = "Water boils at a temperature of"
LONG = "Count: one, two, three, four,"


def test_the_openai_client_gets_the_answer_and_the_stream_adds_up_to_it(cli):
    with serving(cli, MODEL) as server:
        client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="unused", max_retries=0)
        with client:
            ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            whole = client.completions.create(**ask)
            assert "100 degrees Celsius" in whole.choices[0].text
            assert whole.usage.completion_tokens == 16
            pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]
            assert len(pieces) > 3 and "".join(pieces) == whole.choices[0].text
        status, answer = server.request(
            "POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        )
        assert status == 400 and "chat template" in answer["error"]["message"]


def test_a_worker_killed_in_mid_stream_is_told_at_once_and_the_next_request_works(cli):
    with serving(cli, MODEL) as server:
        events, seen_down = [], threading.Event()

        def watch() -> None:
            while not seen_down.is_set():
                status, _ = server.request("GET", "/health")
                if status != 200:
                    seen_down.set()

        watcher = threading.Thread(target=watch, daemon=True)
        killed_at = None
        for event in server.stream(LONG, 400):
            events.append(event)
            if len(events) == 5:
                watcher.start()
                server.worker().send_signal(signal.SIGKILL)
                killed_at = time.monotonic()
        assert killed_at is not None and time.monotonic() - killed_at < 2
        assert events[-1]["error"]["code"] == "worker-died", events[-1]
        assert "SIGKILL" in events[-1]["error"]["message"]
        assert seen_down.wait(10)
        assert "100 degrees" in server.complete(PROMPT, 16)["choices"][0]["text"]
        assert is_ready(server)
        watcher.join(5)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("state", ["idle", "generating"])
def test_a_killed_host_leaves_no_process_after_two_seconds(cli, state):
    with serving(cli, MODEL) as server:
        if state == "generating":
            stream = server.stream(LONG, 2000)
            next(stream)
        tree = server.tree()
        assert len(tree) >= 2
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(5)
        assert still_alive(tree[1:], 2) == []
        if state == "generating":
            with contextlib.suppress(OSError, ValueError):
                stream.close()


def test_malformed_http_is_refused_without_a_traceback_and_sigterm_ends_it_cleanly(cli):
    with serving(cli, MODEL) as server:
        for garbage in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as raw:
                raw.sendall(garbage)
                raw.shutdown(socket.SHUT_WR)
                assert b"200" not in raw.recv(4096)
        status, backends = server.request("GET", "/v1/backends")
        assert status == 200 and backends["data"]
        assert str(cli.home) not in json.dumps(backends)
        assert is_ready(server)
        tree = server.tree()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
        assert b"Traceback" not in server.process.stdout.read()
        assert still_alive(tree[1:], 2) == []


def test_a_changed_plugin_is_not_restarted(cli):
    """The bytes are verified before every start, restarts included."""
    with serving(cli, MODEL) as server:
        victim = next(path for path in _tree(cli).rglob("mens_cpu_ref/lane.py"))
        original = victim.read_bytes()
        try:
            victim.write_bytes(original + b"\n")
            server.worker().send_signal(signal.SIGKILL)
            wait_until(lambda: server.request("GET", "/health")[1].get("state") == "failed", 15)
            status, answer = server.request("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
            assert status >= 500, answer
        finally:
            victim.write_bytes(original)


def _tree(cli):
    return Path(json.loads(cli.run("plugin", "show", "mens-cpu-ref", "--json").stdout)["path"])


def test_who_else_is_served_changes_no_byte(cli):
    """D1: alone, among others, before and after others."""
    with serving(cli, MODEL) as server:
        ask = ("The capital of France is", 24)
        alone = server.complete(*ask, logprobs=3)["choices"]
        others = ["a", "b " * 49, "count: " + "1 " * 299, *(f"item {i}" for i in range(4))]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for delay in (0.0, 0.05):
                futures = [pool.submit(server.complete, other, 40) for other in others]
                time.sleep(delay)
                assert server.complete(*ask, logprobs=3)["choices"] == alone
                for future in futures:
                    future.result()
        assert server.complete(*ask, logprobs=3)["choices"] == alone


def test_seeds_are_honoured_over_http(cli):
    """D5: seed 42 repeats, no seed does not, 0 is a seed."""
    with serving(cli, MODEL) as server:

        def texts(*seeds):
            ask = ("Write one random word:", 12)
            answers = [server.complete(*ask, temperature=1.0, seed=seed) for seed in seeds]
            return {answer["choices"][0]["text"] for answer in answers}

        assert len(texts(42, 42, 42)) == 1
        assert len(texts(0, 0, 0)) == 1
        assert len(texts(1, 2, 3, 4, 5)) >= 4
        assert len(texts(None, None, None, None, None)) >= 4


def test_eight_together_give_three_times_the_tokens_per_second_of_one(cli):
    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        server.complete(LONG, 8)

        def rate(users: int) -> float:
            began = time.perf_counter()
            answers = list(pool.map(lambda _: server.complete(LONG, 64), range(users)))
            return sum(a["usage"]["completion_tokens"] for a in answers) / (time.perf_counter() - began)

        best = max(rate(8) / rate(1) for _ in range(4))
        assert best >= 3, best


@pytest.mark.skipif(sys.platform != "linux", reason="proportional set sizes are read from /proc")
def test_host_and_worker_together_stay_below_450_mib(cli):
    with serving(cli, MODEL) as server:
        peak, stop = [0], threading.Event()

        def sample() -> None:
            while not stop.wait(0.02):
                with contextlib.suppress(psutil.Error):
                    peak[0] = max(peak[0], sum(p.memory_full_info().pss for p in server.tree()))

        sampler = threading.Thread(target=sample)
        sampler.start()
        server.complete(PROMPT, 64)
        server.complete("word " * 250, 16)
        stop.set()
        sampler.join()
        assert peak[0] <= 450 * 2**20, peak[0] / 2**20
