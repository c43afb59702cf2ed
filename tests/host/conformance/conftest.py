"""What `plugin check` needs of this machine."""

from __future__ import annotations

import pytest

from lanes.every_lane import make_lane


@pytest.fixture(scope="module")
def native(request: pytest.FixtureRequest) -> None:
    """The CPU lane can be used here, or its test is skipped and says why."""
    make_lane("mens-cpu-ref", request.config)
