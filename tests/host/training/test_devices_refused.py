"""A plugin of one device that is asked for two: what was asked for is wrong, and the plugin is well."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from vox_host.app import training
from vox_host.errors import UsageError, VoxError, WorkerFailedError


@pytest.mark.parametrize(
    ("code", "devices", "kind", "status"),
    [
        ("not-supported", 2, UsageError, 2),
        ("not-supported", 1, WorkerFailedError, 5),
        ("died", 2, WorkerFailedError, 5),
    ],
)
def test_more_devices_than_a_plugin_has_are_the_user_s_to_mend(monkeypatch, code, devices, kind, status):
    async def plan(params):
        raise WorkerFailedError(code, "told", remedy="Leave it out.")

    monkeypatch.setattr(training, "vendor_of", lambda _: "cpu")
    monkeypatch.setattr(training, "memory_budget_of", lambda *_, devices: (1, "told"))
    monkeypatch.setattr(training.t, "TrainPlanParams", lambda **_: None)
    options = SimpleNamespace(adapter=None, batch_size=1, micro_batch_size=1)
    prepared = SimpleNamespace(options=options, chosen=None, dataset=SimpleNamespace(longest=1, train=[None]))
    opened = SimpleNamespace(client=SimpleNamespace(plan=plan))
    with pytest.raises(VoxError) as caught:
        asyncio.run(training.check_memory(None, None, prepared, opened, devices=devices))
    assert (type(caught.value), caught.value.exit_code) == (kind, status)
    assert (caught.value.code, caught.value.remedy) == (code, "Leave it out.")
