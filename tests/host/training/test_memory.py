"""Room for a run: refused with numbers, never guessed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.scripted_home import MACHINE
from fixtures.training_runs import some_options
from vox_host.app.training import check_memory
from vox_host.errors import UsageError
from vox_host.hardware.record import Device
from vox_host.settings import Settings
from vox_host.training.memory import check_room, memory_budget, peak_resident_bytes
from vox_plugin_api.train_messages import TrainMemory

GIB = 2**30


def budget(vendor, *devices):
    machine = MACHINE.model_copy(update={"devices": devices})
    return memory_budget(machine, vendor, unified_reserve_bytes=12 * GIB, vram_safety=0.5)


def test_the_budget_is_that_of_the_kind_of_device():
    nvidia = Device(kind="nvidia", index=0, name="a card", total_bytes=24 * GIB, free_bytes=20 * GIB)
    apple = Device(
        kind="apple", index=0, name="a chip", total_bytes=16 * GIB, free_bytes=9 * GIB, is_unified=True
    )
    available = MACHINE.memory.available_bytes
    assert budget("cpu", nvidia)[0] == available - available // 10
    assert budget("nvidia", nvidia) == (10 * GIB, "free memory of a card, times 0.5")
    assert budget("apple", apple)[0] == 4 * GIB
    assert budget("nvidia", nvidia.model_copy(update={"is_visible": False}))[0] is None


def test_a_run_that_does_not_fit_is_refused_with_both_numbers_and_what_takes_them():
    check_room({"weights": 5}, 8 * GIB, 8 * GIB, "a test")
    check_room({"weights": 5}, 8 * GIB, None, "a test")
    with pytest.raises(UsageError) as caught:
        check_room({"weights": 6 * GIB, "moments": 0, "activations": 3 * GIB}, 9 * GIB, 8 * GIB, "a test")
    assert caught.value.code == "insufficient-memory"
    assert "9.0 GiB" in caught.value.message and "8.0 GiB" in caught.value.message
    assert dict(caught.value.facts) == {
        "needed": f"{9 * GIB} bytes: weights 6.0 GiB, activations 3.0 GiB",
        "there is": f"{8 * GIB} bytes: a test",
    }


def test_the_measured_peak_is_the_systems_own(tmp_path):
    found = peak_resident_bytes(os.getpid())
    assert found is None or 2**20 < found < 2**40
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t   12 kB\nVmRSS:\t 5 kB\n")
    assert peak_resident_bytes(7, proc=tmp_path) == 12 * 1024
    assert peak_resident_bytes(8, proc=tmp_path) is None


@pytest.mark.parametrize(
    ("rows", "at_once", "expected"), [(54, 300_000, (2, 2)), (1, 300_000, (1, 1)), (54, None, (2, None))]
)
async def test_the_plan_counts_no_more_rows_than_a_step_has(rows, at_once, expected):
    asked = []

    async def plan(params):
        asked.append(params)
        kinds = {"weights": 1}
        memory = TrainMemory(place="host", kinds=kinds, total=1, examples_at_once=1, rows_at_once=1)
        return SimpleNamespace(memory=memory)

    options = some_options(batch_size=2, micro_batch_size=at_once)
    prepared = SimpleNamespace(
        options=options,
        chosen=SimpleNamespace(manifest=None),
        dataset=SimpleNamespace(train=[None] * rows, longest=8),
    )
    await check_memory(
        Settings(home=Path("unused")), MACHINE, prepared, SimpleNamespace(client=SimpleNamespace(plan=plan))
    )
    assert [(params.examples, params.micro_batch_size) for params in asked] == [expected]
