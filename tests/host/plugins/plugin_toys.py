"""A tiny plugin, made by hand: wheels that install in a moment and need no network."""

from __future__ import annotations

import base64
import hashlib
import site
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from vox_host.hardware.record import Cpu, Device, Machine, Memory, Problem
from vox_host.installation.tools import Tools, find_tools
from vox_host.settings import tool_environment

REPOSITORY = Path(__file__).parents[3]
GIB = 1 << 30

MANIFEST = """schema = 1
[plugin]
id = "{id}"
version = "{version}"
protocol = "{protocol}"
summary = "a toy"
[backend]
lane = "{lane}"
numerics = ["fast"]
capabilities = ["generate"]
[requires]
os = ["linux", "macos"]
devices = [{devices}]
"""


def manifest_text(
    plugin_id: str = "vox-toy",
    version: str = "1.0.0",
    *,
    protocol: str = ">=1,<2",
    lane: str = "cpu",
    devices: tuple[str, ...] = (),
) -> str:
    quoted = ", ".join(f'"{text}"' for text in devices)
    return MANIFEST.format(id=plugin_id, version=version, protocol=protocol, lane=lane, devices=quoted)


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    entry_points: str = "",
    requires: tuple[str, ...] = (),
    tag: str = "py3-none-any",
) -> Path:
    """Write a valid wheel: the files, their RECORD, and the metadata."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {text}\n" for text in requires)
    contents = dict(files)
    contents[f"{info}/METADATA"] = metadata
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: {tag}\n"
    if entry_points:
        contents[f"{info}/entry_points.txt"] = entry_points
    record = []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in sorted(contents.items()):
            # Fixed dates: the same toy gives the same wheel.
            archive.writestr(zipfile.ZipInfo(file, (2020, 1, 1, 0, 0, 0)), text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(text.encode())}")
        record.append(f"{info}/RECORD,,")
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD", (2020, 1, 1, 0, 0, 0)), "\n".join(record) + "\n")
    return path


def write_toy_wheel(
    folder: Path,
    plugin_id: str = "vox-toy",
    version: str = "1.0.0",
    *,
    manifest: str | None = None,
    entry_points: str | None = None,
    files: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
    tag: str = "py3-none-any",
) -> Path:
    """Write the wheel of a plugin that raises if it is imported."""
    module = plugin_id.replace("-", "_")
    contents = {
        f"{module}/__init__.py": "raise SystemExit('imported')\n",
        f"{module}/Plugin.toml": manifest if manifest is not None else manifest_text(plugin_id, version),
        **(files or {}),
    }
    points = f"[vox_host.backends]\n{plugin_id} = {module}:make\n" if entry_points is None else entry_points
    return write_wheel(folder, plugin_id, version, contents, entry_points=points, requires=requires, tag=tag)


def write_api_wheel(folder: Path) -> Path:
    """Write the wheel of vox-plugin-api as it is in this repository, less its dependency."""
    source = REPOSITORY / "plugin-api" / "src"
    files = {
        path.relative_to(source).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted((source / "vox_plugin_api").rglob("*.py"))
    }
    return write_wheel(folder, "vox-plugin-api", "0.1.0", files)


def make_tools(which: str = "any", **changes: object) -> Tools:
    environment = tool_environment()
    python, uv = find_tools(environment)
    if which == "uv" and uv is None:
        pytest.skip("uv is not here")
    values: dict[str, object] = {
        "python": python,
        "uv": None if which == "pip" else uv,
        "environment": environment,
        "offline": True,
        **changes,
    }
    return Tools(**values)  # type: ignore[arg-type]


def a_machine(*devices: Device, problems: tuple[Problem, ...] = (), **changes: object) -> Machine:
    values: dict[str, object] = {
        "os": "linux",
        "os_version": "6.1",
        "arch": "x86_64",
        "python": "3.11.7",
        "cpu": Cpu(name="a CPU", isa=("x86-64-v2", "x86-64-v3"), usable_threads=2),
        "memory": Memory(total_bytes=16 * GIB, available_bytes=8 * GIB, source="test"),
        "devices": devices,
        "problems": problems,
        **changes,
    }
    return Machine.model_validate(values)


def an_nvidia(**changes: object) -> Device:
    values: dict[str, object] = {
        "kind": "nvidia",
        "index": 0,
        "name": "a GPU",
        "total_bytes": 24 * GIB,
        "free_bytes": 23 * GIB,
        "compute_capability": "8.9",
        "driver": "560.35.03",
        **changes,
    }
    return Device.model_validate(values)


def interpreter_that_sees(folder: Path, environment: Path) -> Path:
    """Make an interpreter that sees a folder and the worker loop, as one environment would."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/python*/site-packages"))
    paths = [folder, REPOSITORY / "plugin-api" / "src", *site.getsitepackages()]
    (packages / "paths.pth").write_text("".join(f"{path}\n" for path in paths))
    return environment / "bin" / "python"


def visible(plugins_dir: Path) -> list[str]:
    """What a plugin folder has for everybody."""
    return sorted(p.name for p in plugins_dir.iterdir() if p.name[0] != ".")


def hidden(plugins_dir: Path) -> list[str]:
    """Environments and what an installation is making, by name."""
    names = [p.name for p in plugins_dir.glob(".environments/*")]
    return sorted(names + [p.name for p in plugins_dir.glob(".staging-*")])


PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "vox-toy"
version = "1.0.0"
dependencies = ["vox-plugin-api==0.1.0"]
"""
BACKEND = """
import shutil
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy("made/{wheel}", wheel_directory)
    return "{wheel}"
"""


def a_project(folder: Path, name: str, wheel: Path) -> None:
    """Write a source folder whose build backend hands out a ready wheel: no network, no time."""
    (folder / "made").mkdir(parents=True)
    wheel.rename(folder / "made" / wheel.name)
    (folder / "backend.py").write_text(BACKEND.format(wheel=wheel.name))
    text = PROJECT.replace('"vox-toy"', f'"{name}"')
    if name == "vox-plugin-api":
        text = text.replace('version = "1.0.0"', 'version = "0.1.0"')
        text = text.replace('"vox-plugin-api==0.1.0"', "")
    (folder / "pyproject.toml").write_text(text)
