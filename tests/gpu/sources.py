"""Puts this repository's sources on the path of a script, and a stand-in for the plugins' metadata.

The scripts beside this file run on a machine with a GPU, from a clone, with nothing of it installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["ROOT", "describe_distributions", "refuse_bare_python", "use_sources"]

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


def refuse_bare_python(lane: str, *, also: tuple[str, ...] = ()) -> None:
    """End with status 2 and what to do, where this Python lacks what a script needs; before it imports any.

    Args:
        lane: `cuda` or `metal`: the environment that `make` looks for is `.venv-LANE`.
        also: modules besides those that all scripts need, by the names of their distributions.
    """
    needed = ("torch", "numpy", "pydantic", "safetensors", *also)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    wanted = [*needed, "cmake", *(["cuda-bindings"] if lane == "cuda" else [])]
    found = sys.version_info[:2]
    if not missing and (3, 11) <= found <= (3, 13):
        return
    said = f"lacks {', '.join(missing)}" if missing else f"is Python {found[0]}.{found[1]}, not 3.11 to 3.13"
    print(
        f"{sys.executable} {said}; nothing was checked. Make an environment with Python 3.11 to 3.13: "
        f"python3 -m venv .venv-{lane} && .venv-{lane}/bin/python -m pip install {' '.join(wanted)}; "
        f"then make test-{lane}, or name another with make test-{lane} {lane.upper()}_PYTHON=PATH",
        file=sys.stderr,
    )
    raise SystemExit(2)


def describe_distributions(folder: Path) -> None:
    """Write what an installation would have written, so that a plugin can ask for its own version."""
    for name, package in _PLUGINS.items():
        info = folder / f"{package}-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n", "utf-8")
    sys.path.insert(0, str(folder))
