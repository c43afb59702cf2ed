"""README's own commands, word by word, with a tiny model in the demo's place.

What is added is a free port to `serve`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.conftest import MODEL, ROOT, Cli
from e2e.serving import serving
from fixtures.fast_folder import fast_folder
from fixtures.training_home import training_home, write_rows
from vox_host.runs.open import open_adapter

CURL = re.compile(r"curl \S+/v1/completions .*?-d '(\{.*?\})'", re.DOTALL)


def code_blocks() -> str:
    """README's indented lines, without their indent and with `\\` at a line's end taken away."""
    text = (ROOT / "README.md").read_text("utf-8")
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(lines).replace("\\\n", "")


def commands(name: str) -> list[list[str]]:
    """The arguments of each line that runs this command."""
    words = [
        shlex.split(line, comments=True)
        for line in code_blocks().splitlines()
        if line.startswith(".venv/bin/vox-host ")
    ]
    return [arguments for _, *arguments in words if arguments[0] == name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    with fast_folder(tmp_path_factory.mktemp("readme")) as made:
        training_home(made / "home", model=MODEL)
        (made / "clone").mkdir()
        # Enough of them that the run is still on its way when the signal comes.
        write_rows(made / "clone" / "rows.jsonl", 200)
        yield made


@pytest.fixture
def cli(folder, monkeypatch) -> Cli:
    """Run in a folder that is not the home, so that a relative path is the caller's or nobody's."""
    monkeypatch.chdir(folder / "clone")
    return Cli(folder / "home")


def done(finished: subprocess.CompletedProcess[str]) -> str:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_what_readme_says_of_a_run_is_what_happens(cli):
    asked = json.loads(CURL.search(code_blocks())[1])
    begin, resume = commands("train")
    base, tuned = commands("serve")
    assert resume[1] == "--resume" and base[1:] == ["--model", MODEL]

    # Stopped as a user stops it, wherever it is by then.
    with cli.start(*begin) as process:
        for line in process.stdout:
            if b"step 1/" in line:
                process.send_signal(signal.SIGINT)
        process.wait(60)
    assert process.returncode == 130
    assert f"Next: vox-host serve --model {tuned[2]}" in done(cli.run(*resume))
    run = open_adapter(Path("runs/mine"))
    assert run.base_name == MODEL

    with serving(cli, *base[2:]) as server:
        status, answer = server.request("POST", "/v1/completions", asked)
        assert (status, answer["model"]) == (200, MODEL)
    with serving(cli, *tuned[2:]) as server:
        listed = server.request("GET", "/v1/models")[1]["data"]
        assert [(entry["id"], entry["parent"]) for entry in listed] == [("mine", MODEL)]
        assert listed[0]["vox"]["adapter"]["digest"] == run.adapter_digest

    [merge], [export] = commands("merge"), commands("export")
    done(cli.run(*merge))
    shown = json.loads(done(cli.run("model", "show", "mine", "--json")))
    assert shown["merged_from"]["adapter_digest"] == run.adapter_digest
    assert done(cli.run(*export)).splitlines()[0] == "mine-gguf: README.md, mine-lora.gguf"
    assert Path("mine-gguf/mine-lora.gguf").read_bytes().startswith(b"GGUF")
    # Nothing went anywhere else.
    assert sorted(os.listdir()) == ["mine-gguf", "rows.jsonl", "runs"]


def test_readme_has_no_command_that_is_not_tried():
    """`plugin check` and `parity` have tests of their own, with the plugin that they name."""
    tried = {"train", "serve", "merge", "export"}
    named = set(re.findall(r"^\.venv/bin/vox-host (\S+)", code_blocks(), re.MULTILINE))
    assert named == tried | {"plugin", "parity"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone: there is nothing that git would show")
def test_what_the_commands_leave_in_a_clone_git_passes_over():
    left = [
        words[words.index("--out") + 1]
        for name in ("train", "export")
        for words in commands(name)
        if "--out" in words
    ]
    assert len(left) == 2
    for path in left:
        # As a folder with something in it, which is not there here.
        done = subprocess.run(["git", "check-ignore", "-q", f"{path}/file"], cwd=ROOT, check=False)
        assert done.returncode == 0, path
