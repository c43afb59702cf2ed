"""NVIDIA devices: NVML first, the text of nvidia-smi where NVML is not to be had.

Boards whose memory is the machine's (GB10, GH200 class) print [N/A] for it; they are unified
devices with the pool of main memory, never devices without memory.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vox_host.hardware.record import Device, Memory, Problem
from vox_host.hardware.system import Output, System

__all__ = ["SmiRow", "devices_from_rows", "parse_smi", "probe_nvidia", "visible_uuids"]

QUERY = "index,uuid,name,memory.total,memory.free,compute_cap,driver_version,mig.mode.current"
WSL_FOLDER = "usr/lib/wsl/lib"
_NOT_SAID = {"[n/a]", "n/a", "[not supported]", "not supported", ""}
_UNIT_BYTES = {"": 2**20, "mib": 2**20, "gib": 2**30, "kib": 2**10, "b": 1}


@dataclass(frozen=True, slots=True)
class SmiRow:
    """One data row, by column name."""

    fields: dict[str, str]

    def get(self, name: str) -> str | None:
        value = self.fields.get(name, "").strip()
        return None if value.lower() in _NOT_SAID else value


def parse_smi(output: Output) -> tuple[list[SmiRow], list[Problem]]:
    """Read `nvidia-smi --query-gpu=... --format=csv`, header included.

    Only rows under a header that names `index` count: an error text is a problem, never a
    device. A name may hold commas; a row that is too short is refused with a warning.
    """
    first = output.text.strip().splitlines()[0].strip() if output.text.strip() else ""
    if output.status is None:
        return [], [Problem(source="nvidia-smi", detail=output.detail)]
    if output.status != 0 or not first.startswith("index"):
        if first.startswith("No devices were found") or (output.status == 0 and not first):
            return [], []
        detail = f"nvidia-smi ended with status {output.status}: {first or 'no output'}"
        return [], [Problem(source="nvidia-smi", detail=detail, remedy=_remedy(detail))]
    lines = list(csv.reader(output.text.strip().splitlines(), skipinitialspace=True))
    header = [re.sub(r"\s*\[.*\]$", "", name.strip()) for name in lines[0]]
    rows: list[SmiRow] = []
    problems: list[Problem] = []
    for line in lines[1:]:
        surplus = len(line) - len(header)
        if surplus < 0 or (surplus > 0 and "name" not in header):
            detail = (
                f"nvidia-smi row with {len(line)} of {len(header)} fields was left out: {', '.join(line)}"
            )
            problems.append(Problem(source="nvidia-smi", detail=detail))
            continue
        at = header.index("name") if surplus else 0
        merged = (
            [*line[:at], ", ".join(line[at : at + surplus + 1]), *line[at + surplus + 1 :]]
            if surplus
            else line
        )
        rows.append(SmiRow(dict(zip(header, merged, strict=True))))
    return rows, problems


def _remedy(detail: str) -> str:
    """Say what mends the driver: after an update the old module stays loaded until a reboot."""
    if re.search(r"driver/library version mismatch", detail, re.IGNORECASE):
        return "reboot: the driver was updated while its old kernel module is still loaded"
    return "run `nvidia-smi` and mend the driver"


def devices_from_rows(rows: Sequence[SmiRow], memory: Memory) -> list[Device]:
    """Turn rows into devices; a unified board takes total and free from main memory."""
    devices: list[Device] = []
    for position, row in enumerate(rows):
        total, free = _size(row.get("memory.total")), _size(row.get("memory.free"))
        is_mig = (row.get("mig.mode.current") or "").lower() == "enabled"
        # A board that has memory of its own says so or says why it can't ("[Unknown Error]").
        unified = row.get("memory.total") is None and not is_mig
        warning = None
        if unified:
            total, free = memory.total_bytes, memory.available_bytes
        elif total is None:
            warning = (
                f"its memory is unknown ({row.get('memory.total') or 'not reported'}); used only if asked for"
            )
        if is_mig:
            warning = (
                "MIG is enabled: sizes are the whole card's; the worker asks the CUDA runtime for its slice"
            )
        index = row.get("index") or str(position)
        devices.append(
            Device(
                kind="nvidia",
                index=int(index) if index.isdigit() else position,
                name=row.get("name") or "NVIDIA device",
                uuid=row.get("uuid"),
                total_bytes=total,
                free_bytes=free,
                is_unified=unified,
                compute_capability=row.get("compute_cap"),
                driver=row.get("driver_version"),
                warning=warning,
            )
        )
    return devices


def _size(text: str | None) -> int | None:
    match = re.fullmatch(r"(\d+)\s*([KMG]?i?B)?", text or "", re.IGNORECASE)
    return int(match[1]) * _UNIT_BYTES[(match[2] or "").lower()] if match else None


def visible_uuids(value: str | None, uuids: Sequence[str]) -> list[str] | None:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order, as the CUDA runtime reads it.

    Reading stops at the first entry that names no device; an entry given twice leaves none.
    None: the value names MIG slices, which only the runtime can resolve.
    """
    if value is None:
        return list(uuids)
    chosen: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.startswith("MIG-"):
            return None
        if entry.isdigit() and int(entry) < len(uuids):
            found = [uuids[int(entry)]]
        elif entry.startswith("GPU-"):
            found = [uuid for uuid in uuids if uuid.startswith(entry)]
        else:
            found = []
        if len(found) != 1:
            break
        if found[0] in chosen:
            return []
        chosen.append(found[0])
    return chosen


