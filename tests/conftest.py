"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="ID",
        help="fail, instead of skipping, where this plugin can't be used here; may be repeated",
    )
