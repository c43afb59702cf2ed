"""The commands as a user runs them: processes, terminals' ends, exit statuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from fixtures.processes import still_alive
from fixtures.scripted_home import command_line, run_command, scripted_home

HELLO = list(b"Hello, wonderful world")


@pytest.fixture
def home_and_command(tmp_path):
    def make(script=None, **options):
        home = scripted_home(tmp_path, {"tokens": HELLO, **(script or {})}, **options)
        return command_line(tmp_path, home)

    return make


def test_generate_prints_one_json_object_and_the_same_bytes_twice(home_and_command):
    command, environment = home_and_command()
    arguments = (
        "generate",
        "--model",
        "tiny",
        "--prompt",
        "x",
        "--temperature",
        "0",
        "--max-tokens",
        "16",
        "--json",
    )
    first = run_command(command, environment, *arguments)
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)
    assert facts["text"] == "Hello, wonderful"
    assert facts["token_ids"] == HELLO[:16]
    assert facts["finish_reason"] == "length"
    assert (facts["plugin"], facts["numerics"], facts["seed"]) == ("vox-scripted", "canonical", 0)
    assert facts["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
    assert run_command(command, environment, *arguments).stdout == first.stdout


@pytest.mark.parametrize(("option", "bytes_"), [((), None), (("--kv-cache-mib", "3"), 3 << 20)])
def test_the_memory_for_keys_and_values_is_the_users_or_the_plugins_own_bound(
    home_and_command, option, bytes_
):
    command, environment = home_and_command({"tells_of": ["memory_bytes"]})
    done = run_command(
        command, environment, "generate", "--model", "tiny", "--prompt", "x", "--json", *option
    )
    assert f"memory_bytes: {bytes_}" in json.loads(done.stdout)["warnings"]


@pytest.mark.parametrize("stop", [(), ("--stop", ", ")])
def test_what_was_not_computed_again_is_part_of_the_usage(home_and_command, stop):
    command, environment = home_and_command({"observed": {"cached_tokens": 1}})
    done = run_command(command, environment, "generate", "--model", "tiny", "--prompt", "xy", "--json", *stop)
    assert json.loads(done.stdout)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_generate_takes_its_prompt_from_standard_input_and_stops_at_a_stop_text(home_and_command):
    command, environment = home_and_command()
    done = run_command(
        command,
        environment,
        "generate",
        "--model",
        "tiny",
        "--temperature",
        "0",
        "--stop",
        " won",
        stdin=b"x",
    )
    assert (done.returncode, done.stdout) == (0, b"Hello,\n")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("generate", "--model", "absent", "--prompt", "x"), 2, b"model-not-found"),
        (("generate", "--model", "tiny", "--prompt", "x", "--prompt-file", "y"), 2, b"not both"),
        (("generate", "--model", "tiny", "--prompt-file", "/no/such"), 2, b"prompt-file"),
        (
            ("generate", "--model", "tiny", "--prompt", "x", "--temperature", "nan"),
            2,
            b"less than or equal to 100; found 'nan'",
        ),
        (
            ("generate", "--model", "tiny", "--prompt", "x", "--top-k=-5"),
            2,
            b"'--top-k': Input should be greater than or equal to 0; found '-5'",
        ),
        (("generate", "--model", "tiny"), 2, b"nothing was started\nGive --prompt TEXT or --prompt-file"),
        (("generate", "--model", "tiny", "--prompt", "x", "--stop", ""), 2, b"--stop"),
        (("generate", "--model", "tiny", "--prompt", "x" * 600), 2, b"context_length_exceeded"),
        (("generate", "--model", "tiny", "--prompt", "x", "--plugin", "absent"), 3, b"plugin-not-found"),
        (("generate", "--model", "tiny", "--prompt", "x", "--plugin", "a:isa=b"), 2, b"vox-host parity"),
        (("generate", "--model", "tiny", "--prompt", "x", "--require-verified"), 3, b"verified"),
        (("generate", "--model", "tiny", "--prompt", "x", "--record", "/no/such/file"), 2, b"record-folder"),
        (("serve", "--model", "tiny", "--host", "0.0.0.0"), 2, b"api-key-needed"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else None,
)
def test_a_users_mistake_is_an_error_with_a_code_and_no_traceback(home_and_command, arguments, status, words):
    command, environment = home_and_command()
    done = run_command(command, environment, *arguments)
    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert b"Traceback" not in done.stderr


def test_a_worker_that_dies_gives_exit_status_5(home_and_command):
    command, environment = home_and_command({"at_token": {"3": "crash"}})
    done = run_command(
        command, environment, "generate", "--model", "tiny", "--prompt", "x", "--temperature", "0"
    )
    assert done.returncode == 5
    assert done.stdout.startswith(b"Hel")
    assert b"SIGKILL" in done.stderr and b"Traceback" not in done.stderr


def test_chat_remembers_and_a_base_model_says_that_it_can_not(home_and_command):
    command, environment = home_and_command({"tokens": HELLO[:5], "end_after": 5})
    done = run_command(
        command, environment, "chat", "--model", "tiny", "--temperature", "0", stdin=b"hi\nyou\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"Hello\nHello\n\n"


def test_chat_with_a_base_model_names_the_way_out(home_and_command):
    command, environment = home_and_command(template=None)
    done = run_command(command, environment, "chat", "--model", "tiny", stdin=b"hi\n")
    assert done.returncode == 2
    assert b"no-chat-template" in done.stderr and b"vox-host generate --model tiny" in done.stderr


@contextlib.contextmanager
def served(command, environment, *arguments):
    process = subprocess.Popen(
        [*command, "serve", "--model", "tiny", "--port", "0", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert "http://" in line, process.stderr.read()
        yield process, line.split(" at ")[1].split("/v1")[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ask(url, body):
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_answers_and_leaves_nothing_behind_when_told_to_stop(home_and_command, number):
    command, environment = home_and_command()
    with served(command, environment) as (process, url):
        assert ask(url, {"prompt": "x", "max_tokens": 5, "temperature": 0})["choices"][0]["text"] == "Hello"
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        _, alive = psutil.wait_procs(family, timeout=2)
        assert alive == []


def test_an_answer_in_flight_may_finish_when_the_server_is_told_to_stop(home_and_command):
    command, environment = home_and_command({"token_s": 0.05})
    with served(command, environment) as (process, url):
        body = json.dumps({"prompt": "x", "max_tokens": 22, "temperature": 0, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(timeout=10) == 0


def test_a_killed_host_leaves_no_process_after_two_seconds(home_and_command):
    command, environment = home_and_command()
    with served(command, environment) as (process, url):
        ask(url, {"prompt": "x", "max_tokens": 1})
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        assert family and still_alive(family, 2) == []


def test_a_taken_port_is_named_with_its_owner_and_the_flag_before_anything_is_loaded(home_and_command):
    command, environment = home_and_command()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        done = run_command(command, environment, "serve", "--model", "tiny", "--port", str(port))
        assert done.returncode == 2
        assert time.monotonic() - began < 10
        assert b"port-taken" in done.stderr and str(port).encode() in done.stderr
        assert f"pid {os.getpid()}".encode() in done.stderr
        assert b"--port" in done.stderr
        assert b"starting" not in done.stderr


@pytest.mark.parametrize("kind", ["device", "link", "pipe", "store"])
def test_a_transcript_takes_the_place_of_nothing_else(home_and_command, tmp_path, kind):
    command, environment = home_and_command()
    target = tmp_path / "target"
    if kind == "device":
        target = Path("/dev/null")
    elif kind == "link":
        (tmp_path / "mine").write_text("mine")
        target.symlink_to(tmp_path / "mine")
    elif kind == "pipe":
        os.mkfifo(target)
    else:
        target = next(Path(environment["VOX_HOME"]).glob("models/*/config.json"))
    before = target.lstat()
    ask = ("generate", "--model", "tiny", "--prompt", "x", "--max-tokens", "1")
    done = run_command(command, environment, *ask, "--record", str(target))
    assert done.returncode == 2 and b"record-folder" in done.stderr
    assert (target.lstat().st_mode, target.lstat().st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize(
    "options",
    [("--max-tokens", "99999999999999999999"), ("--top-k", "2147483648"), ("--prompt-file", "/dev/zero")],
    ids=lambda o: o[0],
)
def test_what_http_refuses_the_command_line_refuses(home_and_command, options):
    command, environment = home_and_command()
    prompt = () if "--prompt-file" in options else ("--prompt", "x")
    done = run_command(command, environment, "generate", "--model", "tiny", *prompt, *options)
    assert done.returncode == 2, done.stderr


@pytest.mark.parametrize(("given", "used"), [("-1", 2**64 - 1), (str(-(2**63)), 2**63), ("7", 7)])
def test_a_negative_seed_is_the_one_that_http_takes_it_for(home_and_command, given, used):
    command, environment = home_and_command()
    done = run_command(
        command, environment, "generate", "--model", "tiny", "--prompt", "x", "--seed", given, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["seed"] == used
