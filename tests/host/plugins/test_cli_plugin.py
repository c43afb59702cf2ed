"""The plugin commands as a user runs them: text, JSON, exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plugin_toys import manifest_text, write_api_wheel, write_toy_wheel

from vox_host.installation import Installed

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def vox(plugins_dir: Path) -> Run:
    """Run vox-host in a process of its own, with a home of its own."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "vox_host", *map(str, arguments)],
            env={
                **os.environ,
                "VOX_HOME": str(plugins_dir.parent),
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return run


def facts_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plugin_s_whole_life(vox: Run, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    write_api_wheel(folder)
    wheel = write_toy_wheel(tmp_path / "toy", requires=("vox-plugin-api==0.1.0",))
    done = vox("plugin", "install", "--path", wheel, "--find-links", folder, "--no-index", "--json")
    assert facts_of(done)["was_unchanged"] is False
    assert "development install" in done.stderr
    assert "creating its environment" in done.stderr

    listed = facts_of(vox("plugin", "list", "--json"))["plugins"]
    assert [(p["id"], p["error"]) for p in listed] == [("vox-toy", None)]
    shown = facts_of(vox("plugin", "show", "vox-toy", "--json"))
    assert Path(shown["path"], "pyvenv.cfg").is_file()
    assert shown["distributions"] == ["vox-plugin-api 0.1.0", "vox-toy 1.0.0"]
    assert "none vouches for its dependency" in shown["vouched_for"]
    assert shown["receipt"]["trust"] == "development"
    verified = facts_of(vox("plugin", "verify", "--json"))["plugins"]
    assert [(p["plugin"], p["verified"]) for p in verified] == [("vox-toy", True)]
    explained = facts_of(vox("plugin", "explain", "vox-toy", "--json"))
    assert explained["chosen"]["plugin"] == "vox-toy"
    assert [r["stage"] for r in explained["records"]] == [
        "found", "manifest", "integrity", "protocol", "platform", "hardware", "start", "self-test", "health",
    ]  # fmt: skip
    assert facts_of(vox("plugin", "remove", "vox-toy", "--json")) == {"removed": "vox-toy"}
    assert facts_of(vox("plugin", "list", "--json")) == {"plugins": []}


@pytest.mark.parametrize("command", ["list", "show", "explain", "remove"])
def test_commands_work_with_a_broken_plugin(
    vox: Run, installed_toy: Installed, plugins_dir: Path, command: str
) -> None:
    (plugins_dir / "vox-toy.json").write_text("{")
    arguments = [] if command == "list" else ["vox-toy"]
    done = vox("plugin", command, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert "vox-toy" in done.stdout
    assert vox("plugin", "list").returncode == 0


def test_verify_names_a_changed_file_with_exit_code_4(
    vox: Run, installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = installed_toy.receipt
    path = plugins_dir / receipt.environment / receipt.packages / "vox_toy" / "__init__.py"
    path.write_text("# changed\n")
    done = vox("plugin", "verify", "vox-toy", "--json")
    assert done.returncode == 4
    assert str(path) in done.stderr
    assert done.stderr.count("sha256:") == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "integrity-mismatch"
    assert error["facts"]["file"] == str(path)


def test_a_changed_receipt_is_named_by_verify_and_explain(
    vox: Run, installed_toy: Installed, plugins_dir: Path
) -> None:
    path = plugins_dir / "vox-toy.json"
    path.write_text(path.read_text().replace(installed_toy.receipt.archive_sha256, "0" * 64))
    done = vox("plugin", "verify", "vox-toy")
    assert done.returncode == 4
    assert done.stderr.count("sha256:") == 2
    assert str(path) in done.stderr
    listed = facts_of(vox("plugin", "list", "--json"))
    entry = next(p for p in listed["plugins"] if p["id"] == "vox-toy")
    assert (entry["integrity"], entry["error"]["code"]) == ("changed", "receipt-changed")
    # With `auto` no other plugin is quietly used instead.
    explained = facts_of(vox("plugin", "explain", "--json"))
    assert explained["chosen"]["plugin"] is None


def test_list_does_not_call_touched_bytes_what_was_installed(
    vox: Run, installed_toy: Installed, plugins_dir: Path
) -> None:
    def integrity() -> str:
        listed = facts_of(vox("plugin", "list", "--json"))["plugins"]
        return str(next(p["integrity"] for p in listed if p["id"] == "vox-toy"))

    receipt = installed_toy.receipt
    path = plugins_dir / receipt.environment / receipt.packages / "vox_toy" / "__init__.py"
    content, before = path.read_bytes(), path.stat()
    assert integrity() == "development"
    path.write_bytes(bytes(content[:-1]) + b" ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert integrity() == "changed since the last check"
    said = vox("plugin", "list").stdout
    assert f"{path}; vox-host plugin verify vox-toy" in said
    assert "development" not in said
    path.write_bytes(content)
    assert vox("plugin", "verify", "vox-toy").returncode == 0
    assert integrity() == "development"
    shutil.rmtree(plugins_dir / ".checked")
    assert integrity() == "unchecked"
    path.with_name("added.py").write_text("")
    assert integrity() == "changed since the last check"


def test_explain_shows_a_changed_file_and_would_run_nothing(
    vox: Run, installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = installed_toy.receipt
    (plugins_dir / receipt.environment / receipt.packages / "evil.pth").write_text("")
    explained = facts_of(vox("plugin", "explain", "--json"))
    record = next(r for r in explained["records"] if (r["plugin_id"], r["stage"]) == ("vox-toy", "integrity"))
    assert (record["status"], record["code"]) == ("failed", "integrity-mismatch")
    assert "evil.pth" in record["detail"]
    assert explained["chosen"]["plugin"] is None
    assert explained["chosen"]["reason"]


def test_explain_judges_as_if_verified_plugins_were_required(vox: Run, installed_toy: Installed) -> None:
    explained = facts_of(vox("plugin", "explain", "vox-toy", "--require-verified", "--json"))
    assert [r["code"] for r in explained["records"] if r["status"] == "failed"] == ["not-verified"]


def test_a_refusal_is_text_on_stderr_and_data_on_stdout(vox: Run, tmp_path: Path) -> None:
    wheel = write_toy_wheel(tmp_path, manifest=manifest_text(protocol=">=99,<100"))
    done = vox("plugin", "install", "--path", wheel, "--json")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].startswith("error[protocol-unsupported]: plugin 'vox-toy'")
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["facts"]["host"].startswith("1 to 1")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["plugin", "install"], "--path"),
        (["plugin", "install", "--path", "nowhere"], "does not exist"),
        (["plugin", "install", "--path", ".", "--find-links", "nowhere"], "nowhere"),
        (["plugin", "show", "vox-nope:isa=reference"], "vox-nope"),
        (["plugin", "explain", "--capability", "fly"], "--capability"),
        (["plugin", "sing"], "sing"),
        (["sing"], "sing"),
        (["--sing"], "--sing"),
    ],
)
def test_a_mistake_of_the_user_is_exit_code_2_without_traceback(
    vox: Run, arguments: list[str], word: str
) -> None:
    done = vox(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error[")
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plugin", "show", "vox-nope"],
        ["plugin", "explain", "vox-nope"],
        ["plugin", "verify", "vox-nope"],
        ["plugin", "check", "vox-nope"],
        ["plugin", "remove", "vox-nope"],
    ],
)
def test_a_named_plugin_that_is_not_installed_is_exit_code_3_whoever_is_asked(
    vox: Run, arguments: list[str]
) -> None:
    """As for generate, serve and train: tests/host/cli and tests/e2e have those."""
    done = vox(*arguments)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error[plugin-not-") and "vox-nope" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_variable_is_named(vox: Run) -> None:
    done = vox("plugin", "list", VOX_MENS_VRAM_SAFETY="lots")
    assert done.returncode == 2
    assert "VOX_MENS_VRAM_SAFETY" in done.stderr


def test_verbose_logs_what_was_discovered(vox: Run, installed_toy: Installed) -> None:
    done = vox("--verbose", "plugin", "list")
    assert "plugin.discovered id=vox-toy" in done.stderr
    assert "plugin.discovered" not in vox("plugin", "list").stderr


def test_help_names_the_commands_and_imports_none_of_them(vox: Run) -> None:
    done = vox("--help")
    assert done.returncode == 0
    assert "plugin" in done.stdout
    assert vox("plugin", "--help").returncode == 0
    assert vox("--version").stdout.startswith("vox-host ")
