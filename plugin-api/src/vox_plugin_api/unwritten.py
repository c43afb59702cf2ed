"""What helps where the system did not write a file, in the words of every message about one (pure)."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["IS_FULL", "errno_name", "what_helps"]

IS_FULL = ("ENOSPC", "EDQUOT")
"""Of a disk, or of what this user may have of it: room would help."""

_HELPS: Mapping[str, str] = MappingProxyType(
    {
        "ENOSPC": "Make room",
        "EDQUOT": "Make room within your quota",
        "EFBIG": "Allow larger files (`ulimit -f`, or another file system)",
        "EACCES": "Allow this user to write there",
        "EPERM": "Allow this user to write there",
        "EROFS": "Make that file system writable",
        "ENAMETOOLONG": "Use a shorter name",
        "ENOENT": "Bring back what is missing",
        "ENOTDIR": "Bring back the folder",
        "EMFILE": "Allow more open files (`ulimit -n`)",
        "ENFILE": "Let other programs close files",
    }
)


def errno_name(error: OSError) -> str | None:
    """Return the system's name of an error ("ENOSPC"); None: it has none."""
    return None if error.errno is None else errno.errorcode.get(error.errno)


def what_helps(name: object) -> str:
    """Return the beginning of a remedy for the error of that name, without a full stop."""
    return _HELPS.get(str(name), "See to what the system said")
