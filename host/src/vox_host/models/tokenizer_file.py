"""Load a tokenizer.json without keeping what loading it took."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from vox_host.errors import ModelError

__all__ = ["keep_heap_small", "load_tokenizer", "trim_heap"]

_M_MXFAST = 1
_M_ARENA_MAX = -8


def load_tokenizer(path: Path) -> Tokenizer:
    """Load `path`, a tokenizer.json, and give the memory that parsing it took back to the system.

    Raises:
        ModelError: the file is missing or isn't a tokenizer.
    """
    if not path.is_file():
        raise ModelError(
            "tokenizer-missing",
            f"{path} does not exist; no tokenizer was loaded",
            remedy="Take it from the model's makers, and import the model again.",
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception, whatever was wrong
        raise ModelError(
            "tokenizer-invalid",
            f"{path} is not a tokenizer this host can read: {error}",
            remedy="Import the model again.",
        ) from None
    trim_heap()
    return tokenizer


def trim_heap() -> None:
    """Return freed pages to the system: glibc keeps tens of megabytes after a large vocabulary."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def keep_heap_small() -> None:
    """Have what is freed lie together, in one heap, so that `trim_heap` finds whole pages of it.

    A vocabulary is half a million small texts between as many that its reading drops. glibc would give each
    thread a heap of its own, and not join small pieces that are freed: 11 MiB more of Gemma's. Called before
    there is a second thread, since one that has a heap keeps it. The interpreter's lock leaves threads
    nothing to gain from several.
    """
    choose = _of_glibc("mallopt")
    if choose is not None:
        choose(_M_ARENA_MAX, 1)
        choose(_M_MXFAST, 0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return one of glibc's functions; None elsewhere, musl included."""
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found
