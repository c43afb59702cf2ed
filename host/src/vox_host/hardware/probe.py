"""Probe the machine in a child process, within a time limit.

Vendor libraries hang, crash and leave state behind (an initialised CUDA context poisons
forks); none of that may happen in the host.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys

from vox_host.errors import VoxError
from vox_host.hardware import apple, linux, nvidia
from vox_host.hardware.record import Device, Machine, Problem
from vox_host.hardware.system import System

__all__ = ["PROBE_TIMEOUT_S", "probe_machine", "probe_system", "start_probe"]

PROBE_TIMEOUT_S = 15.0


def probe_system(system: System, *, use_nvml: bool = True) -> Machine:
    """Probe in this process; `probe_machine` is what a host calls."""
    devices: list[Device] = []
    if system.os == "macos":
        cpu, memory, devices, problems = apple.probe_apple(system)
        version = platform.mac_ver()[0]
    else:
        memory, problems = linux.probe_memory(system)
        cpu = linux.probe_cpu(system)
        version = (system.read("proc/sys/kernel/osrelease") or platform.release()).strip()
        found, nvidia_problems = nvidia.probe_nvidia(system, memory, use_nvml=use_nvml)
        devices, problems = found, [*problems, *nvidia_problems]
    return Machine(
        os=system.os,
        os_version=version,
        arch=system.arch,
        python=platform.python_version(),
        cpu=cpu,
        memory=memory,
        devices=tuple(devices),
        problems=tuple(problems),
    )


def start_probe(*, use_nvml: bool = True) -> subprocess.Popen[bytes]:
    """Start the child process; `probe_machine` takes it over, now or after other work."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "vox_host.hardware.probe", "nvml" if use_nvml else "no-nvml"]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def probe_machine(
    started: subprocess.Popen[bytes] | None = None,
    *,
    timeout_s: float = PROBE_TIMEOUT_S,
    use_nvml: bool = True,
) -> Machine:
    """Return the machine as a child process sees it.

    A probe that hangs or crashes costs the devices, not the host: the machine then comes
    without devices and with the problem named.

    Args:
        started: a child of `start_probe`; None starts one.
    """
    with started or start_probe(use_nvml=use_nvml) as child:
        try:
            said, complaints = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            return _without_devices(f"the hardware probe did not answer within {timeout_s:g} s")
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        last = (complaints.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
        return _without_devices(f"the hardware probe ended with status {child.returncode}: {last}")
    return Machine.model_validate_json(said)


def _without_devices(detail: str) -> Machine:
    # Files under /proc can't hang; the vendor's tools are what is left out here.
    quiet = System(environ={**os.environ, "PATH": ""})
    if quiet.os == "macos":
        raise VoxError("probe-failed", f"{detail}; nothing was started", remedy="run `vox-host doctor` again")
    machine = probe_system(quiet, use_nvml=False)
    problem = Problem(
        source="probe", detail=detail, remedy="run `nvidia-smi`; `vox-host doctor` probes again"
    )
    return machine.model_copy(update={"problems": (*machine.problems, problem)})


if __name__ == "__main__":
    sys.stdout.write(probe_system(System(), use_nvml=sys.argv[1:] != ["no-nvml"]).model_dump_json())
