"""Where this repository's own plugins run, for a request that names one which is not installed (pure).

One that can't be installed here can't say so itself. `tests/host/plugins/test_known.py` compares with their
manifests.
"""

from __future__ import annotations

__all__ = ["KNOWN", "why_not_here"]

KNOWN: dict[str, tuple[str, ...]] = {
    "mens-cpu-ref": ("linux", "macos"),
    "mens-torch-cuda": ("linux",),
    "mens-torch-mps": ("macos",),
}
"""Plugin to operating systems."""


def why_not_here(plugin_id: str, os: str) -> str | None:
    """Return the sentence for a plugin that can't run on `os` at all; None: it can, or is not known."""
    systems = KNOWN.get(plugin_id)
    if systems is None or os in systems:
        return None
    return f'plugin "{plugin_id}" can\'t run here: it needs {" or ".join(systems)}, and this is {os}'
