"""Where a lane's kernels ran, if not on the device that its name says: the label of every report (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["describe_lane", "execution_of"]

_PLAYED = "in a gpu's place"


def describe_lane(lane: str, execution: str | None) -> str:
    """Return the lane as every list and report shows it: "cpu", or "metal (executed on CPU, ...)"."""
    return f"{lane} ({execution})" if execution else lane


def execution_of(stated: str | None, said: object) -> str | None:
    """Return the label: the manifest's, else what the loaded lane's own facts come to.

    A lane that plays a device and states no label gets one here, so that no report of it passes for one of
    the device.

    Args:
        said: the observation of `load_model`; its `lane` holds the lane's facts, if it told any.
    """
    if stated:
        return stated
    facts = said.get("lane") if isinstance(said, Mapping) else None
    if not isinstance(facts, Mapping):
        return None
    own: Any = facts.get("execution")
    if own:
        return str(own)
    device = str(facts.get("device", ""))
    return f"executed on {device}" if _PLAYED in device.lower() else None
