"""`--kv-cache-mib`: no more than there is, and named where a context was cut by it."""

from __future__ import annotations

import pytest

from vox_host.app.service import ContextOverflowError
from vox_host.cli import kv_cache
from vox_host.cli.kv_cache import kv_cache_bytes
from vox_host.errors import UsageError
from vox_host.hardware.record import Cpu, Device, Machine, Memory

GIB = 1 << 30


def machine(*devices: Device) -> Machine:
    memory = Memory(total_bytes=23 * GIB, available_bytes=20 * GIB, source="told")
    cpu = Cpu(name="told", isa=(), usable_threads=2)
    return Machine(
        os="linux", os_version="6", arch="x86_64", python="3.11", cpu=cpu, memory=memory, devices=devices
    )


def never() -> Machine:
    raise AssertionError("probed for what main memory holds")


def test_more_than_the_machine_has_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr(kv_cache, "_main_memory", lambda: 23 * GIB)
    assert kv_cache_bytes(None, never) is None
    assert kv_cache_bytes(23 * 1024, never) == 23 * GIB
    for mib in (23 * 1024 + 1, 99_999_999_999, 10**22):
        with pytest.raises(UsageError, match="nothing was started") as caught:
            kv_cache_bytes(mib, machine)
        facts = dict(caught.value.facts)
        assert (facts["asked"], facts["main memory"]) == (f"{mib} MiB", "23552 MiB")
    gpu = Device(kind="nvidia", index=0, name="told", total_bytes=139 * GIB)
    assert kv_cache_bytes(100 * 1024, lambda: machine(gpu)) == 100 * GIB
    unified = Device(kind="apple", index=0, name="told", total_bytes=139 * GIB, is_unified=True)
    with pytest.raises(UsageError):
        kv_cache_bytes(100 * 1024, lambda: machine(unified))


def test_a_prompt_beyond_the_context_names_the_options_that_help():
    cut = ContextOverflowError(500, 384, is_estimate=False, model_context_length=1024)
    assert "--context-length, up to the model's 1024" in cut.remedy and "--kv-cache-mib" in cut.remedy
    whole = ContextOverflowError(2000, 1024, is_estimate=False, model_context_length=1024)
    assert "--" not in whole.remedy and "made for no longer context" in whole.remedy
