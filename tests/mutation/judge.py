"""Ask the recorded vectors about one build: exit 0 if all agree, 10 and the first that doesn't.

    python judge.py LIBRARY

Run in a process of its own: a mutant may crash, hang or print.
"""

from __future__ import annotations

import faulthandler
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIFFERS = 10


def main(library: Path) -> int:
    """Compare operators first, whole models after."""
    from mens_core.conformance.suite import GROUPS, answer
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps
    from vox_host.conformance.expected import load_group, load_models
    from vox_host.conformance.groups.operators import compare_case
    from vox_plugin_api.conformance_messages import ConformanceParams, ConformanceResult

    native = load_library(library)
    native.force_isa("avx2")
    ops = CpuTrainingOps(native)
    for threads in (1, 2):
        native.set_threads(threads)
        for group in GROUPS:
            for case in load_group(group).cases:
                reply = answer(lambda: ops, ConformanceParams(group=group, case=case.name))
                assert isinstance(reply.result, ConformanceResult)
                difference = compare_case(case, reply.result, reply.slices)
                if difference is not None:
                    return _differs(f"{group} {case.name}")
    recorder = _recorder()
    index, _ = load_models()
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout = sys.stderr
        recorder.record_models(lambda: CpuTrainingOps(native), index["made_by"], Path(folder))
        sys.stdout = sys.__stdout__
        from vox_host.conformance.expected import EXPECTED_DIR

        for name in ("models.json", "models.safetensors"):
            if (Path(folder) / name).read_bytes() != (EXPECTED_DIR / name).read_bytes():
                return _differs("whole models")
    return 0


def _recorder():  # type: ignore[no-untyped-def]
    import importlib.util

    spec = importlib.util.spec_from_file_location("record_suite", ROOT / "host/tools/record_suite.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _differs(what: str) -> int:
    print(what, flush=True)
    return DIFFERS


if __name__ == "__main__":
    faulthandler.enable()
    sys.exit(main(Path(sys.argv[1])))
