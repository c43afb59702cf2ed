"""Trains on every number of GPUs that this machine has and compares the bytes with the CPU lane's.

    python tests/gpu/check_ranks.py [--layers 28] [--rows 16] [--tokens 256]

Needs what check_lane.py needs. With one GPU two ranks share it, gloo in NCCL's place, and this says so.
One line per check. Exit status: 0 all passed, or there is no GPU that will do and this says why; 1 a check
failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.sources import describe_distributions, refuse_bare_python, use_sources

use_sources()
if __name__ == "__main__":
    refuse_bare_python("cuda")

import numpy as np  # noqa: E402

from gpu import shared_gpu  # noqa: E402
from gpu.check_lane import Checks  # noqa: E402
from gpu.shape_model import write_shape  # noqa: E402
from lanes.tiny_models import BY_FAMILY, write_model  # noqa: E402
from lanes.training import LAYER_TARGETS, a_config, some_examples  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from mens_torch_cuda.start import count_gpus  # noqa: E402
from vox_plugin_api import messages as m  # noqa: E402
from vox_plugin_api import train_messages as t  # noqa: E402
from vox_plugin_api.backend import Backend, BackendError  # noqa: E402

STEPS = ((2, 9, 140, 5, 3, 64, 33), (300,), (4, 7), (12,) * 8)
"""Lengths of the examples of each step: odd numbers of them, fewer than GPUs, whole powers of two."""


def begun(
    backend: Backend, model: Path, devices: int, micro: int | None = None, targets: Any = None
) -> float:
    """Load and begin; return the seconds that beginning took."""
    config = a_config(*([targets] if targets else []), dropout=0.25)
    load = m.LoadModelParams(model_dir=str(model), model_digest="ab" * 32, context_length=512)
    for _ in backend.load_model(load):
        pass
    began = time.perf_counter()
    params = t.TrainBeginParams(
        adapter=config.adapter,
        optimizer=t.OptimizerConfig(learning_rate=1e-3, max_gradient_norm=0.5),
        seed=7,
        micro_batch_size=micro,
        devices=devices,
    )
    for _ in backend.train_begin(params):
        pass
    return time.perf_counter() - began


def step(backend: Backend, examples: Sequence[t.TrainExample]) -> t.TrainStepResult:
    made = [reply for reply in backend.train_step(t.TrainStepParams(examples=list(examples))) if reply]
    result = made[-1].result
    assert isinstance(result, t.TrainStepResult)
    return result


def outcomes(
    backend: Backend, model: Path, devices: int, micro: int | None = None
) -> list[t.TrainStepResult]:
    begun(backend, model, devices, micro)
    found = [step(backend, some_examples(lengths, seed=at)) for at, lengths in enumerate(STEPS)]
    backend.unload(m.UnloadParams())
    return found


def same_bytes(
    backend: Backend, cpu: Backend, model: Path, counts: Sequence[int], sizes: Sequence[int]
) -> str:
    expected = outcomes(cpu, model, 1)
    for devices in counts:
        for micro in sizes:
            found = outcomes(backend, model, devices, micro)
            assert found == expected, f"{devices} GPUs, {micro} at once: {found} beside {expected}"
    said = ", ".join(map(str, counts))
    return f"{len(STEPS)} steps on {said} ranks, {sizes} at once, adapter {expected[-1].adapter_digest[:16]}"


def used_mib() -> str:
    """Of each GPU, by every process."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return "+".join(subprocess.run(asked, capture_output=True, text=True).stdout.split())


def large_step(backend: Backend, model: Path, counts: Sequence[int], rows: int, tokens: int) -> str:
    said, found = [], []
    for devices in counts:
        begin_s = begun(backend, model, devices, targets=LAYER_TARGETS)
        made, times = [], []
        for at in range(3):
            examples = some_examples((tokens,) * rows, seed=at, vocab=151936)
            began = time.perf_counter()
            made.append(step(backend, examples))
            times.append(time.perf_counter() - began)
        took = " ".join(f"{seconds:.3f}" for seconds in times)
        said.append(f"{devices}: begun in {begin_s:.1f} s, steps {took} s, {used_mib()} MiB")
        found.append(made)
        backend.unload(m.UnloadParams())
    assert all(made == found[0] for made in found), found
    return f"{rows} x {tokens} tokens; {'; '.join(said)}; adapter {found[0][-1].adapter_digest[:16]}"


