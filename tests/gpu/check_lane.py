"""Runs the CUDA lane on a GPU and compares it with the CPU lane, byte by byte.

    python tests/gpu/check_lane.py [--layers 28] [--only NAME ...]

Needs an NVIDIA GPU of compute capability 8.0 or higher, Python 3.11 to 3.13 with torch for CUDA,
cuda-bindings with NVRTC, numpy, pydantic and safetensors, and what the CPU lane is built with (cmake, a C++
compiler). One line per check. Exit status: 0 all passed, or there is no GPU that will do and this says why;
1 a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.sources import ROOT, describe_distributions, refuse_bare_python, use_sources

use_sources()
if __name__ == "__main__":
    refuse_bare_python("cuda")

import numpy as np  # noqa: E402

from gpu.shape_model import write_shape  # noqa: E402
from gpu.training_checks import training_operators, training_run, training_vectors  # noqa: E402
from grid_shim.shapes import SHAPES  # noqa: E402
from lanes.batches import Sequences  # noqa: E402
from lanes.tiny_models import BY_FAMILY, open_model, write_model  # noqa: E402
from mens_core.conformance.quick import self_test  # noqa: E402
from mens_core.conformance.suite import cases_of  # noqa: E402
from mens_core.ops import Batch, Ops  # noqa: E402
from mens_torch_cuda.gpu import find_gpu  # noqa: E402
from mens_torch_cuda.start import Started, start  # noqa: E402
from vox_plugin_api import messages as m  # noqa: E402
from vox_plugin_api.backend import Backend, BackendError  # noqa: E402

Check = Callable[[], str]
"""Raises what is wrong; returns what was compared."""


class Checks:
    """Runs checks one after the other and says how each ended."""

    def __init__(self, only: Sequence[str]) -> None:
        self._only = only
        self.failed = 0
        self.passed = 0

    def run(self, name: str, check: Check) -> None:
        """Run one, unless it was not asked for."""
        if self._only and not any(name.startswith(asked) for asked in self._only):
            return
        began = time.perf_counter()
        try:
            said = check()
        except Exception as problem:  # noqa: BLE001 - each check ends in a line
            self.failed += 1
            print(f"FAILED {name}: {type(problem).__name__}: {problem}")
            if not isinstance(problem, AssertionError):
                traceback.print_exc()
        else:
            self.passed += 1
            print(f"ok     {name}: {said} ({time.perf_counter() - began:.1f} s)", flush=True)


def digest_of(arrays: Sequence[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()[:16]


# --- operators ---------------------------------------------------------------------------------------


# Some names are in both.
OPERATORS = {**{f"suite/{name}": case for name, case in cases_of("operators").items()}, **SHAPES}


def quick_vectors(started: Started) -> str:
    result = self_test(started.lane)
    assert not result.failed and result.cases, f"{len(result.failed)} of {result.cases}: {result.failed}"
    return f"{result.cases} cases, vectors {result.vectors_digest[:16]}"


def operators(started: Started, make_reference: Callable[[], Ops]) -> str:
    """Every case and shape, arrays and faults, beside the scalar reference."""
    differing = []
    for name, case in OPERATORS.items():
        found, expected = (_outcome(case, ops) for ops in (started.lane(), make_reference()))
        if found != expected:
            differing.append(name)
    assert not differing, f"{len(differing)} of {len(OPERATORS)} differ: {differing[:20]}"
    return f"{len(OPERATORS)} cases, outputs and faults equal the scalar reference's"


def _outcome(case: Any, ops: Ops) -> list[Any]:
    arrays = [np.asarray(array).tobytes() for array in case(ops)]
    return [*arrays, *((fault.name, fault.rows) for fault in ops.take_faults())]


# --- models ------------------------------------------------------------------------------------------


def prompts(vocabulary: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(11)
    return [[int(t) for t in rng.integers(0, vocabulary, length)] for length in lengths]


def scenario(vocabulary: int, long: int) -> Iterator[tuple[str, Batch | None]]:
    """Steps as an engine makes them; None starts a new cache."""
    one, two, three = prompts(vocabulary, long, long // 3 + 1, 5)
    whole = Sequences()
    yield "prefill", whole.step([(0, one)])
    for i in range(12):
        yield "decode", whole.step([(0, [7 * i % vocabulary])])
    yield "new", None
    parts = Sequences()
    cut = long * 2 // 3 + 1
    yield "chunk", parts.step([(0, one[:cut])])
    yield "ragged", parts.step([(0, one[cut:]), (1, two), (2, three)])
    for i in range(5):
        yield "ragged decode", parts.step([(2, [i]), (0, [3 * i % vocabulary]), (1, [5])])


def run_scenario(path: Path, ops: Ops, vocabulary: int, long: int) -> list[tuple[str, str, list[int]]]:
    """What each step makes: its name, the digest of its logits, and their highest tokens."""
    model = open_model(path, ops).model
    blocks = 3 * (-(-(long + 16) // 128) + 1)
    cache = model.new_cache(blocks)
    made = []
    for name, batch in scenario(vocabulary, long):
        if batch is None:
            cache = model.new_cache(blocks)
            continue
        result = model.forward(batch, cache)
        logits = ops.to_host(result.logits)
        faults = [(fault.row, fault.name) for fault in result.faults]
        made.append(
            (f"{name} {faults or ''}", digest_of([logits]), [int(t) for t in ops.argmax(result.logits)])
        )
    return made


def same_model(path: Path, started: Started, make_cpu: Callable[[], Ops], vocabulary: int, long: int) -> str:
    lane = started.lane()
    cuda = run_scenario(path, lane, vocabulary, long)
    cpu = run_scenario(path, make_cpu(), vocabulary, long)
    differing = [
        f"step {i}: {a} beside {b}" for i, (a, b) in enumerate(zip(cuda, cpu, strict=True)) if a != b
    ]
    assert not differing, f"{len(differing)} of {len(cpu)} steps differ; {differing[0]}"
    assert lane.recordings >= 2, f"{lane.recordings} shapes of step were recorded, not the two that repeat"
    all_digests = "".join(digest for _, digest, _ in cpu).encode()
    digest = digest_of([np.frombuffer(all_digests, np.uint8)])
    return f"{len(cpu)} steps, {lane.recordings} recorded shapes, logits {digest}"


# --- the plugins, as a worker calls them ---------------------------------------------------------------


_END = object()


def answers(lane: Backend, path: Path, **sampling: Any) -> list[Any]:
    """What the protocol's messages return: two requests at once, scores of three texts, a trace, and a prompt
    whose first block the first request has written."""
    loading = m.LoadModelParams(model_dir=str(path), model_digest="0" * 64, context_length=512)
    for _ in lane.load_model(loading):
        pass
    texts = prompts(97, 150, 9, 40)
    streams = [
        lane.generate(
            m.GenerateParams(
                token_ids=ids,
                max_tokens=12,
                logprobs=3,
                prompt_logprobs=True,
                sampling=m.SamplingParams(**sampling),
            )
        )
        for ids in texts[:2]
    ]
    streams += [
        lane.evaluate(m.EvaluateParams(sequences=texts)),
        lane.trace(m.TraceParams(token_ids=texts[2])),
    ]
    results: list[list[str]] = [[] for _ in streams]
    running = dict(enumerate(streams))
    while running:
        for number, stream in list(running.items()):
            reply: Any = next(stream, _END)
            if reply is _END:
                del running[number]
            elif reply is not None and reply.result is not None:
                results[number].append(reply.result.model_dump_json())
    again = m.GenerateParams(
        token_ids=[*texts[0], 5], max_tokens=12, logprobs=3, sampling=m.SamplingParams(**sampling)
    )
    replies = [reply for reply in lane.generate(again) if reply is not None]
    assert replies[-1].observation["cached_tokens"] == 128, replies[-1].observation
    results.append([reply.result.model_dump_json() for reply in replies if reply.result is not None])
    lane.unload(m.UnloadParams())
    return results


def same_answers(cuda: Backend, cpu: Backend, path: Path, **sampling: Any) -> str:
    found, expected = answers(cuda, path, **sampling), answers(cpu, path, **sampling)
    kinds = ("first request", "second request", "scores", "trace", "a prompt that begins like the first")
    differing = [kind for kind, a, b in zip(kinds, found, expected, strict=True) if a != b or not a]
    assert not differing, f"{', '.join(differing)} differ: {str(found)[:600]}\nbeside\n{str(expected)[:600]}"
    return f"{sum(map(len, found))} messages of 2 requests, scores, a trace and a reused prompt are equal"


def main() -> int:
    """Check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28, help="of the Qwen3-0.6B shape")
    parser.add_argument("--only", nargs="*", default=[], help="checks by the beginning of their names")
    given = parser.parse_args()
    try:
        find_gpu()
    except BackendError as problem:
        print(f"SKIPPED: {problem.error.message}. {problem.error.remedy}\nno check of the CUDA lane was run")
        return 0
    built = subprocess.run([sys.executable, ROOT / "plugins/mens-cpu-ref/build_native.py"], check=False)
    if built.returncode != 0:
        print("FAILED the CPU lane could not be built; nothing was compared")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        return run_all(Checks(given.only), Path(folder), given.layers)


