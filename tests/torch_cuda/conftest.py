"""What the tests of fast mode share, which runs on the CPU here."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Tiny products: threads would only wait for one another."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