def lost(backend: Backend, model: Path, moment: str) -> str:
    """Kill a rank: between two of rank 0's layers, or when its sums are awaited; then go on with one GPU."""
    expected = outcomes(backend, model, 1)[0]
    begun(backend, model, 2)
    try:
        took_s = lose_a_rank(backend, moment)
    finally:
        backend.unload(m.UnloadParams())
    assert took_s < 15, f"told after {took_s:.1f} s"
    begun(backend, model, 1)
    assert step(backend, some_examples(STEPS[0], seed=0)) == expected, "other bytes after a loss"
    backend.unload(m.UnloadParams())
    return f"peer-lost after {took_s:.2f} s; one GPU goes on to the same bytes"


def lose_a_rank(backend: Backend, moment: str) -> float:
    """Return the seconds from the kill to the error."""
    run: Any = backend
    team = run._training._team
    pid = team._links[0].pid
    killed_s: list[float] = []

    def kill() -> None:
        if not killed_s:
            killed_s.append(time.perf_counter())
            os.kill(pid, 9)

    if moment == "transfer":
        plain = team._wire.receive

        def receive(shapes: Any, source: int) -> Any:
            kill()
            return plain(shapes, source)

        team._wire.receive = receive
    error = None
    try:
        for _ in backend.train_step(t.TrainStepParams(examples=some_examples(STEPS[0], seed=0))):
            if moment == "compute":
                kill()
    except BackendError as problem:
        error = problem.error
    took_s = time.perf_counter() - killed_s[0]
    assert error is not None and error.code == "peer-lost" and error.facts["signal"] == 9, error
    return took_s


def nccl_alone(backend: Backend, folder: Path) -> str:
    """One rank sends to itself: what the wire does around NCCL, without another GPU."""
    from mens_core.peers.wire import Place
    from mens_torch_cuda.wire import TorchWire, _dist

    model = next(tiny_models(folder / "alone"))[1]
    begun(backend, model, 1)
    run: Any = backend
    ops = run._training._trainer._ops
    place = folder / "place"
    place.mkdir()
    wire = TorchWire(Place(place, 0, 1), ops, lambda: None, kind="nccl")
    values = [np.arange(n, dtype=np.float32).reshape(1, n) - 7 for n in (1, 33, 100_000)]
    sent = [wire._bytes_of(ops.from_host(value)) for value in values]
    received = [wire._new(4 * value.size) for value in values]
    ways = [(_dist.isend, sent), (_dist.irecv, received)]
    wire._wait(_dist.batch_isend_irecv([_dist.P2POp(way, b, 0) for way, all_ in ways for b in all_]))
    found = [ops.to_host(wire._tensor_of(b, v.shape)) for b, v in zip(received, values, strict=True)]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, values, strict=True))
    wire.close(is_whole=False)
    step(backend, some_examples(STEPS[0]))
    backend.unload(m.UnloadParams())
    return f"{sum(value.nbytes for value in values)} bytes, and the GPU goes on after the group was given up"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    try:
        find_gpu()
        gpus = count_gpus()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}; no check of the CUDA lane was run")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run_all(Checks(options.only), Path(folder), gpus, options)


def run_all(checks: Checks, folder: Path, gpus: int, options: argparse.Namespace) -> int:
    describe_distributions(folder / "site")
    # The other ranks are processes of this Python.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    from mens_cpu_ref import plugin as cpu_plugin
    from mens_torch_cuda import plugin as cuda_plugin

    if gpus > 1:
        backend = cuda_plugin.backend()
        print(f"{gpus} GPUs, a rank on each, NCCL between them")
    else:
        backend = shared_gpu.backend()
        print("one GPU that the ranks share, gloo between them: NCCL carries nothing between ranks here")
        checks.run("NCCL to itself", lambda: nccl_alone(backend, folder))
    cpu = cpu_plugin.backend()
    counts = range(1, max(2, gpus) + 1)
    for (name, model), sizes in zip(tiny_models(folder), ((1, 2, 4, 8), (4,)), strict=True):
        checks.run(
            f"tiny {name}",
            lambda model=model, sizes=sizes: same_bytes(backend, cpu, model, counts, sizes),  # type: ignore[misc]
        )
    for moment in ("compute", "transfer"):
        checks.run(f"a rank lost in {moment}", lambda moment=moment: lost(backend, model, moment))  # type: ignore[misc]
    shape = write_shape(folder / "shape", "bf16", layers=options.layers)
    checks.run(
        f"Qwen3-0.6B shape, {options.layers} layers",
        lambda: large_step(backend, shape, counts, options.rows, options.tokens),
    )
    print(f"{'FAILED' if checks.failed else 'PASSED'}: {checks.passed} checks passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


def tiny_models(folder: Path) -> Iterator[tuple[str, Path]]:
    for family, config in BY_FAMILY.items():
        yield family, write_model(folder / family, config)


if __name__ == "__main__":
    raise SystemExit(main())
