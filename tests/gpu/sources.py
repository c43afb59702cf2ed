"""Puts this repository's sources on the path of a script, and a stand-in for the plugins' metadata.

The scripts beside this file run on a machine with a GPU, from a clone, with nothing of it installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT", "describe_distributions", "use_sources"]

ROOT = Path(__file__).parents[2]
_PLUGINS = {
    "mens-cpu-ref": "mens_cpu_ref",
    "mens-torch-cuda": "mens_torch_cuda",
    "mens-torch-mps": "mens_torch_mps",
}


def use_sources() -> None:
    """Let `mens_core` and the rest be imported from the clone."""
    sources = [
        "plugin-api/src",
        "plugins/mens-core/src",
        *(f"plugins/{name}/src" for name in _PLUGINS),
        "tests",
    ]
    sys.path[:0] = [str(ROOT / source) for source in sources]


def describe_distributions(folder: Path) -> None:
    """Write what an installation would have written, so that a plugin can ask for its own version."""
    for name, package in _PLUGINS.items():
        info = folder / f"{package}-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", "utf-8")
    sys.path.insert(0, str(folder))
