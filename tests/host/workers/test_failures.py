"""Errors that cross the wire."""

from __future__ import annotations

from vox_host.workers.failures import from_worker_error
from vox_plugin_api.messages import WorkerError


def test_a_request_that_an_older_plugin_does_not_know_has_a_next_command():
    facts = {"method": "train_plan", "protocol": [1, 1]}
    unknown = WorkerError(
        code="invalid-request", message="this worker cannot read request 'train_plan'", facts=facts
    )
    error = from_worker_error(unknown)
    assert error.remedy is not None and "`vox-host plugin list`" in error.remedy
    assert from_worker_error(unknown.model_copy(update={"facts": {}})).remedy is None
