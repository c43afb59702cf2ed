"""Which GPU there is, and whether it will do: what torch and the system say, judged (`refusal` is pure)."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vox_plugin_api.backend import BackendError

__all__ = ["FORBIDDEN_VARIABLES", "MINIMUM_MACOS", "Gpu", "Sight", "find_gpu", "look", "os_build", "refusal"]

MINIMUM_MACOS = (15, 0)
"""From here on torch compiles kernels in Metal's safe math mode, and a source can ask for it itself."""

FORBIDDEN_VARIABLES: dict[str, str] = {
    "PYTORCH_MPS_FAST_MATH": "has torch compile kernels that reorder sums and round divisions otherwise",
    "PYTORCH_ENABLE_MPS_FALLBACK": "has torch run on the CPU what it can't run on the GPU, without a word",
}
"""Variables that would change what runs, or where, and why each is refused."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What could be seen; None is what could not."""

    system: str = "Darwin"
    machine: str = "arm64"
    """Of this Python: x86_64 on a Mac with an Apple chip means Rosetta."""
    macos: str = ""
    torch: str | None = None
    """Version of torch."""
    problem: str = ""
    """What kept torch from being imported, or the GPU from being asked; empty if all was well."""
    is_built: bool = False
    """Whether this torch was built for MPS."""
    is_available: bool = False
    name: str | None = None
    """The GPU's, as Metal says it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU of this Mac, fit for the lane."""

    name: str
    macos: str
    torch: str
    os_build: str = ""
    """Of macOS, with which the compiler comes; empty where the system would not say."""


def find_gpu(environment: Mapping[str, str]) -> Gpu:
    """Return the GPU to run on.

    Raises:
        BackendError: there is none that will do, or the environment would change what it computes;
            with the reason and the remedy.
    """
    # Before torch is imported: it reads them once.
    problem = refused_variable(environment)
    if problem is not None:
        raise problem
    sight = look()
    problem = refusal(sight)
    if problem is not None:
        raise problem
    if sight.name is None or sight.torch is None:
        raise AssertionError("a sight without a GPU was not refused")
    return Gpu(sight.name, sight.macos, sight.torch, os_build())


def os_build() -> str:
    """Ask the system for its build; empty where it does not say."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.osversion"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def look() -> Sight:
    """Ask the system and torch."""
    system, machine, macos = platform.system(), platform.machine(), platform.mac_ver()[0]
    if system != "Darwin":  # torch would be seconds for nothing
        return Sight(system, machine, macos)
    try:
        import torch
    except (ImportError, OSError) as problem:
        return Sight(system, machine, macos, problem=str(problem))
    version = str(torch.__version__)
    is_built = bool(torch.backends.mps.is_built())
    try:
        is_available = bool(torch.backends.mps.is_available())
        name = torch.backends.mps.get_name() if is_available else None
    except (RuntimeError, AttributeError) as problem:
        return Sight(system, machine, macos, version, str(problem) or type(problem).__name__, is_built)
    return Sight(system, machine, macos, version, "", is_built, is_available, name)


def refused_variable(environment: Mapping[str, str]) -> BackendError | None:
    """Say which variable of the environment the lane won't run with."""
    for name, effect in FORBIDDEN_VARIABLES.items():
        if environment.get(name, "0") not in ("", "0"):
            return BackendError(
                "environment-refused",
                f"{name}={environment[name]} {effect}; the Metal lane was not started",
                facts={"variable": name, "found": environment[name], "expected": "unset or 0"},
                remedy=f"Unset {name}.",
            )
    return None


def refusal(sight: Sight) -> BackendError | None:
    """Say why the lane can't run, or None where it can."""
    facts: dict[str, Any] = {"torch": sight.torch, "macos": sight.macos, "machine": sight.machine}
    if sight.problem:
        facts["said"] = sight.problem.strip().splitlines()[0]
    if sight.name is not None:
        facts["device"] = sight.name

    def refused(code: str, reason: str, remedy: str) -> BackendError:
        return BackendError(code, f"{reason}; the Metal lane was not started", facts=facts, remedy=remedy)

    if sight.system != "Darwin":
        return refused(
            "platform-unsupported",
            f"the lane needs macOS, and this is {sight.system}",
            "Use the CPU lane, or the CUDA lane on an NVIDIA GPU.",
        )
    if sight.machine != "arm64":
        return refused(
            "python-translated",
            f"this Python is built for {sight.machine}: on a Mac with an Apple chip it runs under Rosetta, "
            "and a Mac without one has no GPU for the lane",
            "Install the plugin with a Python for arm64 (`python3 -c 'import platform; "
            "print(platform.machine())'` says arm64).",
        )
    if sight.macos == "10.16":
        return refused(
            "macos-unknown",
            "macOS hides its version from this Python and says 10.16, for programs made for older ones",
            "Unset SYSTEM_VERSION_COMPAT, or install the plugin with a Python built for macOS 11 or newer.",
        )
    if _version(sight.macos) < MINIMUM_MACOS:
        facts["needed"] = ".".join(map(str, MINIMUM_MACOS))
        return refused(
            "macos-too-old",
            f"macOS {sight.macos or 'of unknown version'} compiles kernels without a safe math mode, and the "
            f"lane needs {facts['needed']} or newer",
            "Update macOS, or use the CPU lane.",
        )
    if sight.torch is None:
        return refused(
            "torch-missing",
            f"torch can't be imported ({facts.get('said', 'no reason given')})",
            "Install the plugin again with its dependencies: vox-host plugin install.",
        )
    if not sight.is_built:
        return refused(
            "torch-without-mps",
            f"torch {sight.torch} in the plugin's environment is a build without MPS",
            "Install torch's own wheel for macOS on arm64 into the plugin's environment.",
        )
    if not sight.is_available or sight.name is None or sight.problem:
        said = f" ({facts['said']})" if "said" in facts else ""
        return refused(
            "device-missing",
            f"torch {sight.torch} is built for MPS and sees no GPU{said}",
            "See that `system_profiler SPDisplaysDataType` lists a GPU with Metal, and that this is no "
            "session without one (some virtual machines and remote sessions have none).",
        )
    if "paravirtual" in sight.name.lower():
        return refused(
            "device-virtual",
            f"{sight.name} is a virtual machine's GPU: another compiler and driver stand before the hardware",
            "Run on macOS itself, or use the CPU lane.",
        )
    if not sight.name.startswith("Apple"):
        return refused(
            "device-unsupported",
            f"{sight.name} is no GPU of an Apple chip",
            "Use the CPU lane; it has the bits of docs/numerics.md.",
        )
    return None


def _version(text: str) -> tuple[int, ...]:
    """Return the numbers; 15 is 15.0."""
    numbers = tuple(int(part) for part in text.split(".") if part.isdigit())
    return numbers + (0,) * (len(MINIMUM_MACOS) - len(numbers))
