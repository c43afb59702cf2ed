"""From nothing to a lane: GPU, kernels, device; each step refuses with its reason."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_core.kernel_source import GROUP
from mens_torch_mps.gpu import find_gpu
from mens_torch_mps.kernel_text import metal_matrix_source, metal_source, metal_training_source
from mens_torch_mps.lane import MpsOps
from mens_torch_mps.matrices import Found, cache_file, probe, recall, remember
from mens_torch_mps.runtime import Kernel, Runtime, TorchMps
from mens_torch_mps.tripwires import check_tripwires
from vox_plugin_api.backend import BackendError

if TYPE_CHECKING:
    from mens_torch_mps.device import MpsDevice
    from mens_torch_mps.training_lane import MpsTrainingOps

__all__ = ["Started", "start", "start_on"]

_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class Started:
    """A GPU with the kernels on it."""

    runtime: Runtime
    device: Any
    simd_width: int
    matrices: Found
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the load report tells; never compared."""

    def lane(self) -> MpsOps:
        """Return a fresh lane."""
        return MpsOps(
            self.device,
            simd_width=self.simd_width,
            uses_matrices=self.matrices.is_usable,
            facts=self.facts,
        )

    def training_lane(self, serving: MpsOps) -> MpsTrainingOps:
        """Compile the kernels of training, and return a lane with them over what `serving` loaded.

        Raises:
            BackendError: `kernels-not-built` or `kernels-too-large`.
        """
        from mens_torch_mps.training_lane import MpsTrainingOps

        self.device.add_kernels(_compile(self.runtime, metal_training_source(), self.facts))
        return MpsTrainingOps(self.device, serving)


def start(environment: Mapping[str, str]) -> Started:
    """Find the GPU, then compile the kernels for it.

    Raises:
        BackendError: a step refused; its code says which.
    """
    gpu = find_gpu(environment)
    facts = {"device": gpu.name, "macos": gpu.macos, "os_build": gpu.os_build, "torch": gpu.torch}
    return start_on(TorchMps(), facts, environment=environment)


def start_on(
    runtime: Runtime,
    facts: Mapping[str, Any],
    source: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
) -> Started:
    """Compile the kernels with `runtime`; `source` is for tests that plant a mistake in it.

    What the probe of matrices finds is remembered where `environment` says; without it, nowhere.

    Raises:
        BackendError: `kernels-not-built`, `kernels-too-large`, `simd-width`, `not-on-gpu` or
            `arithmetic-not-exact`.
    """
    text = metal_source() if source is None else source
    digest = hashlib.sha256(text.encode()).hexdigest()
    facts = {**facts, "kernel_source_sha256": digest}
    kernels = _compile(runtime, text, facts)
    widths = {kernel.thread_execution_width for kernel in kernels.values()}
    if len(widths) != 1 or GROUP % next(iter(widths)) != 0:
        raise BackendError(
            "simd-width",
            f"SIMD groups of {', '.join(map(str, sorted(widths)))} threads do not divide the lane's groups "
            f"of {GROUP}; the Metal lane was not started",
            facts={**facts, "found": sorted(widths)},
            remedy="Use the CPU lane; it has the bits of docs/numerics.md.",
        )
    (width,) = widths
    facts["simd_width"] = width
    if runtime.execution:
        facts["execution"] = runtime.execution
    from mens_torch_mps.device import MpsDevice

    device = MpsDevice(runtime, kernels)
    check_tripwires(device, facts)
    matrices = _matrices(runtime, device, width, facts, environment)
    facts["simdgroup_matrices"] = matrices.described()
    return Started(runtime, device, width, matrices, facts)


def _matrices(
    runtime: Runtime,
    device: MpsDevice,
    width: int,
    facts: Mapping[str, Any],
    environment: Mapping[str, str] | None,
) -> Found:
    """Say whether SIMD-group matrices may be used; where they may, their kernels are on the device."""
    text = metal_matrix_source()
    path = None if environment is None else cache_file(environment, facts, text)
    known = recall(path)
    if known is not None and not known.is_usable:
        return known
    try:
        kernels = _compile(runtime, text, facts)
    except BackendError as problem:
        # Scalar kernels do the same; a compiler that has none of these refuses nothing else.
        return Found(f"not compiled ({problem.error.code})", False)
    device.add_kernels({name: kernel for name, kernel in kernels.items() if "_matri" in name})
    if known is not None:
        return known
    found = probe(device, width)
    remember(path, found)
    return found


def _compile(runtime: Runtime, text: str, facts: Mapping[str, Any]) -> Mapping[str, Kernel]:
    try:
        kernels = runtime.compile(text)
    except (SyntaxError, RuntimeError) as problem:
        said = "\n".join(str(problem).splitlines()[:_SHOWN_LINES])
        raise BackendError(
            "kernels-not-built",
            f"Metal's compiler refused the kernels: {said}; the Metal lane was not started",
            facts=dict(facts),
            remedy="Update macOS and the plugin; if both are new, report this with the text above.",
        ) from None
    threads = {name: kernel.max_threads_per_threadgroup for name, kernel in kernels.items()}
    small = {name: most for name, most in threads.items() if most < GROUP}
    if small:
        raise BackendError(
            "kernels-too-large",
            f"{len(small)} kernels, {min(small)} first, can't run in groups of {GROUP} threads on this GPU; "
            "the Metal lane was not started",
            facts={**facts, "most_threads": small},
            remedy="Use the CPU lane; it has the bits of docs/numerics.md.",
        )
    return kernels
