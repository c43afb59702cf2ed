"""Every way of changing an installed plugin stops it: exit status 4, and the digests that differ."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from e2e.conftest import MODEL

pytestmark = pytest.mark.real_model
DIGEST = r"\b[0-9a-f]{64}\b"
ASK = ("generate", "--model", MODEL, "--prompt", "Hello", "--temperature", "0", "--max-tokens", "2")


@pytest.fixture
def tree(cli):
    return Path(json.loads(cli.run("plugin", "show", "mens-cpu-ref", "--json").stdout)["path"])


def native_library(tree: Path) -> Path:
    return next(p for p in tree.rglob("*") if p.suffix in (".so", ".dylib") and "mens_cpu_ref" in p.parts)


def test_one_flipped_bit_of_the_native_library_is_found_though_size_and_date_are_kept(cli, tree):
    victim = native_library(tree)
    before, data = victim.stat(), bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    original = victim.read_bytes()
    try:
        victim.write_bytes(data)
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
        for command in (
            ASK,
            (*ASK, "--plugin", "mens-cpu-ref"),
            ("serve", "--model", MODEL, "--port", "0"),
            ("plugin", "verify", "mens-cpu-ref"),
        ):
            done = cli.run(*command)
            assert done.returncode == 4, (command, done.stderr)
            assert victim.name in done.stderr, (command, done.stderr)
            assert len(set(re.findall(DIGEST, done.stderr))) >= 2, (command, done.stderr)
            assert "Traceback" not in done.stderr
        for command in (("list",), ("show", "mens-cpu-ref"), ("explain",)):
            done = cli.run("plugin", *command, "--json")
            assert done.returncode == 0, (command, done.stderr)
            json.loads(done.stdout)
    finally:
        victim.write_bytes(original)
    assert cli.run("plugin", "verify", "mens-cpu-ref").returncode == 0


def test_a_file_more_and_a_file_less_are_found_and_named(cli, tree):
    victim = next(tree.rglob("mens_cpu_ref/threads.py"))
    extra, aside = victim.with_name("sitecustomize.py"), tree.parent.parent / "aside.py"
    try:
        extra.write_text("")
        done = cli.run(*ASK)
        assert done.returncode == 4 and extra.name in done.stderr, done.stderr
    finally:
        extra.unlink()
    victim.rename(aside)
    try:
        done = cli.run(*ASK)
        assert done.returncode == 4 and victim.name in done.stderr, done.stderr
    finally:
        aside.rename(victim)
    assert cli.run("plugin", "verify", "mens-cpu-ref").returncode == 0
