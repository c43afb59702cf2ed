"""A script's folder comes first where Python looks for modules: no file there may hide a package.

`bench/gpu.py` once hid `tests/gpu`, and `bench/cuda.py` the package `cuda`: both failed on a GPU only.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
SOURCES = [ROOT / "plugin-api" / "src", ROOT / "host" / "src", *sorted(ROOT.glob("plugins/*/src"))]


def is_script(path: Path) -> bool:
    return '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")


FOLDERS = sorted(
    {
        path.parent
        for top in ("bench", "tests", "tools")
        for path in (ROOT / top).rglob("*.py")
        if "cases" not in path.parts and is_script(path)
    }
)


def importable(folder: Path) -> set[str]:
    """Return the names that stand in a folder for whoever has it first on the path."""
    packages = {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    return {path.stem for path in folder.glob("*.py") if path.stem not in ("__init__", "conftest")} | packages


@pytest.fixture(scope="module")
def needed() -> set[str]:
    """What a script may need, but for what is installed here: ours, the interpreter's, what ours import."""
    ours = {path.name for source in SOURCES for path in source.iterdir()} | importable(TESTS)
    text = "\n".join(path.read_text(encoding="utf-8") for source in SOURCES for path in source.rglob("*.py"))
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE))
    # Without a GPU's packages here, their names are known all the same.
    assert {"cuda", "torch", "numpy", "vox_host", "gpu"} <= ours | imported
    return ours | imported | set(sys.stdlib_module_names)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_no_file_beside_a_script_hides_what_scripts_import(folder, needed):
    installed = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    hidden = {
        name
        for name in importable(folder)
        if (name in needed and folder != TESTS) or PathFinder.find_spec(name, installed) is not None
    }
    assert hidden == set()


def test_the_folders_of_scripts_are_found():
    assert {ROOT / "bench", TESTS / "gpu", TESTS / "conformance"} <= set(FOLDERS)
