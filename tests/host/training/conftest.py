"""Runs flush every line to disk; these tests are about what is written, not about how soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.fast_folder import fast_folder


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """Yield a new folder."""
    with fast_folder(tmp_path) as folder:
        yield folder
