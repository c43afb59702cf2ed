"""vox-host doctor: this machine as probed, and which plugin would run on it and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vox_host.cli.output import print_json, print_line, print_table, print_warning
from vox_host.cli.stopping import SHOWN_IN_PART, stoppable
from vox_host.counted import counted
from vox_host.discovery import discover
from vox_host.errors import VoxError
from vox_host.hardware.budget import device_budget_bytes, main_memory_budget_bytes
from vox_host.hardware.probe import probe_machine
from vox_host.hardware.record import Device, Machine, Memory
from vox_host.launch import with_verified_bytes
from vox_host.resolution import AUTO, Candidate, Request, Resolution, explain, resolve
from vox_host.settings import Settings, load_settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command()(doctor)


@stoppable(SHOWN_IN_PART)
def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show this machine, and which plugin would run on it and why.

    Exit status 0: a plugin can run and no probe found fault; 3 otherwise.
    """
    settings = load_settings()
    machine = probe_machine()
    candidates = with_verified_bytes(discover(settings.plugins_dir), settings.plugins_dir)
    request = Request(plugin=AUTO, capability="generate", numerics=None, require_verified=False)
    chosen: Resolution | None = None
    reason: str | None = None
    try:
        chosen = resolve(request, machine, candidates)
    except VoxError as error:
        reason = error.message
    healthy = chosen is not None and not machine.problems
    records = explain(request, machine, candidates)
    lane_facts = _lane_facts(candidates, settings)
    if json:
        print_json(
            {
                "healthy": healthy,
                "machine": machine.model_dump(mode="json"),
                "budgets": _budgets(machine, settings),
                "chosen": chosen.chosen.plugin_id if chosen else None,
                "executions": {c.plugin_id: c.execution for c in candidates if c.execution is not None},
                "lane_facts": lane_facts,
                "reason": reason,
                "degraded_reason": chosen.degraded_reason if chosen else None,
                "records": [record.as_dict() for record in records],
            }
        )
    else:
        _print_machine(machine, settings)
        print_line("")
        for record in records:
            if record.status == "failed":
                print_line(f"{record.plugin_id}: no, at {record.stage}: {record.detail}")
                if record.remedy:
                    print_line(f"  {record.remedy}")
        for candidate in candidates:
            if candidate.execution is not None:
                print_line(f"{candidate.plugin_id}: lane {candidate.described_lane}")
        for plugin_id, facts in lane_facts.items():
            said = ", ".join(f"{name} {value}" for name, value in facts.items())
            print_line(f"{plugin_id}: when it was checked its lane said: {said}")
        if chosen is not None:
            print_line(f"would run: {chosen.chosen.plugin_id} (lane {chosen.chosen.described_lane})")
            if chosen.degraded_reason:
                print_warning(chosen.degraded_reason)
        else:
            print_line(f"nothing would run: {reason}")
            print_line("Install one: vox-host plugin install --path SOURCE")
    if not healthy:
        raise typer.Exit(3)


def _lane_facts(candidates: Sequence[Candidate], settings: Settings) -> dict[str, dict[str, Any]]:
    """Return what each lane said of itself in the check whose verdict stands: doctor starts no worker."""
    from vox_host.conformance.record import describe

    found = {}
    for candidate in candidates:
        verdict = describe(settings.plugins_dir, candidate.plugin_id, candidate.receipt)
        if verdict is not None and not verdict["stale"] and verdict["lane_facts"]:
            # Digests are for reports.
            found[candidate.plugin_id] = {
                name: value
                for name, value in verdict["lane_facts"].items()
                if isinstance(value, str | int | float) and not name.endswith("sha256")
            }
    return found


def _print_machine(machine: Machine, settings: Settings) -> None:
    cpu, memory = machine.cpu, machine.memory
    isa = ", ".join(cpu.isa) or "below x86-64-v3; the CPU lane refuses it"
    print_table(
        ("machine", f"{machine.platform}, {machine.os} {machine.os_version}, Python {machine.python}"),
        [
            ("processor", f"{cpu.name}, {counted(cpu.usable_threads, 'usable thread')}, {isa}"),
            (
                "memory",
                f"{_gib(memory.available_bytes)} of {_gib(memory.total_bytes)} available ({memory.source})",
            ),
            ("budget", f"{_gib(main_memory_budget_bytes(memory))} for a job on the CPU"),
            *(("device", _describe(device, memory, settings)) for device in machine.devices),
        ],
    )
    if not machine.devices:
        print_line("device     no accelerator was found")
    for problem in machine.problems:
        print_warning(f"{problem.source}: {problem.detail}")
        if problem.remedy:
            print_line(f"  {problem.remedy}")


def _describe(device: Device, memory: Memory, settings: Settings) -> str:
    parts = [f"{device.kind} {device.index}: {device.name}"]
    if device.compute_capability:
        parts.append(f"compute capability {device.compute_capability}")
    if device.driver:
        parts.append(f"driver {device.driver}")
    if device.total_bytes is not None and device.free_bytes is not None:
        kind = "unified memory" if device.is_unified else "memory"
        parts.append(f"{_gib(device.free_bytes)} of {_gib(device.total_bytes)} {kind} free")
    budget = _budget(device, memory, settings)
    parts.append(f"budget {_gib(budget)}" if budget is not None else "budget unknown")
    parts += ["hidden by CUDA_VISIBLE_DEVICES"] if not device.is_visible else []
    parts += [f"no plugin can use it: {device.refusal}"] if device.refusal else []
    parts += [device.warning] if device.warning else []
    return "; ".join(parts)


def _budget(device: Device, memory: Memory, settings: Settings) -> int | None:
    return device_budget_bytes(
        device,
        memory,
        unified_reserve_bytes=settings.unified_memory_reserve_bytes,
        vram_safety=settings.vram_safety,
    )


def _budgets(machine: Machine, settings: Settings) -> dict[str, Any]:
    devices = {
        f"{device.kind}:{device.index}": _budget(device, machine.memory, settings)
        for device in machine.devices
    }
    return {"cpu": main_memory_budget_bytes(machine.memory), **devices}


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
