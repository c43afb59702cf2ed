"""Errors as text, and the one place that turns exceptions into exit codes."""

from __future__ import annotations

import json

import pytest

from vox_host import cli
from vox_host.cli.output import print_progress, print_table, print_warning, render_error, report_error
from vox_host.errors import IntegrityError, VoxError


def test_an_error_is_what_failed_the_facts_and_the_next_command() -> None:
    error = IntegrityError(
        "integrity-mismatch",
        'plugin "x" does not match its receipt; it was not started',
        facts=[("file", "a.py"), ("expected", "sha256:1"), ("output", "one\ntwo")],
        remedy="Install it again.",
    )
    assert render_error(error) == (
        'error[integrity-mismatch]: plugin "x" does not match its receipt; it was not started\n'
        "  file      a.py\n"
        "  expected  sha256:1\n"
        "  output    one\n"
        "            two\n"
        "Install it again."
    )


def run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    def build(_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_build", build)
    return cli.run(arguments)


@pytest.mark.parametrize(("kind", "status"), [(VoxError, 1), (IntegrityError, 4)])
def test_an_error_s_class_decides_the_exit_code(
    kind: type[VoxError], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(kind("a-code", "it failed"), monkeypatch) == status
    captured = capsys.readouterr()
    assert captured.err == "error[a-code]: it failed\n"
    assert captured.out == ""


def test_a_fault_of_ours_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(KeyError("x"), monkeypatch) == 1
    text = capsys.readouterr().err
    assert "fault of vox-host" in text
    assert "Traceback" not in text


def test_debug_adds_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(VoxError("a-code", "it failed"), monkeypatch, "--debug", "plugin", "list")
    assert "Traceback" in capsys.readouterr().err


def test_debug_after_the_command_is_the_command_s_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(VoxError("a-code", "it failed"), monkeypatch, "generate", "--prompt", "--debug")
    assert "Traceback" not in capsys.readouterr().err


def test_a_fact_that_is_empty_takes_no_line() -> None:
    facts = [("missing", []), ("note", ""), ("count", 0), ("found", None), ("models", ["a", "b"])]
    lines = render_error(VoxError("a-code", "it failed", facts=facts)).splitlines()
    assert lines[1:] == ["  count   0", "  found   None", "  models  a, b"]


def test_with_json_the_error_is_data_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_raising(VoxError("a-code", "it failed", facts=[("n", 1)]), monkeypatch, "plugin", "list", "--json")
    assert json.loads(capsys.readouterr().out) == {
        "error": {"code": "a-code", "message": "it failed", "facts": {"n": 1}, "remedy": None}
    }


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_raising(KeyboardInterrupt(), monkeypatch) == 130


def test_another_system_is_told_so_and_nothing_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli.platform, "system", lambda: "Windows")
    assert cli.run(["plugin", "list"]) == 3
    assert "this is Windows" in capsys.readouterr().err


def test_a_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("one", "x" * 200), ("2", "y")])
    assert capsys.readouterr().out == f"a    b\none  {'x' * 200}\n2    y\n"


def test_words_of_a_plugin_command_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = VoxError("own-code", "it is \x1b[31mred", facts=[("why", "a\x00b")])
    assert report_error(error, debug=False, as_json=False) == error.exit_code
    assert capsys.readouterr().err == "error[own-code]: it is \\x1b[31mred\n  why  a\\x00b\n"
    print_warning("it is \x1b[31mred\nerror[forged]: or so")
    print_progress("x could not be used: \x1b[31mred\nready")
    warned, said = capsys.readouterr().err.splitlines()
    assert warned == "warning: it is \\x1b[31mred error[forged]: or so"
    assert said == "  x could not be used: \\x1b[31mred ready"
