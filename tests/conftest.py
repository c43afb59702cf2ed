"""Options of the whole suite."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that:
    # whatever the tests start is to be interruptible, as it is in a terminal.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="ID",
        help="fail, instead of skipping, where this plugin can't be used here; may be repeated",
    )