def probe_nvidia(system: System, memory: Memory, *, use_nvml: bool) -> tuple[list[Device], list[Problem]]:
    """Return every NVIDIA device, those hidden by CUDA_VISIBLE_DEVICES marked so."""
    problems: list[Problem] = []
    devices: list[Device] = []
    if use_nvml:
        rows, nvml_problems = _nvml_rows()
        devices = devices_from_rows(rows, memory)
        problems += nvml_problems
    if not devices:
        program = system.find_program("nvidia-smi", also=(WSL_FOLDER,))
        if program is not None:
            output = system.run(program, f"--query-gpu={QUERY}", "--format=csv")
            rows, smi_problems = parse_smi(output)
            devices = devices_from_rows(rows, memory)
            # One story is enough: nvidia-smi speaks through the same library as NVML.
            problems = smi_problems or ([] if devices else problems)
    return _mark_visible(system, devices, problems)


def _mark_visible(
    system: System, devices: list[Device], problems: list[Problem]
) -> tuple[list[Device], list[Problem]]:
    value = system.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None or not devices:
        return devices, problems
    known = [device.uuid or f"GPU-index-{device.index}" for device in devices]
    left = visible_uuids(value, known)
    if left is None:
        detail = f"CUDA_VISIBLE_DEVICES={value} names MIG slices; only the CUDA runtime can resolve them"
        return devices, [*problems, Problem(source="CUDA_VISIBLE_DEVICES", detail=detail)]
    if not left:
        detail = f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU"
        problems = [*problems, Problem(source="CUDA_VISIBLE_DEVICES", detail=detail, remedy="unset it")]
    order = {uuid: position for position, uuid in enumerate(left)}
    marked = [
        device.model_copy(update={"is_visible": uuid in order})
        for device, uuid in zip(devices, known, strict=True)
    ]
    marked.sort(key=lambda device: (not device.is_visible, order.get(device.uuid or "", device.index)))
    return marked, problems


def _nvml_rows() -> tuple[list[SmiRow], list[Problem]]:
    """Ask NVML for the fields of `QUERY`; anything it does not support is left out of the row."""
    try:
        import pynvml
    except ImportError:
        return [], []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return [], []
    except pynvml.NVMLError as error:
        return [], [Problem(source="nvml", detail=str(error), remedy=_remedy(str(error)))]
    try:
        return [SmiRow(_nvml_fields(pynvml, index)) for index in range(pynvml.nvmlDeviceGetCount())], []
    except pynvml.NVMLError as error:
        return [], [Problem(source="nvml", detail=str(error))]
    finally:
        pynvml.nvmlShutdown()


def _nvml_fields(nvml: object, index: int) -> dict[str, str]:
    def ask(name: str, *arguments: object) -> object | None:
        try:
            return getattr(nvml, name)(*arguments)  # type: ignore[no-any-return]
        except nvml.NVMLError:  # type: ignore[attr-defined]
            return None

    handle = ask("nvmlDeviceGetHandleByIndex", index)
    memory = ask("nvmlDeviceGetMemoryInfo", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    fields = {
        "index": str(index),
        "uuid": ask("nvmlDeviceGetUUID", handle),
        "name": ask("nvmlDeviceGetName", handle),
        "driver_version": ask("nvmlSystemGetDriverVersion"),
        "memory.total": f"{memory.total} B" if memory is not None else None,  # type: ignore[attr-defined]
        "memory.free": f"{memory.free} B" if memory is not None else None,  # type: ignore[attr-defined]
        "compute_cap": ".".join(map(str, capability)) if isinstance(capability, tuple | list) else None,
        "mig.mode.current": "Enabled" if isinstance(mig, tuple | list) and mig[0] == 1 else None,
    }
    return {
        name: value.decode() if isinstance(value, bytes) else str(value)
        for name, value in fields.items()
        if value is not None
    }
