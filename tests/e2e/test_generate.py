"""`vox-host generate` on the real model through the installed plugin."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from fixtures.processes import still_alive

pytestmark = pytest.mark.real_model

ASK = ("generate", "--model", "gemma-3-270m", "--temperature", "0", "--max-tokens", "16")
PROMPT = "Water boils at a temperature of"


def test_water_boils_at_100_degrees_twice_in_the_same_bytes(cli, tmp_path):
    first = cli.run(*ASK, "--prompt", PROMPT, "--json", "--record", str(tmp_path / "a"))
    second = cli.run(*ASK, "--prompt", PROMPT, "--json", "--record", str(tmp_path / "b"))
    assert first.returncode == 0, first.stderr
    answer = json.loads(first.stdout)
    assert answer["text"].startswith(" 100 degrees Celsius")
    assert len(answer["token_ids"]) == 16 and answer["finish_reason"] == "length"
    assert (answer["plugin"], answer["lane"], answer["numerics"]) == ("mens-cpu-ref", "cpu", "canonical")
    assert first.stdout == second.stdout
    transcript = (tmp_path / "a").read_bytes()
    assert transcript and transcript == (tmp_path / "b").read_bytes()


def test_the_prompt_may_come_from_stdin_and_the_answer_streams_as_text(cli):
    done = cli.run(*ASK, stdin=PROMPT)
    assert done.returncode == 0, done.stderr
    assert " 100 degrees Celsius" in done.stdout


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_generate_ended_in_mid_answer_leaves_no_process(cli, how):
    long = ("--prompt", "Count:", "--temperature", "0", "--max-tokens", "4000")
    process = cli.start("generate", "--model", "gemma-3-270m", *long)
    try:
        os.set_blocking(process.stdout.fileno(), False)
        written = b""
        deadline = time.monotonic() + 30
        # What comes after the line that names the context is the answer.
        while not written.partition(b"context")[2].partition(b"\n")[2].strip():
            assert process.poll() is None and time.monotonic() < deadline, written
            written += process.stdout.read() or b""
            time.sleep(0.02)
        tree = psutil.Process(process.pid).children(recursive=True)
        assert any("vox_plugin_api.child" in child.cmdline() for child in tree)
        process.send_signal(how)
        assert process.wait(10) == (-signal.SIGKILL if how == signal.SIGKILL else 130)
        assert still_alive(tree, 2) == []
    finally:
        process.kill()
        process.wait(10)
        rest = process.stdout.read() or b""
        process.stdout.close()
    assert b"Traceback" not in written + rest


@pytest.mark.parametrize("options", [("--threads", "1"), ("--threads", "2"), ("--context-length", "300")])
def test_threads_and_context_change_no_byte(cli, options):
    ask = (*ASK, "--prompt", "Once upon a time", "--json")
    plain = json.loads(cli.run(*ask).stdout)
    other = json.loads(cli.run(*ask, *options).stdout)
    assert plain == other


def test_one_changed_byte_of_the_installed_plugin_stops_it_with_both_digests(cli):
    tree = Path(json.loads(cli.run("plugin", "show", "mens-cpu-ref", "--json").stdout)["path"])
    victim = next(tree.rglob("mens_cpu_ref/lane.py"))
    original = victim.read_bytes()
    try:
        victim.write_bytes(original.replace(b"CpuOps", b"CpuOpz", 1))
        for explicit in ((), ("--plugin", "mens-cpu-ref")):
            done = cli.run(*ASK, "--prompt", PROMPT, *explicit)
            assert done.returncode == 4, done.stderr
            assert "lane.py" in done.stderr
            assert len(set(re.findall(r"[0-9a-f]{64}", done.stderr))) >= 2, done.stderr
            assert done.stdout == ""
        assert cli.run("serve", "--model", "gemma-3-270m", "--port", "1").returncode == 4
        assert cli.run("plugin", "verify").returncode == 4
        assert cli.run("plugin", "list", "--json").returncode == 0
    finally:
        victim.write_bytes(original)
    assert cli.run(*ASK, "--prompt", PROMPT).returncode == 0


def test_a_damaged_receipt_vouches_for_nothing(cli):
    receipt = cli.home / "plugins/mens-cpu-ref.json"
    original = receipt.read_bytes()
    try:
        receipt.write_bytes(b"{")
        for arguments in (
            (*ASK, "--prompt", PROMPT),
            ("plugin", "verify"),
            ("plugin", "verify", "mens-cpu-ref"),
        ):
            done = cli.run(*arguments)
            assert done.returncode == 4, (arguments, done.stdout, done.stderr)
        # It reads well, and is not what was written.
        receipt.write_bytes(original.replace(b'"0.1.0"', b'"0.1.1"'))
        done = cli.run(*ASK, "--prompt", PROMPT)
        assert done.returncode == 4
        assert len(set(re.findall(r"[0-9a-f]{64}", done.stderr))) == 2, done.stderr
    finally:
        receipt.write_bytes(original)


@pytest.mark.parametrize(
    "options", [("--context-length", "99999999"), ("--threads", "999999")], ids=["context", "threads"]
)
def test_what_the_worker_refuses_of_a_request_is_the_users_to_mend(cli, options):
    done = cli.run(*ASK, "--prompt", PROMPT, *options)
    assert done.returncode == 2, done.stderr
    assert options[1] in done.stderr and "Traceback" not in done.stderr
