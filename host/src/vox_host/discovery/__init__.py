"""Find plugins, import none of them.

Two places are looked at: the plugin folder (`installed`) and the distributions beside the host
(`environment`). A broken plugin is a candidate with its problem, listed like the others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vox_host.discovery.environment import GROUP, discover_in_environment
from vox_host.discovery.installed import discover_installed
from vox_host.resolution import Candidate

__all__ = ["GROUP", "discover", "discover_in_environment", "discover_installed"]

log = logging.getLogger(__name__)


def discover(plugins_dir: Path, search_path: Sequence[str] | None = None) -> list[Candidate]:
    """Return every plugin, one candidate per id, sorted by id.

    `search_path` is where the host's own distributions are; None: where Python looks.
    """
    found = {candidate.plugin_id: candidate for candidate in discover_in_environment(search_path)}
    for candidate in discover_installed(plugins_dir):
        other = found.get(candidate.plugin_id)
        if other is not None:
            note = f"installed; the one at {other.location} beside the host is not used"
            candidate = replace(candidate, notes=(*candidate.notes, note))
        found[candidate.plugin_id] = candidate
    for plugin_id in sorted(found):
        log.info("plugin.discovered id=%s origin=%s", plugin_id, found[plugin_id].origin)
    return [found[plugin_id] for plugin_id in sorted(found)]
