"""Every error that someone can mend says how: in the code that raises it, so in text, JSON and HTTP."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vox_host
from vox_host import errors

HOST = Path(vox_host.__file__).parent
ERRORS = {name for name in errors.__all__ if name.endswith("Error")}
FILES = sorted(path for path in HOST.rglob("*.py") if path.name != "errors.py")
EXEMPT = {
    "usage": "the message names the option and what it takes",
    "file-error": "the message names the file and the system's reason; which file it is decides what helps",
    "run-not-written": "`drive` gives the remedy: where the run goes on is known there",
    "restart-unreadable": "the worker is tried again, and the reason is the system's",
    "answer-incomplete": "a plugin's mistake: `plugin check` names it",
    "incomplete-answer": "a plugin's mistake: `plugin check` names it",
    "worker-running": "a mistake of ours",
    "worker-stopped": "it was asked to stop",
    "demo-differs": "what the demo shows: there is nothing to mend but a plugin",
    "demo-request": "the server's own words are in it",
    "demo-serve": "its output is above",
    "demo-manifest-invalid": "a file that we ship",
}
"""Codes of which nobody who reads them can mend anything, or which say it themselves; and why."""


def raised(path: Path):
    """Each error that is made: line, code, and whether a remedy is given or passed on."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS):
            continue
        if len(node.args) >= 2:
            # One that passes another's on has no code of its own.
            code = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            yield node.lineno, code, any(keyword.arg == "remedy" for keyword in node.keywords)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOST)))
def test_every_error_has_a_remedy(path):
    assert [(line, code) for line, code, has_one in raised(path) if not has_one and code not in EXEMPT] == []


def test_what_is_exempt_is_raised_somewhere():
    codes = {code for path in FILES for _, code, has_one in raised(path) if not has_one}
    assert codes == EXEMPT.keys()
