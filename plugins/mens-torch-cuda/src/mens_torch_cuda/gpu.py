"""Which GPU there is, and whether it will do: what torch says, judged (`refusal` is pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vox_plugin_api.backend import BackendError

__all__ = ["MINIMUM_CAPABILITY", "Gpu", "Sight", "find_gpu", "look", "refusal"]

MINIMUM_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Sight:
    """What could be seen of torch and the first GPU; None is what could not."""

    torch: str | None = None
    """Version of torch."""
    cuda_of_torch: str | None = None
    """The CUDA version torch was built for; None in a build for CPUs."""
    problem: str = ""
    """What torch said when CUDA was asked for; empty if all was well."""
    name: str | None = None
    capability: tuple[int, int] | None = None
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU that this process sees, fit for the lane."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    torch: str

    @property
    def capability_text(self) -> str:
        return ".".join(map(str, self.capability))


def find_gpu() -> Gpu:
    """Return the GPU to run on.

    Raises:
        BackendError: there is none that will do; with the reason and the remedy.
    """
    sight = look()
    problem = refusal(sight)
    if problem is not None:
        raise problem
    if sight.name is None or sight.capability is None or sight.torch is None:
        raise AssertionError("a sight without a GPU was not refused")
    return Gpu(sight.name, sight.capability, sight.total_bytes, sight.torch)


def look() -> Sight:
    """Ask torch; initialises CUDA in this process."""
    try:
        import torch
    except ImportError as problem:
        return Sight(problem=str(problem))
    version, cuda = str(torch.__version__), torch.version.cuda
    runtime: Any = torch.cuda
    try:
        runtime.init()
        found = runtime.get_device_properties(0)
    except (RuntimeError, AssertionError) as problem:  # torch says it is a CPU build by an assertion
        return Sight(torch=version, cuda_of_torch=cuda, problem=str(problem) or type(problem).__name__)
    return Sight(
        torch=version,
        cuda_of_torch=cuda,
        name=str(found.name),
        capability=(int(found.major), int(found.minor)),
        total_bytes=int(found.total_memory),
    )


def refusal(sight: Sight) -> BackendError | None:
    """Say why the lane can't run, or None where it can."""
    facts: dict[str, Any] = {"torch": sight.torch, "torch_cuda": sight.cuda_of_torch}
    if sight.problem:
        facts["said"] = sight.problem.strip().splitlines()[0]

    def refused(code: str, reason: str, remedy: str) -> BackendError:
        return BackendError(code, f"{reason}; the CUDA lane was not started", facts=facts, remedy=remedy)

    if sight.torch is None:
        return refused(
            "torch-missing",
            f"torch can't be imported ({facts.get('said', 'no reason given')})",
            "Install the plugin again with its dependencies: vox-host plugin install.",
        )
    if sight.cuda_of_torch is None:
        return refused(
            "torch-without-cuda",
            f"torch {sight.torch} in the plugin's environment is a build without CUDA",
            "Install a build of torch for CUDA into the plugin's environment; pytorch.org lists them.",
        )
    said = sight.problem.lower()
    if "too old" in said:
        return refused(
            "driver-too-old",
            f"the NVIDIA driver is too old for torch {sight.torch}, built for CUDA {sight.cuda_of_torch}",
            f"Update the NVIDIA driver to one for CUDA {sight.cuda_of_torch}; nvidia-smi shows yours.",
        )
    if "no nvidia driver" in said:
        return refused(
            "driver-missing",
            "no NVIDIA driver was found",
            "Install the NVIDIA driver; `nvidia-smi` must list a GPU.",
        )
    if "no cuda gpus" in said:
        return refused(
            "device-missing",
            "the NVIDIA driver shows no GPU to this process",
            "See that nvidia-smi lists a GPU and CUDA_VISIBLE_DEVICES does not hide it.",
        )
    if sight.problem or sight.capability is None:
        return refused(
            "cuda-failed",
            f"CUDA could not be initialised ({facts.get('said', 'no reason given')})",
            "Run nvidia-smi; if it works, restart the machine or look at the driver's log.",
        )
    if sight.capability < MINIMUM_CAPABILITY:
        facts |= {
            "device": sight.name,
            "compute_capability": ".".join(map(str, sight.capability)),
            "needed": ".".join(map(str, MINIMUM_CAPABILITY)),
        }
        return refused(
            "device-too-old",
            f"{sight.name} has compute capability {facts['compute_capability']}, "
            f"and the lane needs {facts['needed']} or higher",
            "Use the CPU lane, or a GPU of the Ampere generation or newer.",
        )
    return None
