"""Packing builds a real wheel with pip, from a source folder whose build backend needs nothing."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from vox_host import packing
from vox_host.errors import PluginError, UsageError
from vox_host.manifest import Artifact, load_manifest
from vox_host.packing import pack_plugin, released_manifest

PYPROJECT = """\
[build-system]
requires = []
build-backend = "tiny_build"
backend-path = ["."]
[project]
name = "vox-toy"
version = "1.0.0"
"""
BACKEND = """\
import pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    FAIL
    name = "vox_toy-1.0.0-py3-none-any.whl"
    info = "vox_toy-1.0.0.dist-info"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        wheel.write("src/vox_toy/Plugin.toml", "vox_toy/Plugin.toml")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: vox-toy\\nVersion: 1.0.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
MANIFEST = """\
schema = 1
[plugin]
id = "vox-toy"
version = "1.0.0"
protocol = ">=1,<2"
summary = "a toy"
[backend]
lane = "cpu"
numerics = ["canonical"]
capabilities = ["generate"]
[requires]
os = ["linux", "macos"]
devices = []
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / "src/vox_toy").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "tiny_build.py").write_text(BACKEND.replace("FAIL", "pass"))
    (folder / "src/vox_toy/Plugin.toml").write_text(MANIFEST)
    return folder


def test_a_packed_plugin_is_a_wheel_and_a_manifest_that_names_its_checksum(source, tmp_path):
    packed = pack_plugin(source, tmp_path / "out", platform="linux-x86_64", environment=os.environ)
    released, _ = load_manifest(packed.manifest)
    artifact = released.artifacts["linux-x86_64"]
    content = (tmp_path / "out" / artifact.file).read_bytes()
    assert artifact.sha256 == hashlib.sha256(content).hexdigest() == packed.sha256
    assert artifact.size == len(content)
    embedded, _ = load_manifest(source / "src/vox_toy/Plugin.toml")
    assert released.model_copy(update={"artifacts": {}}) == embedded


def test_a_build_that_takes_long_says_so_with_its_seconds(source, tmp_path):
    (source / "tiny_build.py").write_text(BACKEND.replace("FAIL", "import time; time.sleep(0.5)"))
    said: list[str] = []
    pack_plugin(
        source,
        tmp_path / "out",
        platform="linux-x86_64",
        environment=os.environ,
        say=said.append,
        progress_every_s=0.1,
    )
    first, *ticks = said
    assert first == "building vox-toy 1.0.0 for linux-x86_64"
    assert len(ticks) >= 4
    assert all(re.fullmatch(re.escape(first) + r" \(\d+ s\)", line) for line in ticks)


def test_packing_for_a_second_platform_keeps_the_first_and_a_new_version_starts_afresh(source, tmp_path):
    out = tmp_path / "out"
    pack_plugin(source, out, platform="linux-x86_64", environment=os.environ)
    pack_plugin(source, out, platform="macos-aarch64", environment=os.environ)
    assert sorted(load_manifest(out / "Plugin.toml")[0].artifacts) == ["linux-x86_64", "macos-aarch64"]
    (source / "src/vox_toy/Plugin.toml").write_text(
        MANIFEST.replace('version = "1.0.0"', 'version = "1.1.0"')
    )
    pack_plugin(source, out, platform="macos-aarch64", environment=os.environ)
    assert sorted(load_manifest(out / "Plugin.toml")[0].artifacts) == ["macos-aarch64"]


def test_a_build_that_fails_shows_its_last_words_and_writes_nothing(source, tmp_path):
    (source / "tiny_build.py").write_text(
        BACKEND.replace("FAIL", "raise SystemExit('the compiler is on fire')")
    )
    with pytest.raises(PluginError) as caught:
        pack_plugin(source, tmp_path / "out", platform="linux-x86_64", environment=os.environ)
    assert "the compiler is on fire" in str(caught.value.facts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_stop_at_the_renames_leaves_the_wheel_with_its_manifest_or_neither(tmp_path, monkeypatch, when):
    files = {tmp_path / "a.whl": b"wheel", tmp_path / "Plugin.toml": b"manifest"}
    replace = Path.replace
    calls = []

    def stopped(path, target):
        calls.append(target)
        if calls == [tmp_path / "a.whl"]:
            if when == "between":
                replace(path, target)
            raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        packing._place(files)
    found = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == (files if when == "between" else {})


def test_a_stop_while_the_files_are_written_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "Plugin.toml").write_bytes(b"before")
    write = packing.write_file

    def stopped(path, content):
        write(path, content)
        if "Plugin" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(packing, "write_file", stopped)
    with pytest.raises(KeyboardInterrupt):
        packing._place({tmp_path / "a.whl": b"wheel", tmp_path / "Plugin.toml": b"manifest"})
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_a_folder_without_a_project_or_a_manifest_is_named(source, tmp_path):
    with pytest.raises(UsageError, match=r"has no pyproject\.toml; nothing was built"):
        pack_plugin(tmp_path, tmp_path / "out", platform="linux-x86_64", environment=os.environ)
    (source / "src/vox_toy/Plugin.toml").unlink()
    with pytest.raises(PluginError):
        pack_plugin(source, tmp_path / "out", platform="linux-x86_64", environment=os.environ)


def test_tables_are_in_the_order_of_their_platforms():
    artifact = Artifact(file="a.whl", sha256="0" * 64, size=1)
    text = released_manifest(MANIFEST, {"macos-aarch64": artifact, "linux-x86_64": artifact})
    assert text.startswith(MANIFEST.rstrip())
    assert text.index("[artifacts.linux-x86_64]") < text.index("[artifacts.macos-aarch64]")
