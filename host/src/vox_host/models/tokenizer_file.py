"""Load a tokenizer.json without keeping what loading it took."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from tokenizers import Tokenizer

from vox_host.errors import ModelError

__all__ = ["load_tokenizer", "trim_heap"]


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
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