def run_all(checks: Checks, folder: Path, layers: int) -> int:
    describe_distributions(folder / "site")
    from mens_cpu_ref import plugin as cpu_plugin
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.reference_lane import ReferenceOps
    from mens_cpu_ref.training_lane import CpuTrainingOps, ReferenceTrainingOps
    from mens_torch_cuda import plugin as cuda_plugin
    from mens_torch_cuda.training_lane import CudaTrainingOps

    library = load_library()
    library.set_threads(os.cpu_count() or 1)

    def make_cpu() -> Ops:
        return CpuOps(library.kernels)

    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    started = start(environment)
    print("device:", ", ".join(f"{name} {value}" for name, value in started.facts().items()))

    def make_training() -> CudaTrainingOps:
        return CudaTrainingOps(started.device, started.lane())

    def make_cpu_training() -> CpuTrainingOps:
        return CpuTrainingOps(library)

    def cache() -> str:
        again = start(environment)
        assert (started.kernels.cache, again.kernels.cache) == ("written", "read"), again.kernels.cache
        return "kernels compiled once, then read"

    checks.run("kernel cache", cache)
    checks.run("quick vectors", lambda: quick_vectors(started))
    checks.run("operators", lambda: operators(started, ReferenceOps))
    checks.run("training vectors", lambda: training_vectors(make_training))
    checks.run("training operators", lambda: training_operators(make_training, ReferenceTrainingOps))
    for family, config in BY_FAMILY.items():
        path = write_model(folder / family, config)
        checks.run(
            f"training of tiny {family}",
            lambda path=path: training_run(path, make_training, make_cpu_training),  # type: ignore[misc]
        )
        for long in (300, 120):
            checks.run(
                f"tiny {family}, prompt of {long}",
                lambda path=path, long=long: same_model(path, started, make_cpu, 97, long),  # type: ignore[misc]
            )
        lanes = cuda_plugin.backend(), cpu_plugin.backend()
        for name, sampling in (
            ("greedy", {"temperature": 0.0}),
            ("sampled", {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20}),
        ):
            checks.run(
                f"plugin {family}, {name}",
                lambda path=path, lanes=lanes, sampling=sampling: same_answers(*lanes, path, **sampling),  # type: ignore[misc]
            )
    for weight_format in ("bf16", "q8_0"):
        path = write_shape(folder / weight_format, weight_format, layers=layers)
        checks.run(
            f"Qwen3-0.6B shape, {weight_format}, {layers} layers",
            lambda path=path: same_model(path, started, make_cpu, 151936, 200),  # type: ignore[misc]
        )
    print(f"{'FAILED' if checks.failed else 'PASSED'}: {checks.passed} checks passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


if __name__ == "__main__":
    raise SystemExit(main())
