"""`vox-host serve` on the real model: killed workers, killed hosts, many users, memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
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
MIB = 2**20
PROMPT = "Water boils at a temperature of"
LOAD = """
import sys, time
from mens_cpu_ref.plugin import backend
from vox_plugin_api.messages import LoadModelParams
lane = backend()
began = time.perf_counter()
for reply in lane.load_model(LoadModelParams(model_dir=sys.argv[1], model_digest="0" * 64)):
    pass
print(time.perf_counter() - began)
"""
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


def test_a_prompt_that_begins_like_another_is_computed_from_where_they_part(cli):
    begun = [(5 * i) % 20000 + 100 for i in range(300)]
    with serving(cli, MODEL) as server:
        server.complete(begun, 4)
        second = server.complete([*begun, 7, 8], 4, logprobs=3)
    with serving(cli, MODEL) as server:
        alone = server.complete([*begun, 7, 8], 4, logprobs=3)
    assert second["choices"] == alone["choices"]
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}
    assert alone["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_bytes_on_the_wire_are_json_and_server_sent_events(cli):
    """As curl would see them."""
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    headers = {"content-type": "application/json"}
    with serving(cli, MODEL) as server:

        def post(body) -> tuple[int, str, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            with contextlib.closing(connection):
                connection.request("POST", "/v1/completions", body, headers)
                response = connection.getresponse()
                return response.status, response.headers.get_content_type(), response.read()

        status, kind, whole = post(json.dumps(ask))
        assert (status, kind) == (200, "application/json")
        status, kind, events = post(json.dumps({**ask, "stream": True}))
        assert (status, kind) == (200, "text/event-stream")
        *pieces, done, nothing = events.split(b"\n\n")
        assert (done, nothing) == (b"data: [DONE]", b"")
        choices = [json.loads(p.removeprefix(b"data: "))["choices"][0] for p in pieces if p[:1] != b":"]
        assert "".join(c["text"] for c in choices) == json.loads(whole)["choices"][0]["text"]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        status, kind, refused = post("{")
        assert (status, kind) == (400, "application/json") and "error" in json.loads(refused)
        port = str(server.port)
        taken = cli.run("serve", "--model", MODEL, "--port", port)
        assert taken.returncode == 2 and "port-taken" in taken.stderr and port in taken.stderr


def test_a_worker_killed_in_mid_stream_is_told_at_once_and_the_next_request_works(cli):
    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        statuses: list[int] = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.005):
                statuses.append(server.request("GET", "/health")[0])

        def ended(stream) -> tuple[dict, float]:
            *_, last = stream
            return last, time.monotonic()

        streams = [server.stream(f"{LONG} {number}", 1000, ignore_eos=True) for number in range(3)]
        for stream in streams:
            for _ in range(5):
                assert "error" not in next(stream)
        body = {"prompt": LONG, "max_tokens": 1000, "ignore_eos": True}
        waiting = pool.submit(server.request, "POST", "/v1/completions", body)
        health = pool.submit(watch)
        wait_until(lambda: server.request("GET", "/health")[1]["answers_in_flight"] == 4, 10)
        wait_until(lambda: statuses, 10)
        first_worker = server.worker()
        first_worker.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        for end in [pool.submit(ended, stream) for stream in streams]:
            last, ended_at = end.result(30)
            assert last["error"]["code"] == "worker-died" and "SIGKILL" in last["error"]["message"], last
            assert ended_at - killed_at < 2
        status, answer = waiting.result(30)
        assert status == 503 and answer["error"]["code"] == "worker-died", answer
        wait_until(lambda: 503 in statuses, 10)
        assert "100 degrees" in server.complete(PROMPT, 16)["choices"][0]["text"]
        wait_until(lambda: statuses[-1] == 200, 10)
        stop.set()
        health.result(10)
        assert statuses[0] == 200 and set(statuses) == {200, 503}
        assert server.worker().pid != first_worker.pid


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("state", ["idle", "generating", "reading a long prompt"])
def test_a_killed_host_leaves_no_process_after_two_seconds(cli, state):
    with serving(cli, MODEL) as server, contextlib.ExitStack() as stack:
        if state == "generating":
            stream = server.stream(LONG, 2000, ignore_eos=True)
            next(stream)
        if state == "reading a long prompt":
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
            pool.submit(server.request, "POST", "/v1/completions", {"prompt": "word " * 20000})
            worker = server.worker()
            began = sum(worker.cpu_times()[:2])
            wait_until(lambda: sum(worker.cpu_times()[:2]) > began + 0.3, 10)
            assert server.request("GET", "/health")[1]["answers_in_flight"] == 1
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


def test_eight_users_are_served_in_the_same_steps(cli):
    """Each has begun before any has ended. `bench/cpu.py` says what their steps cost beside one user's."""
    begun: list[int] = []
    order: list[tuple[str, int]] = []

    def listen(user: int) -> int:
        tokens = 0
        for event in server.stream(f"{LONG} and then number {user}", 128, ignore_eos=True, logprobs=0):
            if user not in begun:
                begun.append(user)
                order.append(("begun", user))
            tokens += len((event["choices"][0]["logprobs"] or {"tokens": []})["tokens"])
        order.append(("ended", user))
        return tokens

    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:
        server.complete(LONG, 8)
        assert list(pool.map(listen, range(8))) == [128] * 8
    assert [what for what, _ in order] == ["begun"] * 8 + ["ended"] * 8, order


