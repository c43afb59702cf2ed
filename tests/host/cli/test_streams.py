"""Standard streams and disks that fail: the user's to solve, in one line, never a fault of ours."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
from pathlib import Path

import pytest

from fixtures.scripted_home import command_line, scripted_home
from vox_host.cli import output


def shell(tmp_path, line):
    """Run a line of shell in which "$@" is the command."""
    home = scripted_home(tmp_path, {"tokens": list(b"na\xc3\xafve" * 50)})
    command, environment = command_line(tmp_path, home)
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}", "bash", *command],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    assert b"error[bug]" not in done.stderr, done.stderr
    return done


GENERATE = '"$@" generate --model tiny --temperature 0 --max-tokens 60 --prompt x'


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        (GENERATE, b"output-failed"),
        (f"{GENERATE} --json", b"output-failed"),
        ('"$@" model list', b"output-failed"),
        ('"$@" --help', b"output-failed"),
        ('"$@" generate --help', b"output-failed"),
        ('"$@" --version', b"output-failed"),
        ('"$@" model show absent --json', b"model-not-found"),
    ],
)
def test_a_full_stdout_is_one_line_and_status_2(tmp_path, line, code):
    done = shell(tmp_path, f"{line} >/dev/full")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(b"error[") == 1
    assert b"error[" + code + b"]" in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_a_closed_stdout_loses_the_answer_and_nothing_else(tmp_path):
    assert shell(tmp_path, f"{GENERATE} >&-").returncode == 0


def test_a_reader_that_goes_away_is_told_nothing(tmp_path):
    done = shell(tmp_path, f"{GENERATE} --json | head -1")
    assert done.stdout == b"{\n"
    assert b"rror" not in done.stderr
    assert done.returncode in (0, 141)


@pytest.mark.parametrize("arguments", ["model list --json", "--help"])
def test_a_reader_that_has_gone_is_status_141_and_not_our_fault(tmp_path, arguments):
    # The command is started once the read end is closed for certain.
    line = f'{{ sleep 0.2; exec "$@" {arguments}; }} | exec 0<&- true; exit "${{PIPESTATUS[0]}}"'
    done = shell(tmp_path, line)
    assert (done.returncode, done.stderr) == (141, b"")


def test_text_that_the_terminal_has_no_characters_for_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    output.prepare_streams()
    output.print_line("na\u00efve")
    output.print_json({"text": "na\u00efve"})
    first, rest = written.getvalue().split(b"\n", 1)
    assert first == b"na\\xefve"
    assert json.loads(rest) == {"text": "na\u00efve"}


def test_no_terminal_lacks_a_character_that_the_host_prints_of_itself():
    for path in Path(output.__file__).parents[1].rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name == "gguf_tokenizer.py":  # data of a file format, never printed
            text = text.replace("\u2581", "")
        assert text.isascii(), path


def test_an_argument_that_is_not_utf_8_is_a_usage_error(tmp_path):
    done = shell(tmp_path, "\"$@\" generate --model tiny --prompt $'\\xff\\xfe'")
    assert done.returncode == 2
    assert b"not valid UTF-8" in done.stderr


def test_a_transcript_can_not_be_a_folder(tmp_path):
    done = shell(tmp_path, f"{GENERATE} --record /")
    assert done.returncode == 2
    assert b"--record /" in done.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "disk-full"),
        (errno.EROFS, "not-writable"),
        (errno.EACCES, "not-writable"),
        (errno.ENOTDIR, "file-error"),
        (errno.EISDIR, "file-error"),
    ],
)
def test_what_the_machine_refuses_is_not_our_fault(number, code, capsys):
    error = OSError(number, os.strerror(number), "/some/file")
    assert output.report_error(error, debug=False, as_json=True) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error[{code}]: /some/file: {os.strerror(number)}")
    assert json.loads(shown.out)["error"]["code"] == code


def test_any_other_system_error_stays_a_fault(capsys):
    assert output.report_error(OSError(errno.EBADF, "bad"), debug=False, as_json=False) == 1
    assert "error[bug]" in capsys.readouterr().err
