"""Run mutants and report who noticed them.

cd tests && python -m mutation [--per-rule N] [--again RESULTS] [--out FILE] [FILE ...]

bench/results/mutants.json holds several runs in order (`runs`): of a mutant the last state counts. Why one of
them may live is in `equivalent`, and a test holds the one against the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mutation.bench import CORE, KERNELS, NATIVE, Bench, Outcome
from mutation.equivalent import EQUIVALENT, SEEN_BY_TESTS
from mutation.rules import Mutant, mutants_of, sample

PYTHON_FILES = (
    "rotary.py",
    "sampling.py",
    "readout.py",
    "models/layers.py",
    "models/gemma3.py",
    "models/qwen3.py",
)


def main(arguments: list[str]) -> int:
    """Run a sample; the exit status is 1 if a mutant survived that `equivalent` does not explain."""
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("files", nargs="*", help="names of kernel or Python files; default: all")
    parser.add_argument("--per-rule", type=int, default=1, help="mutants of each rule and file")
    parser.add_argument("--out", type=Path, help="write the results, as JSON, to this file")
    parser.add_argument("--again", type=Path, help="only those that survived by this file of results")
    options = parser.parse_args(arguments)
    everything = list(all_mutants(options.files))
    chosen = sample(everything, options.per_rule)
    if options.again is not None:
        results = json.loads(options.again.read_text())["mutants"]
        survived = {entry["what"] for entry in results if entry["state"] == "survived"}
        # A line that stands in the file twice is tried in both places.
        chosen = [mutant for mutant in everything if mutant.key in survived]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="vox-mutants-") as folder:
        bench = Bench(Path(folder) / "bench")
        bench.prepare()
        for number, mutant in enumerate(chosen, start=1):
            outcome = bench.try_mutant(mutant)
            outcomes.append(outcome)
            print(f"{number}/{len(chosen)} {outcome.state}: {mutant.file}:{mutant.line} {mutant.rule}: "
                  f"{mutant.after.strip()}  [{outcome.by}]", flush=True)  # fmt: skip
            if options.out is not None:
                options.out.write_text(json.dumps(summary(outcomes), indent=1) + "\n")
    facts = summary(outcomes)
    print(json.dumps(facts["counts"]))
    for line in facts["survivors"]:
        print(f"survived: {line}")
    return 1 if facts["survivors"] or not outcomes else 0


def all_mutants(files: list[str]) -> list[Mutant]:
    """Return every mutant of the files."""
    paths = {path.name: path for path in sorted(KERNELS.glob("*.h"))}
    paths |= {path.name: path for path in sorted(NATIVE.glob("*pack.cpp"))}
    paths |= {name: CORE / name for name in PYTHON_FILES}
    unknown = set(files) - paths.keys()
    if unknown:
        sys.exit(f"no such file: {', '.join(sorted(unknown))}; there are {', '.join(paths)}")
    return [
        m
        for name, path in paths.items()
        if not files or name in files
        for m in mutants_of(name, path.read_text())
    ]


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Return counts, who survived and why, and every mutant."""
    survivors = [o.mutant for o in outcomes if o.state == "survived"]
    return {
        "counts": dict(Counter(o.state for o in outcomes)),
        "equivalent": [f"{m.key} ({EQUIVALENT[m.key]})" for m in survivors if m.key in EQUIVALENT],
        "seen_by_tests": [f"{m.key} ({SEEN_BY_TESTS[m.key]})" for m in survivors if m.key in SEEN_BY_TESTS],
        "survivors": [f"{m.line}: {m.key}" for m in survivors if m.key not in EQUIVALENT | SEEN_BY_TESTS],
        "mutants": [
            {"state": o.state, "by": o.by, "line": o.mutant.line, "what": o.mutant.key} for o in outcomes
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