@pytest.mark.skipif(sys.platform != "linux", reason="proportional set sizes are read from /proc")
def test_host_and_worker_together_stay_below_450_mib_loading_included(cli):
    """One user's decode after a short and a middling prompt; the next test is about many users."""
    peak: dict[int, int] = {}
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.01):
            sizes = memory_of_children()
            if sum(sizes.values()) > sum(peak.values()):
                peak.clear()
                peak.update(sizes)

    assert psutil.Process().children() == [], "only the server's processes are to be counted"
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with serving(cli, MODEL) as server:
            server.complete(PROMPT, 64)
            server.complete("word " * 250, 16)
            members = {process.pid for process in server.tree()}
    finally:
        stop.set()
        sampler.join()
    assert len(members) >= 2 and peak.keys() >= members, "the peak was not seen with every process alive"
    assert 100 * MIB < sum(peak.values()) <= 450 * MIB, {pid: size / MIB for pid, size in peak.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="proportional set sizes are read from /proc")
def test_eight_users_cost_the_memory_of_their_positions_and_no_more_with_time(cli):
    """One block each for eight users, and nothing for the users that come after them."""
    per_position = 18 * 2 * 256 * 4  # layers, keys and values, head size, float32
    with serving(cli, MODEL) as server, concurrent.futures.ThreadPoolExecutor(8) as pool:

        def settled(users: int) -> int:
            list(pool.map(lambda user: server.complete(f"{LONG} {user}", 48), range(users)))
            return sum(memory_of_children().values())

        one, eight = settled(1), settled(8)
        assert eight <= 450 * MIB, eight / MIB
        assert eight - one <= 8 * 128 * per_position + 16 * MIB, (one / MIB, eight / MIB)
        later = [settled(8) for _ in range(3)][-1]
        assert later - eight <= 8 * MIB, (eight / MIB, later / MIB)


def memory_of_children() -> dict[int, int]:
    """Proportional set sizes of everything below the tests, in bytes; those that just ended left out."""
    sizes = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            sizes[process.pid] = process.memory_full_info().pss
    return sizes


def test_the_model_is_loaded_in_less_than_a_second_when_its_files_are_cached(cli):
    python = json.loads(cli.run("plugin", "show", "mens-cpu-ref", "--json").stdout)["python"]
    model = json.loads(cli.run("model", "show", MODEL, "--json").stdout)["path"]
    took = []
    for _ in range(3):
        command = [python, "-I", "-B", "-c", LOAD, model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        took.append(float(done.stdout))
    assert min(took) < 1, took
