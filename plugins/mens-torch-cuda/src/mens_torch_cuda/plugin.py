"""The entry point of the plugin `mens-torch-cuda` (group `vox_host.backends`)."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vox_plugin_api.backend import Backend, BackendError, BackendInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mens_core.ops import Ops
    from mens_core.peers.wire import Place, Wire
    from mens_core.training_ops import TrainingOps

__all__ = ["backend", "refuse_options"]

PLUGIN_ID = "mens-torch-cuda"


def backend() -> Backend:
    """Return the CUDA lane; the GPU is looked at and the kernels are compiled here.

    Raises:
        BackendError: there is no GPU that will do, or the kernels can't be built for it.
    """
    # numpy's matrix library is never called here; left alone it starts a thread for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported when the worker calls, so that importing the entry point costs and breaks nothing.
    from mens_core.backend import MensBackend
    from mens_core.conformance.quick import self_test
    from mens_core.peers.wire import PeerSetup
    from mens_core.weights_fit import check_fit, weight_bytes
    from mens_torch_cuda.packed import bytes_more_than_in_file
    from mens_torch_cuda.ranks import gpu_of_rank, launched
    from mens_torch_cuda.start import count_gpus, free_memory, start
    from vox_plugin_api.checkpoint import Checkpoint, CheckpointError
    from vox_plugin_api.messages import LoadModelParams, SelfTestResult

    started = start(os.environ)
    # From here on torch is there.
    import torch

    from mens_torch_cuda.fast.mode import fast_mode

    def make_lane_for(params: LoadModelParams) -> Ops:
        refuse_options(params.lane_options)
        if params.model_dir:
            free, total = free_memory()
            try:
                quantised = Checkpoint.open(params.model_dir).quant_metadata.tensors
            except CheckpointError:
                quantised = {}  # whoever reads the weights says what is wrong with the folder
            check_fit(
                weight_bytes(Path(params.model_dir)) + bytes_more_than_in_file(quantised.values()),
                free=free,
                total=total,
                device=started.gpu.name,
                remedy="Free the GPU of other programs (nvidia-smi lists them), take a smaller model, "
                "or use the CPU lane.",
            )
        return started.lane()

    def free_bytes() -> int:
        # What torch keeps for its own next requests can be taken, too.
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free_memory()[0] + int(kept)

    def make_training_lane(serving: Ops) -> TrainingOps:
        # Imported when training begins or an adapter is served.
        from mens_torch_cuda.lane import CudaOps
        from mens_torch_cuda.training_lane import CudaTrainingOps

        return CudaTrainingOps(started.device, cast(CudaOps, serving))

    def open_wire(place: Place, ops: TrainingOps, look: Callable[[], None]) -> Wire:
        # Imported when a training on several GPUs begins.
        from mens_torch_cuda.wire import TorchWire

        return TorchWire(place, ops, look, kind="nccl")

    peers = PeerSetup(
        entry=f"{__name__}:backend",
        devices=count_gpus,
        environment=lambda rank: gpu_of_rank(rank, os.environ),
        open_wire=open_wire,
        launched=launched,
    )

    def test_operators() -> SelfTestResult:
        return self_test(started.lane)

    def prepare_fast(params: LoadModelParams) -> None:
        from mens_torch_cuda.fast import fused
        from mens_torch_cuda.fast.weights import weight_bytes as fast_weight_bytes

        refuse_options(params.lane_options)
        free, total = free_memory()
        check_fit(
            fast_weight_bytes(Path(params.model_dir)),
            free=free,
            total=total,
            device=started.gpu.name,
            remedy="Free the GPU of other programs (nvidia-smi lists them), take a smaller model, "
            "or use canonical numerics, which keep quantised weights as they are.",
        )
        fused.use(started.gpu.capability)

    info = BackendInfo(
        plugin_id=PLUGIN_ID,
        plugin_version=version(PLUGIN_ID),
        lane="cuda",
        numerics=("canonical", "fast"),
        capabilities=("generate", "evaluate", "trace", "train", "adapters"),
    )
    return MensBackend(
        info,
        make_lane_for,
        test_operators,
        make_training_lane=make_training_lane,
        peers=peers,
        free_bytes=free_bytes,
        fast=fast_mode(torch.device("cuda"), facts=started.facts(), prepare=prepare_fast),
    )


def refuse_options(options: Mapping[str, str]) -> None:
    """Refuse lane options: there are none yet.

    Raises:
        BackendError: `lane-option`.
    """
    if options:
        raise BackendError(
            "lane-option",
            f"no lane option is called {', '.join(map(repr, sorted(options)))}; nothing was loaded",
            facts={"found": dict(options), "known": {}},
            remedy="Leave the option out; CUDA_VISIBLE_DEVICES chooses among GPUs.",
        )
