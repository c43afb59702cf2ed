"""Options of the whole suite."""

from __future__ import annotations

import signal

import pytest


def pytest_configure() -> None:
    # A shell starts what runs in its background with SIGINT ignored, and children inherit that:
    # whatever the tests start is to be interruptible, as it is in a terminal.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# First: the plugin for parallel runs reads the marks in its own turn.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what one process of a parallel run keeps to itself: a file; of e2e all, for its one home."""
    for item in items:
        folder = item.path.parent
        item.add_marker(pytest.mark.xdist_group(folder.name if folder.name == "e2e" else str(item.path)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-backend",
        action="append",
        default=[],
        metavar="ID",
        help="fail, instead of skipping, where this plugin can't be used here; may be repeated",
    )
