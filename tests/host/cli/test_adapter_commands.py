"""A run's folder after --model, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from fixtures.runs import a_checkpoint, a_run, some_facts
from fixtures.scripted_home import command_line, run_command, scripted_home
from vox_host.models.catalogue import Catalogue
from vox_host.runs.manifest import BaseModelRecord
from vox_host.runs.publish import publish_adapter


def test_generate_with_a_run_says_which_and_a_changed_byte_is_exit_code_4(tmp_path: Path) -> None:
    home = scripted_home(tmp_path, {"tokens": list(b"adapted"), "adapter_digest": "cd" * 32})
    digest = Catalogue(home / "models").find("tiny").digest
    run = a_run(tmp_path / "tools")
    command, environment = command_line(tmp_path, home)
    arguments = ("generate", "--model", str(run.path), "--prompt", "x", "--max-tokens", "7", "--json")

    done = run_command(command, environment, *arguments)
    assert done.returncode == 2
    assert b"adapter_model.safetensors" in done.stderr, "it says what is missing"

    checkpoint, _ = a_checkpoint(run.checkpoint(1))
    publish_adapter(
        run, checkpoint, some_facts(base_model=BaseModelRecord(name="tiny", digest=digest, path="/x"))
    )
    done = run_command(command, environment, *arguments)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["text"], facts["model"], facts["model_digest"]) == ("adapted", "tools", digest)
    assert (facts["adapter"]["digest"], facts["adapter"]["base"]) == ("cd" * 32, "tiny")
    assert facts["adapter"]["applied"] == "unmerged"

    content = bytearray(run.adapter_model.read_bytes())
    content[-1] ^= 1
    run.adapter_model.write_bytes(content)
    done = run_command(command, environment, *arguments)
    assert done.returncode == 4
    assert done.stderr.count(b"sha256:") == 2
    assert b"Traceback" not in done.stderr
