"""Build backend (PEP 517): scikit-build-core, with a compiler from PyPI where the machine has none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from native_compiler import ZIG_REQUIREMENT, compiler_environment, has_compiler
from scikit_build_core import build as _scikit

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, Any] | None

build_sdist = _scikit.build_sdist
get_requires_for_build_sdist = _scikit.get_requires_for_build_sdist
# Without these pip would build the whole wheel twice, once for its metadata.
prepare_metadata_for_build_editable = _scikit.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = _scikit.prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """CMake and ninja where missing, and a compiler where missing."""
    return [*_scikit.get_requires_for_build_wheel(config_settings), *_compiler_requirement()]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """As for a wheel."""
    return [*_scikit.get_requires_for_build_editable(config_settings), *_compiler_requirement()]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel, native library included."""
    with _compiler():
        return _scikit.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel, native library included."""
    with _compiler():
        return _scikit.build_editable(wheel_directory, config_settings, metadata_directory)


def _compiler_requirement() -> list[str]:
    return [] if has_compiler() else [ZIG_REQUIREMENT]


@contextmanager
def _compiler() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="mens-cpu-ref-") as folder:
        before = dict(os.environ)
        os.environ.update(compiler_environment(Path(folder)))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
