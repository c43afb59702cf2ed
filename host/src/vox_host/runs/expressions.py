"""Match regular expressions that came with a file against names, without trusting them.

Python's matcher can be made to run for longer than anyone waits, and can't be stopped from within.
What can't repeat or choose is matched here; anything else in a child process that is ended in time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vox_host.errors import ModelError

__all__ = ["first_groups"]

_LIMIT_S = 5.0
_LONGEST = 10_000
_HARMLESS = re.compile(r"[A-Za-z0-9_.^$\\/-]*")
_CHILD = """
import json, re, sys
asked = json.load(sys.stdin)
made = []
for ours, theirs in asked["expressions"]:
    try:
        compiled = re.compile(ours.replace("<>", theirs))
        match = compiled.fullmatch if ours == "<>" else compiled.match
        found = [match(name) for name in asked["names"]]
        made.append([m and (m.groupdict().get("idx") or "") for m in found])
    except (re.error, RecursionError, OverflowError) as error:
        made.append(str(error))
json.dump(made, sys.stdout)
"""


def first_groups(
    expressions: Sequence[tuple[str, str]], names: Sequence[str], *, source: Path
) -> list[list[str | None]]:
    """Return, for each expression and name, None where it doesn't match, else its group `idx` or "".

    Args:
        expressions: ours, in which "<>" stands for theirs, and theirs. "<>" alone fits a whole name,
            anything else the beginning of one.
        source: the file that theirs are from, for messages.

    Raises:
        ModelError: `adapter-expression`: one is not an expression, is too long, or takes too long.
    """
    for _, theirs in expressions:
        if len(theirs) > _LONGEST:
            raise _refused(source, theirs, f"has {len(theirs)} characters; {_LONGEST} are taken at most")
    made: list[list[str | None] | str]
    if all(_HARMLESS.fullmatch(theirs) for _, theirs in expressions):
        made = [_here(ours, theirs, names) for ours, theirs in expressions]
    else:
        made = _in_child(expressions, names, source)
    found = []
    for (_, theirs), groups in zip(expressions, made, strict=True):
        if isinstance(groups, str):
            raise _refused(source, theirs, f"is no regular expression: {groups}")
        found.append(groups)
    return found


def _here(ours: str, theirs: str, names: Sequence[str]) -> list[str | None] | str:
    try:
        compiled = re.compile(ours.replace("<>", theirs))
    except re.error as error:
        return str(error)
    match_one = compiled.fullmatch if ours == "<>" else compiled.match
    matches = [match_one(name) for name in names]
    return [match and (match.groupdict().get("idx") or "") for match in matches]


def _in_child(
    expressions: Sequence[tuple[str, str]], names: Sequence[str], source: Path
) -> list[list[str | None] | str]:
    asked = json.dumps({"expressions": list(expressions), "names": list(names)})
    command = [sys.executable, "-I", "-S", "-B", "-c", _CHILD]
    try:
        done = subprocess.run(
            command, input=asked.encode(), capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        whole = ", ".join(theirs for _, theirs in expressions)
        raise _refused(source, whole, f"was not matched within {_LIMIT_S:g} seconds") from None
    if done.returncode != 0:
        whole = ", ".join(theirs for _, theirs in expressions)
        raise _refused(source, whole, f"ended its matcher with status {done.returncode}")
    made: list[list[str | None] | str] = json.loads(done.stdout)
    return made


def _refused(source: Path, expression: str, problem: str) -> ModelError:
    return ModelError(
        "adapter-expression",
        f"{source}: {expression!r:.120} {problem}; nothing was loaded",
        facts=[("file", str(source)), ("expression", expression[:1000])],
        remedy="Write the names of the layers in its place, or merge the adapter with PEFT.",
    )
