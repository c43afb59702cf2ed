"""Installing a source folder: built with what lies beside it, and again only where something changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_toys import make_tools, manifest_text

from vox_host.discovery import discover_installed
from vox_host.errors import PluginError
from vox_host.installation import InstallRequest, install
from vox_host.installation.sources import digest_of_sources, find_sibling_sources
from vox_host.installation.tools import Tools
from vox_host.integrity import verify_installation

MakeRequest = Callable[..., InstallRequest]


def test_a_source_folder_is_built_with_the_distributions_beside_it(
    clone: Path, request_for: MakeRequest, plugins_dir: Path, tools: Tools
) -> None:
    lines: list[str] = []
    quiet = make_tools("uv" if tools.uv else "pip", report=lines.append)
    installed = install(request_for(clone / "plugins" / "vox-toy", tools=quiet))
    assert installed.receipt.trust == "development"
    assert discover_installed(plugins_dir)[0].problem is None
    assert any(str(clone / "plugin-api") in line for line in lines)


def test_installing_the_same_sources_again_does_nothing(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    first = install(request_for(path))
    again = install(request_for(path))
    assert again.was_unchanged
    assert again.receipt == first.receipt
    assert not install(request_for(path, force=True)).was_unchanged


def test_changed_sources_or_changed_files_are_installed_again(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    first = install(request_for(path)).receipt
    (plugins_dir / first.environment / first.packages / "evil.pth").write_text("")
    second = install(request_for(path))
    assert not second.was_unchanged
    verify_installation(second.receipt, plugins_dir)
    (clone / "plugin-api" / "new.py").write_text("")
    assert not install(request_for(path)).was_unchanged


def test_a_foreign_plugin_is_refused_before_it_is_built(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    (path / "src" / "vox_toy" / "Plugin.toml").write_text(manifest_text(protocol=">=99,<100"))
    (path / "backend.py").write_text("raise SystemExit('built')")
    with pytest.raises(PluginError) as caught:
        install(request_for(path))
    assert caught.value.code == "protocol-unsupported"


def test_a_build_that_fails_shows_the_builder_s_words(clone: Path, request_for: MakeRequest) -> None:
    path = clone / "plugins" / "vox-toy"
    (path / "backend.py").write_text(
        "def build_wheel(*a): raise OSError('No CMAKE_CXX_COMPILER could be found')"
    )
    with pytest.raises(PluginError) as caught:
        install(request_for(path))
    assert caught.value.code == "no-compiler"
    assert "CMAKE_CXX_COMPILER" in dict(caught.value.facts)["output"]


def test_a_sibling_of_another_version_is_not_taken(clone: Path) -> None:
    toy = clone / "plugins" / "vox-toy"
    assert find_sibling_sources(toy) == [clone / "plugin-api"]
    project = clone / "plugin-api" / "pyproject.toml"
    project.write_text(project.read_text().replace("0.1.0", "0.2.0"))
    assert find_sibling_sources(toy) == []


def test_build_results_do_not_count_as_sources(clone: Path) -> None:
    before = digest_of_sources([clone])
    for name in ("build/x.o", "src/x.egg-info/PKG-INFO", "__pycache__/x.pyc", ".git/HEAD", "lib.so"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("x")
    assert digest_of_sources([clone]) == before
    (clone / "kernel.cpp").write_text("x")
    assert digest_of_sources([clone]) != before
