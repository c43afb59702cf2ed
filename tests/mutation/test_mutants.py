"""The mutation bench works: what a rule makes, and that a handful of mutants is noticed.

`make mutants` runs one of each rule and file.
"""

from __future__ import annotations

import json
import platform
import shutil

import pytest

from mutation.__main__ import all_mutants
from mutation.bench import KERNELS, ROOT, Bench
from mutation.equivalent import EQUIVALENT, SEEN_BY_TESTS
from mutation.rules import Mutant, mutants_of, sample


@pytest.mark.parametrize(
    ("line", "rule", "made"),
    [
        ("  y = f_fma(a, f_mul(b, c), y);", "product unfused", "  y = f_add(f_mul(a, f_mul(b, c)), y);"),
        ("  y = f_add(y, p0);", "operator swapped", "  y = f_sub(y, p0);"),
        ("  y = f_sub(a, b[i]);", "operands swapped", "  y = f_sub(b[i], a);"),
        ("  p = F_CONST(V, 0x3AB5639Du);", "last bit of a constant", "  p = F_CONST(V, 0x3AB5639Cu);"),
        ("  for (; i < last; ++i) {", "comparison", "  for (; i <= last; ++i) {"),
        ("  k += 4 * kChunk;", "off by one", "  k += 5 * kChunk;"),
        ("  x = a < b ? a : b;", "branches swapped", "  x = a < b ? b : a;"),
        ("  if (a && b) {", "and, or", "  if (a || b) {"),
        ("  total = f_add(total, p);", "statement dropped", "  ;"),
        ("  VF p = f_splat(0.0f);", "sign of zero", "  VF p = f_splat(-0.0f);"),
    ],
)
def test_a_rule_makes_its_mistake(line, rule, made):
    found = [mutant.after for mutant in mutants_of("kernel.h", line) if mutant.rule == rule]
    assert made in found
    assert line not in found


def test_comments_declarations_and_docstrings_are_left_alone():
    assert not list(mutants_of("kernel.h", "// a + b\n#define A 1\ntemplate <int N>\nstatic_assert(1 == 1);"))
    assert not list(mutants_of("a.py", '"""Text of 1 + 2.\n\nif not 3\n"""\nimport a1\n# 1 + 1'))


def test_a_sample_has_every_rule_of_every_file():
    everything = [m for path in sorted(KERNELS.glob("*.h")) for m in mutants_of(path.name, path.read_text())]
    chosen = sample(everything, 1)
    assert {(m.file, m.rule) for m in chosen} == {(m.file, m.rule) for m in everything}
    assert len(chosen) == len({(m.file, m.rule) for m in chosen}) > 100


def test_every_equivalent_mutant_has_a_reason():
    assert all(len(reason) > 20 for reason in EQUIVALENT.values())
    assert not EQUIVALENT.keys() & SEEN_BY_TESTS.keys()


def test_a_test_that_is_named_instead_of_a_vector_exists():
    for name in SEEN_BY_TESTS.values():
        path, test = name.split("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name


def test_the_results_leave_nobody_unexplained():
    """Every mutant that the recorded runs let live was killed since, or `equivalent` says why it may live.

    One whose line is no longer in the source is of another source.
    """
    last: dict[str, str] = {}
    for run in json.loads((ROOT / "bench/results/mutants.json").read_text())["runs"]:
        last.update((entry["what"], entry["state"]) for entry in run["mutants"])
    living = {what for what, state in last.items() if state == "survived"}
    of_today = {mutant.key for mutant in all_mutants([])}
    assert (living & of_today) - EQUIVALENT.keys() - SEEN_BY_TESTS.keys() == set()
    assert len(living & of_today) > 20
    assert len(last.keys() & of_today) > 150


@pytest.mark.timeout(900)  # compilers, on a machine that may be busy
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the bench compiles for AVX2")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the bench needs g++")
def test_a_handful_is_noticed(tmp_path):
    bench = Bench(tmp_path / "bench")
    bench.prepare()
    outcomes = [bench.try_mutant(mutant) for mutant in _handful()]
    assert [(o.state, o.mutant.key) for o in outcomes if o.state != "killed"] == []
    line = (KERNELS / "norm.h").read_text().split("\n")[0]
    assert bench.try_mutant(Mutant("norm.h", 1, "comment", line, line + ".")).state == "same code"
    assert bench.try_mutant(Mutant("norm.h", 1, "nonsense", line, "nonsense")).state == "not built"


def _handful() -> list[Mutant]:
    """One wrong operation, one wrong bit and one product unfused, all where every lane must meet them."""
    text = (KERNELS / "canon.h").read_text()
    wanted = (
        ("operator swapped", "f_mul(f, f)"),
        ("last bit of a constant", "0xBE2A978C"),
        ("product unfused", "0xBE2A978C"),
    )
    return [
        next(m for m in mutants_of("canon.h", text) if m.rule == rule and within in m.before)
        for rule, within in wanted
    ]
