"""A run's folder is the run's: nothing else is made within it."""

from __future__ import annotations

from pathlib import Path

from vox_host.errors import UsageError
from vox_host.runs.layout import RUN_JSON

__all__ = ["refuse_inside_run"]


def refuse_inside_run(out: Path, undone: str) -> None:
    """Refuse a place for something new that lies in a run's folder.

    Args:
        undone: what did not happen, for the message.

    Raises:
        UsageError: `out-inside-run`.
    """
    for above in out.absolute().parent.resolve().joinpath(out.name).parents:
        if (above / RUN_JSON).is_file():
            raise UsageError(
                "out-inside-run",
                f"--out {out} lies inside {above}, which is a run; {undone}",
                facts=[("run", str(above))],
                remedy="Name a folder outside of it.",
            )
