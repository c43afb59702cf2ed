"""What every test may ask for: lanes that must be present, and the demo model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="ID",
        help="fail, instead of skipping, where this plugin can't be used here; may be repeated",
    )


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo model as its GGUF file, which VOX_TEST_GGUF names."""
    path = os.environ.get("VOX_TEST_GGUF")
    if not path:
        pytest.skip("the demo model is not here: VOX_TEST_GGUF names no GGUF file of Gemma 3 270M")
    assert Path(path).is_file(), f"VOX_TEST_GGUF names {path}, which is no file"
    return Path(path)
