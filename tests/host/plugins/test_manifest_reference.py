"""docs/writing-a-plugin.md says what the schema says, and its example runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugin_toys import REPOSITORY, a_machine, interpreter_that_sees, write_wheel

from vox_host.discovery import discover_in_environment
from vox_host.launch import plan_launch
from vox_host.manifest import Manifest
from vox_host.requirements import FEATURES, parse_requirement
from vox_host.resolution import Request, resolve
from vox_host.workers import Supervisor
from vox_plugin_api import messages as m

PAGE = REPOSITORY / "docs" / "writing-a-plugin.md"


def rows_of(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, field in schema["properties"].items():
        target = definitions.get(field.get("$ref", "").rpartition("/")[2])
        if name == "artifacts":
            yield f"| `[artifacts.PLATFORM]` | table | no | {field['description']} |"
            yield from rows_of(definitions["Artifact"], definitions, "artifacts.PLATFORM.")
        elif target is not None:
            yield from rows_of(target, definitions, f"{prefix}{name}.")
        else:
            required = "yes" if name in schema.get("required", []) else "no"
            yield f"| `{prefix}{name}` | {type_of(field)} | {required} | {field['description']} |"


def type_of(field: dict[str, Any]) -> str:
    if "const" in field:
        return f"`{field['const']}`"
    options = [o for o in field.get("anyOf", [field]) if o.get("type") != "null"]
    kind = options[0]["type"]
    if kind != "array":
        return str(kind)
    words = options[0]["items"].get("enum")
    return "list of " + (", ".join(f'`"{word}"`' for word in words) if words else "strings")


def test_the_reference_is_the_schema() -> None:
    schema = Manifest.model_json_schema(by_alias=True)
    expected = list(rows_of(schema, schema["$defs"]))
    text = PAGE.read_text(encoding="utf-8")
    table = text.partition("<!-- manifest reference")[2].partition("<!-- end -->")[0]
    written = [line for line in table.splitlines() if line.startswith(("| `",))]
    assert written == expected, "\n".join(["write this into docs/writing-a-plugin.md:", *expected])


def test_every_feature_of_a_requirement_is_in_the_page_and_parses() -> None:
    text = PAGE.read_text(encoding="utf-8")
    shown = [parse_requirement(line) for line in re.findall(r"^\| `(\w+ :: [^`]+)`", text, re.MULTILINE)]
    assert {(r.namespace, r.feature) for r in shown} == {(n, f) for n, fs in FEATURES.items() for f in fs}


def test_every_refusal_in_the_sources_is_in_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sources = REPOSITORY / "host" / "src" / "vox_host"
    discovery = "".join(path.read_text() for path in (sources / "discovery").glob("*.py"))
    codes = set(re.findall(r'code="([a-z-]+)"', discovery))
    codes |= set(re.findall(r'"failed", "([a-z-]+)"', (sources / "resolution" / "stages.py").read_text()))
    missing = sorted(code for code in codes if f"`{code}`" not in text)
    assert codes
    assert missing == []


def blocks(text: str) -> dict[str, str]:
    """Return the example's files by the path written above each block."""
    return dict(re.findall(r"^`([\w./]+)`\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


async def test_the_example_is_found_starts_and_answers(tmp_path: Path) -> None:
    files = blocks(PAGE.read_text(encoding="utf-8").split("## A lane, in an hour")[0])
    assert set(files) == {"pyproject.toml", "src/vox_echo/Plugin.toml", "src/vox_echo/__init__.py"}
    points = re.search(r'"vox_host.backends"\]\n(.*)\n', files["pyproject.toml"])
    assert points is not None
    wheel = write_wheel(
        tmp_path,
        "vox-echo",
        "1.0.0",
        {name.removeprefix("src/"): text for name, text in files.items() if name.startswith("src/")},
        entry_points=f"[vox_host.backends]\n{points[1].replace(chr(34), '')}\n",
    )
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, site], check=True)
    (found,) = discover_in_environment([str(site)])
    candidate = replace(found, python=interpreter_that_sees(site, tmp_path / "environment"))
    chosen = resolve(Request(plugin="vox-echo"), a_machine(), [candidate]).chosen
    supervisor = Supervisor(plan_launch(chosen, plugins_dir=tmp_path, log_dir=tmp_path / "log"))
    await supervisor.start()
    try:
        (tmp_path / "config.json").write_text('{"vocab_size": 8}')
        load = m.LoadModelParams(model_dir=str(tmp_path), model_digest="0" * 64)
        loaded = await supervisor.call("load_model", load)
        assert m.LoadResult.model_validate(loaded.result).architecture == "echo"
        params = m.GenerateParams(token_ids=[5, 6, 7], max_tokens=2)
        answer = [
            m.GenerateResult.model_validate(event.result)
            async for event in supervisor.stream("generate", params)
            if event.result is not None
        ]
    finally:
        await supervisor.stop()
    assert [token.token_id for result in answer for token in result.tokens] == [5, 6]
    assert answer[-1].finish_reason == "length"


def test_the_example_is_type_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not here")
    from mypy import api

    path = tmp_path / "vox_echo.py"
    path.write_text(blocks(PAGE.read_text(encoding="utf-8"))["src/vox_echo/__init__.py"])
    out, errors, status = api.run(
        [
            "--strict",
            "--config-file=",
            f"--cache-dir={tmp_path / 'cache'}",
            "--follow-imports=silent",
            str(path),
        ]
    )
    assert status == 0, out + errors
