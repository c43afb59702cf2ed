"""Fixtures around the toy plugin of `plugin_toys`."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Test files import the toys by name; pytest's importlib mode puts no folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

from plugin_toys import a_project, make_tools, manifest_text, write_api_wheel, write_toy_wheel

from vox_host.installation import Installed, InstallRequest, install
from vox_host.installation.tools import Tools


@pytest.fixture
def plugins_dir(tmp_path: Path) -> Path:
    return tmp_path / "home" / "plugins"


@pytest.fixture(params=["uv", "pip"])
def tools(request: pytest.FixtureRequest, tmp_path: Path) -> Tools:
    return make_tools(request.param)


@pytest.fixture
def request_for(plugins_dir: Path) -> Callable[..., InstallRequest]:
    """Make an installation request with this machine's defaults."""

    def make(path: Path, **changes: object) -> InstallRequest:
        values: dict[str, object] = {
            "path": path,
            "plugins_dir": plugins_dir,
            "os": "macos" if sys.platform == "darwin" else "linux",
            "arch": "x86_64",
            "tools": make_tools(),
            "host_version": "0.1.0",
            **changes,
        }
        return InstallRequest(**values)  # type: ignore[arg-type]

    return make


@pytest.fixture
def installed_toy(tmp_path: Path, request_for: Callable[..., InstallRequest]) -> Installed:
    """A toy plugin with vox_plugin_api in its environment."""
    folder = tmp_path / "wheels"
    write_api_wheel(folder)
    wheel = write_toy_wheel(folder, requires=("vox-plugin-api==0.1.0",))
    return install(request_for(wheel))


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[..., Path]:
    """Lay a toy distribution out as it lies on a search path."""

    def make(name: str = "site", **changes: object) -> Path:
        site = tmp_path / name
        wheel = write_toy_wheel(tmp_path / "unpacked-wheels", **changes)  # type: ignore[arg-type]
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        wheel.unlink()
        return site

    return make


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a plugin and the distribution it needs beside it, as in this repository."""
    root = tmp_path / "clone"
    a_project(root / "plugin-api", "vox-plugin-api", write_api_wheel(tmp_path / "made"))
    toy = root / "plugins" / "vox-toy"
    a_project(toy, "vox-toy", write_toy_wheel(tmp_path / "made", requires=("vox-plugin-api==0.1.0",)))
    (toy / "src" / "vox_toy").mkdir(parents=True)
    (toy / "src" / "vox_toy" / "Plugin.toml").write_text(manifest_text())
    return root
