"""The CPU lane beside llama.cpp, transformers and the machine's memory, in one run.

    python bench/cpu.py --gguf MODEL.gguf [--model gemma-3-270m] [--out bench/results] [--rounds 3]

Every round measures every side once, in turn, each in a process of its own; ratios are taken
within a round, and their medians reported. The demo model must be imported and the CPU lane
installed (`make demo`). The Qwen3-0.6B shape is written with random weights and imported into a
home of its own. A side that is not installed is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sides
from serving import PeakMemory, cpu_name, measure_vox

PROMPT = (
    "Water boils at a temperature of one hundred degrees, and the sea is salty because rivers carry "
    "minerals from the rocks into it over many years"
)
"""Some thirty tokens."""
QWEN = {"q8_0": "qwen3-0.6b-shape-q8_0", "bf16": "qwen3-0.6b-shape-bf16"}
GOALS: dict[str, tuple[float, bool]] = {
    "demo.decode_over_llama": (2.3, True),
    "demo.decode_over_limit": (0.85, True),
    "demo.prefill_over_llama": (3.0, True),
    "demo.prefill_over_transformers": (2.0, True),
    "demo.decode_8_over_1": (5.0, True),
    "q8_0.decode_over_llama": (1.6, True),
    "q8_0.decode_over_limit": (0.8, True),
    "q8_0.prefill_over_llama": (3.0, True),
    "bf16.decode_over_llama": (1.25, True),
    "bf16.decode_over_limit": (0.8, True),
    "whole.seconds_over_llama": (1.0, False),
    "whole.peak_pss_mib": (420.0, False),
    "serving.peak_pss_mib": (450.0, False),
}
"""What is aimed at, and whether more is better."""

Numbers = dict[str, Any]


def run_side(python: str, program: str, *arguments: object, home: Path | None = None) -> Numbers | None:
    """Return what the program printed; None where it could not run, with the reason on stderr."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    if home is not None:
        environment["VOX_HOME"] = str(home)
    command = [python, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        print("  left out:", *done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    printed: Numbers = json.loads(done.stdout.strip().splitlines()[-1])
    return printed


def host(*arguments: str, home: Path | None = None) -> Numbers:
    """Run vox-host with --json and return what it said."""
    environment = {**os.environ, **({} if home is None else {"VOX_HOME": str(home)})}
    command = [sys.executable, "-m", "vox_host", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vox-host {' '.join(arguments)} failed: {done.stderr.strip()[-1000:]}")
    said: Numbers = json.loads(done.stdout)
    return said


def import_qwen(folder: Path, weight_format: str) -> tuple[Path, Path] | None:
    """Write and import the Qwen3 shape; return its GGUF and its model directory."""
    file, home = folder / f"{QWEN[weight_format]}.gguf", folder / "home"
    home.mkdir(exist_ok=True)
    writer = Path(__file__).with_name("qwen3_shape.py")
    command = [sys.executable, str(writer), "--format", weight_format, "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print("  the Qwen3 shape is left out:", *done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    host("model", "import", str(file), "--name", QWEN[weight_format], "--accept-license", home=home)
    return file, Path(host("model", "show", QWEN[weight_format], home=home)["path"])


def file_bytes(model: Path) -> int:
    """Bytes of the model's tensors in their file, which is what others read for a token."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def whole_process(command: Sequence[str]) -> Numbers:
    """Seconds from start to end, and the highest sum of proportional set sizes meanwhile."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    memory = PeakMemory(process.pid)
    memory.start()
    _, problem = process.communicate()
    seconds = time.perf_counter() - began
    memory.stop.set()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command[:4])} failed: {problem.decode()[-1000:]}")
    return {"seconds": seconds, "peak_pss_mib": memory.peak_bytes / 2**20, "parts": memory.parts}


def one_round(options: argparse.Namespace, python: str, models: dict[str, tuple[Path, Path]]) -> Numbers:
    """Measure every side once."""
    threads = options.threads
    found: Numbers = {"read": run_side(python, sides.READ, threads)}
    for name, (gguf, model) in models.items():
        tokens, prefill = (96, 512) if name == "demo" else (24, 512 if name == "q8_0" else 0)
        users = 8 if name == "demo" else 0
        print(f"  {name}", file=sys.stderr)
        found[name] = {
            "vox": run_side(python, sides.VOX, model, threads, tokens, prefill, users),
            "read": run_side(python, sides.READ, threads),
            "llama": run_side(sys.executable, sides.LLAMA, gguf, threads, tokens, prefill),
        }
        if name != "bf16":
            config = (model / "config.json").read_text()
            found[name]["transformers"] = run_side(
                sys.executable, sides.TRANSFORMERS, config, threads, 8, 512
            )
    print("  whole process, serving", file=sys.stderr)
    generate = ["generate", "--model", options.model, "--prompt", PROMPT, "--max-tokens", "32"]
    generate += ["--temperature", "0", "--threads", str(threads)]
    found["whole"] = {"vox": whole_process([sys.executable, "-m", "vox_host", *generate])}
    if found["demo"]["llama"] is not None:
        arguments = [str(options.gguf), str(threads), "32", PROMPT]
        found["whole"]["llama"] = whole_process([sys.executable, "-c", sides.LLAMA_WHOLE, *arguments])
    found["serving"] = measure_vox(options.model, threads, 96, 512)
    return found


def ratios(found: Numbers, models: dict[str, tuple[Path, Path]]) -> dict[str, float]:
    """Everything that is compared, within one round."""
    made: dict[str, float] = {}
    for name, (_, model) in models.items():
        side = found[name]
        ours = side["vox"]
        if ours is None:
            continue
        # The machine's bandwidth drifts: the limit is what was read right before and right after.
        reads = [r["best_gb_per_s"] for r in (found["read"], side["read"]) if r is not None]
        read = statistics.mean(reads) * 1e9
        # Of the limit of the bytes that lie in memory, each read once; then of the file's.
        made[f"{name}.decode_over_limit"] = ours["decode_tokens_per_s"] * ours["weight_bytes"] / read
        made[f"{name}.decode_over_limit_of_file"] = ours["decode_tokens_per_s"] * file_bytes(model) / read
        for other in ("llama", "transformers"):
            theirs = side.get(other) or {}
            for what in ("decode", "prefill"):
                key = f"{what}_tokens_per_s"
                if key in theirs and key in ours:
                    made[f"{name}.{what}_over_{other}"] = ours[key] / theirs[key]
        if "decode_8_tokens_per_s" in ours:
            made[f"{name}.decode_8_over_1"] = ours["decode_8_tokens_per_s"] / ours["decode_tokens_per_s"]
            made[f"{name}.drawn_8_over_1"] = ours["drawn_8_tokens_per_s"] / ours["drawn_tokens_per_s"]
    whole = found["whole"]
    made["whole.peak_pss_mib"] = whole["vox"]["peak_pss_mib"]
    made["serving.peak_pss_mib"] = found["serving"]["peak_pss_mib"]
    if "llama" in whole:
        made["whole.seconds_over_llama"] = whole["vox"]["seconds"] / whole["llama"]["seconds"]
    return made


def medians(rounds: Sequence[Any]) -> Any:
    """The medians of the numbers of all rounds, in the form of one round."""
    known = [r for r in rounds if r is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        keys = [k for k in known[0] if not k.startswith("parts") and not k.startswith("peak_pss_parts")]
        return {key: medians([r.get(key) for r in known]) for key in keys}
    return round(statistics.median(known), 3)


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the demo model's file")
    parser.add_argument("--model", default="gemma-3-270m", help="its name after import")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-demo", action="store_true", help="leave the Qwen3 shapes out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    python = host("plugin", "show", "mens-cpu-ref")["python"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="vox-bench-") as folder:
        models = {"demo": (options.gguf, Path(host("model", "show", options.model)["path"]))}
        for weight_format in () if options.only_demo else QWEN:
            imported = import_qwen(Path(folder), weight_format)
            models |= {weight_format: imported} if imported else {}
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            rounds.append(one_round(options, python, models))
        compared = [ratios(found, models) for found in rounds]
        in_files = {name: file_bytes(model) for name, (_, model) in models.items()}
    report = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {
            "processor": cpu_name(),
            "threads": options.threads,
            "system": platform.platform(),
            "load_average": [round(x, 2) for x in os.getloadavg()],
        },
        "seconds": round(time.perf_counter() - began),
        # Of packed matrices, each once; a greedy search of a Q8_0 output matrix reads less.
        "weight_bytes_read_per_token": {
            name: side["vox"]["weight_bytes"]
            for name, side in rounds[0].items()
            if name in models and side["vox"] is not None
        },
        "weight_bytes_in_file": in_files,
        "medians": medians(rounds),
        "ratios": {
            name: round(statistics.median(c[name] for c in compared if name in c), 3)
            for name in sorted({n for c in compared for n in c})
        },
        "rounds": rounds,
    }
    print_report(report)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / f"cpu-{report['date']}.json"
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written to {path}", file=sys.stderr)


def print_report(report: Numbers) -> None:
    """Medians, then each goal beside what was found."""
    print(json.dumps({k: v for k, v in report.items() if k not in ("rounds", "ratios")}, indent=1))
    print(f"{'':32}{'found':>10}{'goal':>10}")
    for name, value in report["ratios"].items():
        goal = GOALS.get(name)
        if goal is None:
            print(f"{name:32}{value:10.3f}")
            continue
        wanted, more_is_better = goal
        reached = value >= wanted if more_is_better else value <= wanted
        print(f"{name:32}{value:10.3f}{wanted:10.2f}  {'reached' if reached else 'NOT REACHED'}")


if __name__ == "__main__":
    main()
