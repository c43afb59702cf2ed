"""Runs the Metal lane on this Mac's GPU beside the CPU lane, byte by byte, and writes a certificate.

    python tests/torch_mps/check_metal.py [--layers 28] [--only NAME ...] [--out FILE]

Needs a Mac with an Apple chip, macOS 15 or newer, Python 3.11 to 3.13 for arm64 with torch, numpy, pydantic
and safetensors, and what the CPU lane is built with (cmake, a C++ compiler). One line per check. Exit status:
0 all passed, or there is no GPU that will do and this says why; 1 a check failed; 2 the environment is not
fit: this Python lacks something, or a variable would change what runs. `--on-cpu` plays the GPU on
the CPU: it tries this script, and its certificate says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.sources import ROOT, describe_distributions, refuse_bare_python, use_sources

NOTHING = "no check of the Metal lane was run, and no certificate was written"

use_sources()
if __name__ == "__main__":
    # Before what this machine's Python may lack: elsewhere nothing need be installed to hear that.
    if platform.system() != "Darwin" and "--on-cpu" not in sys.argv:
        print(
            f"SKIPPED: the lane needs macOS, and this is {platform.system()}; the Metal lane was not "
            f"started. Use the CPU lane, or the CUDA lane on an NVIDIA GPU.\n{NOTHING}"
        )
        raise SystemExit(0)
    refuse_bare_python("metal", also=("packaging",))
sys.path.insert(0, str(ROOT / "host/src"))

from gpu.check_lane import Checks, operators, quick_vectors, run_scenario, same_answers  # noqa: E402
from gpu.shape_model import write_shape  # noqa: E402
from gpu.training_checks import training_operators, training_run, training_vectors  # noqa: E402
from lanes.tiny_models import BY_FAMILY, write_model  # noqa: E402
from mens_core.numerics import NUMERICS_VERSION  # noqa: E402
from mens_core.ops import Ops  # noqa: E402
from mens_core.training_ops import TrainingOps  # noqa: E402
from mens_torch_mps.start import Started, start  # noqa: E402
from vox_host.hardware.apple import describe_mac  # noqa: E402
from vox_host.hardware.system import System  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402

CERTIFICATES = ROOT / "docs" / "certificates"


class NotedChecks(Checks):
    """Checks that a certificate can list."""

    def __init__(self, only: list[str]) -> None:
        super().__init__(only)
        self.is_whole = not only
        self.noted: list[dict[str, Any]] = []

    def run(self, name: str, check: Any) -> None:
        said: list[str] = []

        def noting() -> str:
            said.append(check())
            return said[0]

        before = self.passed + self.failed
        super().run(name, noting)
        if self.passed + self.failed > before:
            self.noted.append({"name": name, "passed": bool(said), "said": said[0] if said else ""})


def certificate(started: Started, checks: NotedChecks) -> dict[str, Any]:
    """Return what was checked, on what, and the verdict; *partial* is one of a part."""
    facts = dict(started.facts)
    mac = describe_mac(System()) if platform.system() == "Darwin" else {}
    verdict = "failed" if checks.failed or not checks.passed else "bitwise" if checks.is_whole else "partial"
    build = mac.get("os_build", "unknown")
    return {
        "certificate": 1,
        "about": "mens-torch-mps, checked by make test-metal",
        "verdict": verdict,
        "execution": facts.pop("execution", ""),
        "chip": mac.get("chip", platform.machine()),
        "model": mac.get("model", "unknown"),
        "os_build": build,
        "compiler": f"Metal's run-time compiler of macOS build {build}, through torch {facts.get('torch')}",
        "python": platform.python_version(),
        "lane": facts,
        "numerics_version": NUMERICS_VERSION,
        "checks": checks.noted,
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def file_name(facts: dict[str, Any]) -> str:
    """Return the certificate's name: chip and system build are what it is about."""
    words = re.sub(r"[^a-z0-9]+", "-", f"{facts['chip']} {facts['os_build']}".lower()).strip("-")
    return f"metal-{words}.json"


