"""Every error about a plugin says what to do: in the code that raises it, and as `--json` tells it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vox_host
from vox_host import errors

HOST = Path(vox_host.__file__).parent
ROOMS = (
    "installation", "discovery", "resolution", "cli/plugin.py", "cli/plugin_check.py", "cli/plugin_facts.py",
    "packing.py", "manifest.py", "requirements.py", "receipt.py", "installed_tree.py", "integrity.py",
    "launch.py", "hooks.py", "tool_process.py", "environment_use.py",
)  # fmt: skip
ERRORS = {name for name in errors.__all__ if name.endswith("Error")} | {"Problem"}
SAYS_IT_ITSELF = "usage"
"""Of an option: the message names what it takes."""


def files():
    for room in ROOMS:
        place = HOST / room
        assert place.exists(), room
        yield from sorted(place.rglob("*.py")) if place.is_dir() else [place]


def raised(path: Path):
    """Each construction of an error of ours: line, code, and whether a remedy is given."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ERRORS and len(node.args) >= 2:
            code = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            yield node.lineno, code, any(keyword.arg == "remedy" for keyword in node.keywords)


@pytest.mark.parametrize("path", list(files()), ids=lambda path: str(path.relative_to(HOST)))
def test_every_error_has_a_remedy(path):
    without = [(line, code) for line, code, has_one in raised(path) if not has_one and code != SAYS_IT_ITSELF]
    assert without == []


def test_there_are_errors_to_look_at():
    assert sum(len(list(raised(path))) for path in files()) > 50
