"""Trains on every number of GPUs that this machine has and compares the bytes with the CPU lane's.

    python tests/gpu/check_ranks.py [--layers 28] [--rows 16] [--tokens 256]

Needs what check_lane.py needs, and two NVIDIA GPUs. One line per check. Exit status: 0 all passed, or there
are no two GPUs that will do and this says so; 1 a check failed.
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

from gpu.sources import describe_distributions, use_sources

use_sources()

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


def same_bytes(backend: Backend, cpu: Backend, model: Path, counts: Sequence[int]) -> str:
    expected = outcomes(cpu, model, 1)
    for devices in counts:
        for micro in (1, 2, 4, 8):
            found = outcomes(backend, model, devices, micro)
            assert found == expected, f"{devices} GPUs, {micro} at once: {found} beside {expected}"
    said = ", ".join(map(str, counts))
    return f"{len(STEPS)} steps on {said} GPUs, adapter {expected[-1].adapter_digest[:16]}"


def used_mib() -> str:
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
    examples = some_examples(STEPS[0], seed=0)
    error = None
    try:
        for _ in backend.train_step(t.TrainStepParams(examples=examples)):
            if moment == "compute":
                kill()
    except BackendError as problem:
        error = problem.error
    took_s = time.perf_counter() - killed_s[0]
    assert error is not None and error.code == "peer-lost" and error.facts["signal"] == 9, error
    assert took_s < 15, f"told after {took_s:.1f} s"
    backend.unload(m.UnloadParams())
    begun(backend, model, 1)
    assert step(backend, examples) == expected, "other bytes after a loss"
    backend.unload(m.UnloadParams())
    return f"peer-lost after {took_s:.2f} s; one GPU goes on to the same bytes"


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
    if gpus < 2:
        print("SKIPPED: there is one GPU and two are needed; no check of the CUDA lane was run")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run_all(Checks(options.only), Path(folder), gpus, options)


def run_all(checks: Checks, folder: Path, gpus: int, options: argparse.Namespace) -> int:
    describe_distributions(folder / "site")
    # The other ranks are processes of this Python.
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    from mens_cpu_ref import plugin as cpu_plugin
    from mens_torch_cuda import plugin as cuda_plugin

    backend, cpu = cuda_plugin.backend(), cpu_plugin.backend()
    counts = range(1, gpus + 1)
    for name, model in tiny_models(folder):
        checks.run(f"tiny {name}", lambda model=model: same_bytes(backend, cpu, model, counts))  # type: ignore[misc]
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
