"""docs/training.md names every error of a run with its status, and every key that `train --json` prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from vox_host import errors

ROOT = Path(__file__).parents[3]
HOST = ROOT / "host" / "src" / "vox_host"
DOCUMENT = ROOT / "docs" / "training.md"
SOURCES = [
    *sorted((HOST / "training").rglob("*.py")),
    *sorted((HOST / "runs").glob("*.py")),
    *sorted((HOST / "app").glob("training*.py")),
    *sorted((HOST / "cli").glob("train*.py")),
    HOST / "app" / "named_model.py",
    HOST / "app" / "adapter_fit.py",
]
# Raised where a status is on the way anyway: by the parser of options, by every command alike.
EVERYWHERE = {"usage"}


def raised(source: Path) -> Iterator[tuple[str, int]]:
    """Yield the codes of the errors that a module makes, with their exit status."""
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        kind = getattr(errors, node.func.id, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.VoxError)) or not node.args:
            continue
        code = node.args[0]
        if isinstance(code, ast.Constant):
            yield code.value, kind.exit_code
        elif isinstance(code, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "WHAT" for part in code.values)
            yield "".join(parts), kind.exit_code


def section(title: str) -> str:
    return DOCUMENT.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_error_code_of_a_run_is_listed_with_its_status():
    stated: dict[str, set[int]] = {}
    for source in SOURCES:
        for code, status in raised(source):
            stated.setdefault(code, set()).add(status)
    for code in EVERYWHERE:
        del stated[code]
    rows = re.findall(r"^\| `([a-zA-Z-]+)` \| ([\d, ]+) \|", section("Errors"), re.MULTILINE)
    listed = {code: {int(number) for number in numbers.split(",")} for code, numbers in rows}
    assert len(listed) == len(rows) > 30
    assert listed == stated


def keys_of(function: str, path: Path) -> set[str]:
    """Return the literal keys of the dicts that a function returns."""
    found = next(
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
    )
    return {
        key.value
        for node in ast.walk(found)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    } | {
        node.slice.value
        for node in ast.walk(found)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
    }


FINISHED = {"ended", "step", "peak_memory_bytes", "estimated_memory_bytes", "memory_of"}


@pytest.mark.parametrize(
    ("row", "functions"),
    [
        ("steps", [("train_texts", "facts_of"), ("train", "_end_at_once")]),
        ("interrupted", [("train", "_drive")]),
        ("dry-run", [("train_texts", "settled_facts"), ("train", "_resume")]),
        ("preview", [("train_texts", "show_preview"), ("train_texts", "_row_facts")]),
    ],
)
def test_every_key_that_json_prints_is_listed(row, functions):
    keys = set().union(*(keys_of(name, HOST / "cli" / f"{module}.py") for module, name in functions))
    [line] = [line for line in section("`--json`").splitlines() if line.startswith(f"| `{row}`")]
    written = set(re.findall(r"`([a-z_]+)`", line.split("|")[2]))
    # The line of timings.jsonl is made in the same function; the row counts what it has beside the first one.
    others = {"event", *FINISHED} if row == "interrupted" else set()
    assert written == keys - others