def main() -> int:
    """Check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=28, help="of the Qwen3-0.6B shape; 0 leaves it out")
    parser.add_argument("--only", nargs="*", default=[], help="checks by the beginning of their names")
    parser.add_argument("--out", type=Path, help="the certificate; default: a file in docs/certificates")
    parser.add_argument("--on-cpu", action="store_true", help="play the GPU on the CPU, to try this script")
    given = parser.parse_args()
    try:
        # What is remembered of this chip would keep the probe of matrices from running.
        with tempfile.TemporaryDirectory() as nothing:
            started = _on_cpu() if given.on_cpu else start({**os.environ, "XDG_CACHE_HOME": nothing})
    except BackendError as problem:
        # A variable is the caller's doing, not this machine's.
        is_refused = problem.error.code == "environment-refused"
        said = "REFUSED" if is_refused else "SKIPPED"
        print(f"{said}: {problem.error.message}. {problem.error.remedy}\n{NOTHING}")
        return 2 if is_refused else 0
    built = subprocess.run([sys.executable, ROOT / "plugins/mens-cpu-ref/build_native.py"], check=False)
    if built.returncode != 0:
        print("FAILED the CPU lane could not be built; nothing was compared")
        return 1
    checks = NotedChecks(given.only)
    print("device:", ", ".join(f"{name} {value}" for name, value in started.facts.items()))
    with tempfile.TemporaryDirectory() as folder:
        run_all(checks, started, Path(folder), given.layers)
    facts = certificate(started, checks)
    out = given.out or CERTIFICATES / file_name(facts)
    if given.out is None and (facts["execution"] or not checks.is_whole):
        print("no certificate was written: it would be one of a part, or of no GPU (--out FILE writes it)")
    else:
        out.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        print(f"certificate: {out} ({facts['verdict']}); see docs/certificates/README.md")
    print(f"{'FAILED' if checks.failed else 'PASSED'}: {checks.passed} checks passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


def run_all(checks: NotedChecks, started: Started, folder: Path, layers: int) -> None:
    describe_distributions(folder / "site")
    from mens_cpu_ref import plugin as cpu_plugin
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.reference_lane import ReferenceOps
    from mens_cpu_ref.training_lane import CpuTrainingOps, ReferenceTrainingOps
    from mens_torch_mps.plugin import backend_on

    library = load_library()
    library.set_threads(os.cpu_count() or 1)

    def make_cpu() -> Ops:
        return CpuOps(library.kernels)

    def make_training() -> TrainingOps:
        return started.training_lane(started.lane())

    def make_cpu_training() -> TrainingOps:
        return CpuTrainingOps(library)

    def same_model(path: Path, vocabulary: int, long: int) -> str:
        metal, cpu = (run_scenario(path, ops, vocabulary, long) for ops in (started.lane(), make_cpu()))
        differing = [
            f"step {i}: {a} beside {b}" for i, (a, b) in enumerate(zip(metal, cpu, strict=True)) if a != b
        ]
        assert not differing, f"{len(differing)} of {len(cpu)} steps differ; {differing[0]}"
        return f"{len(cpu)} steps, the last with logits {cpu[-1][1]}"

    checks.run("quick vectors", lambda: quick_vectors(started))  # type: ignore[arg-type]
    checks.run("operators", lambda: operators(started, ReferenceOps))  # type: ignore[arg-type]
    checks.run("training vectors", lambda: training_vectors(make_training))
    checks.run("training operators", lambda: training_operators(make_training, ReferenceTrainingOps))
    for family, config in BY_FAMILY.items():
        path = write_model(folder / family, config)
        checks.run(
            f"training of tiny {family}",
            lambda path=path: training_run(path, make_training, make_cpu_training),
        )
        for long in (300, 120):
            checks.run(
                f"tiny {family}, prompt of {long}", lambda path=path, long=long: same_model(path, 97, long)
            )
        lanes = backend_on(started), cpu_plugin.backend()
        for name, sampling in (
            ("greedy", {"temperature": 0.0}),
            ("sampled", {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20}),
        ):
            checks.run(
                f"plugin {family}, {name}",
                lambda path=path, lanes=lanes, sampling=sampling: same_answers(*lanes, path, **sampling),
            )
    for weight_format in ("bf16", "q8_0") if layers else ():
        path = write_shape(folder / weight_format, weight_format, layers=layers)
        checks.run(
            f"Qwen3-0.6B shape, {weight_format}, {layers} layers",
            lambda path=path: same_model(path, 151936, 200),
        )


def _on_cpu() -> Started:
    from metal_shim.stand_in import fill_new_memory, started_on_cpu

    fill_new_memory()
    return started_on_cpu()


if __name__ == "__main__":
    raise SystemExit(main())
