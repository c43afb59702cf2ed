"""The text of the grid kernels: one source, self-contained, and what the GPU compilers say of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from grid_shim import build as shim
from mens_core.kernel_source import CUDA_OPTIONS, grid_source

KERNELS = Path(__file__).parents[2] / "plugins/mens-core/src/mens_core/kernels"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def metal_text() -> str:
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")
    return shim.preprocessed(grid_source("metal"), "metal")


@pytest.mark.parametrize("target, allowed", [("cuda", {"<stdint.h>"}), ("metal", {"<metal_stdlib>"})])
def test_nothing_is_included_but_the_target_s_own(target, allowed):
    source = grid_source(target)
    # canon.h's branch for the CPU is in the text; it is not compiled.
    included = set(re.findall(r"#include (\S+)", source)) - {"<stddef.h>"}
    assert '"' not in "".join(included)
    assert included <= {"<stdint.h>", "<metal_stdlib>"}
    assert allowed <= included


def test_both_targets_get_the_same_text():
    cuda, metal = grid_source("cuda"), grid_source("metal")
    assert cuda.splitlines()[1:] == metal.splitlines()[1:]


def test_metal_text_has_nothing_without_defined_bits():
    """No library function but fma and sqrt, no double, no sum across a SIMD group, no atomics."""
    text = metal_text()
    assert set(re.findall(r"\bmetal::([\w:]+)", text)) == {
        "fma",
        "precise::sqrt",
        "threadgroup_barrier",
        "mem_flags::mem_threadgroup",
    }
    assert not re.search(r"\b(double|simd_\w+|atomic\w*|rsqrt|__(?!attribute__)\w+)\b", text)
    assert "using namespace metal" not in text
    # Read by the compiler as decimals: whole numbers only, which every compiler reads alike.
    assert set(re.findall(r"\b\d+\.\d+f?\b", text)) <= {"0.0f"}


OFF, SAFE = "#pragma METAL fp contract(off)", "#pragma METAL fp math_mode(safe)"
BODY = "CANON float f_add(float a, float b) { return a + b; }"
UNDONE = {
    "commented out": (OFF, f"// {OFF}", "no #pragma METAL fp contract(off) before the code"),
    "in a block comment": (OFF, f"/* {OFF}\n*/", "no #pragma METAL fp contract(off) before the code"),
    "under #if 0": (OFF, f"#if 0\n{OFF}\n#endif", "no #pragma METAL fp contract(off) before the code"),
    "not for this compiler": (
        OFF,
        f"#if !defined(__METAL_VERSION__)\n{OFF}\n#endif",
        "no #pragma METAL fp contract(off) before the code",
    ),
    "behind the code": (
        OFF,
        f"float early(float);\n{OFF}",
        "no #pragma METAL fp contract(off) before the code",
    ),
    "on again": (BODY, f"#pragma METAL fp contract(on)\n{BODY}", "#pragma METAL fp contract(on)"),
    "fast again, spaced": (
        BODY,
        f"# pragma METAL fp contract ( fast )\n{BODY}",
        "#pragma METAL fp contract(fast)",
    ),
    "on by C's name": (BODY, f"#pragma STDC FP_CONTRACT ON\n{BODY}", "#pragma STDC FP_CONTRACT ON"),
    "on by an operator": (
        BODY,
        f'_Pragma("METAL fp contract(on)")\n{BODY}',
        "#pragma METAL fp contract(on)",
    ),
    "fast math": (SAFE, SAFE.replace("safe", "fast"), "#pragma METAL fp math_mode(fast)"),
    "relaxed later": (
        BODY,
        f"#pragma METAL fp math_mode(relaxed)\n{BODY}",
        "#pragma METAL fp math_mode(relaxed)",
    ),
}


def test_the_metal_text_asks_for_the_rules_before_its_code():
    text = metal_text()
    assert shim.fp_problems(text) == []
    assert shim.contraction(text, "metal") == "off"


@pytest.mark.parametrize("planted", UNDONE)
def test_a_pragma_that_is_dead_or_undone_is_seen(planted):
    """And what is seen is executed: fused, as Metal's compiler would."""
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")
    old, new, named = UNDONE[planted]
    source = grid_source("metal", "serving")
    assert source.count(old) == 1
    text = shim.preprocessed(source.replace(old, new), "metal")
    assert named in shim.fp_problems(text)
    assert shim.contraction(text, "metal") == "fast"


def test_the_last_word_of_the_options_counts():
    for options, expected in (
        (CUDA_OPTIONS, "off"),
        ((*CUDA_OPTIONS, "--fmad=true"), "fast"),
        ((*CUDA_OPTIONS, "--use_fast_math"), "fast"),
        ((), "fast"),
    ):
        assert shim.contraction("", "cuda", options) == expected, options


def test_every_pointer_of_the_metal_text_has_an_address_space():
    text = metal_text()
    bare = [
        line.strip()
        for line in text.splitlines()
        for found in re.findall(r"(\w+\s+)?\b(?:const\s+)?(?:float|u?int\d+_t|typename F::Stored)\s*\*", line)
        if found.strip() not in ("device", "threadgroup", "constant", "const")
    ]
    assert not bare


def test_no_name_is_a_word_of_metal():
    """`half` is a type and `thread` an address space there; a C++ compiler doesn't mind."""
    text = re.sub(r"\[\[.*?\]\]", "", metal_text())
    for word in ("constant", "device", "threadgroup", "kernel", "thread", "vertex", "fragment", "sampler"):
        assert not re.search(rf"[.\s]{word}\s*[;=),\[]", text), word
    for word in ("half", "bfloat", "uint", "uchar", "ushort", "ulong", "patch", "visible", "object", "mesh"):
        assert not re.search(rf"\b{word}\b", text), word


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvcc_compiles_it(tmp_path, arch):
    if NVCC is None:
        pytest.skip("needs nvcc")
    file, ptx = tmp_path / "grid.cu", tmp_path / "grid.ptx"
    file.write_text(grid_source("cuda"))
    done = subprocess.run(
        [NVCC, "-ptx", f"-arch={arch}", *CUDA_OPTIONS, "-Werror=all-warnings", str(file), "-o", str(ptx)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = ptx.read_text()
    assert text.count(".visible .entry") > 30
    # Every operation that rounds is the correctly rounded one, flushing; nothing is approximate.
    operations = set(
        re.findall(r"\b((?:add|sub|mul|fma|div|sqrt|rcp|ex2|lg2|rsqrt|mad)\.\S*f(?:32|64))\b", text)
    )
    assert "fma.rn.ftz.f32" in operations
    assert operations <= {f"{name}.rn.ftz.f32" for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")}


def test_the_documented_count_of_lines_per_target_is_true():
    """docs/architecture.md says how little a target has of its own."""
    lines = (KERNELS / "grid/target.h").read_text().splitlines()
    metal, cuda = lines.index("#if defined(VOX_METAL)"), lines.index("#else  // CUDA")
    end = len(lines) - lines[::-1].index("#endif") - 1
    canon = (KERNELS / "canon.h").read_text().splitlines()
    start = canon.index("#include <stddef.h>")
    counts = {
        "Metal": code_lines(lines[metal + 1 : cuda]),
        "CUDA": code_lines(lines[cuda + 1 : end]),
        "scalar C++": code_lines(canon[start : canon.index("#endif", start)]),
    }
    table = (KERNELS.parents[4] / "docs/architecture.md").read_text()
    assert {name: f"| {name} | {count} |" in table for name, count in counts.items()} == dict.fromkeys(
        counts, True
    )


_BRANCH = re.compile(r"#\s*(?:el)?if defined\(VOX_ISA_(AVX512|AVX2|NEON)\b(.*)")


def isa_lines(path):
    """Lines of code that one instruction set alone has, by its name; what both of x86 have is neither's."""
    counts = {"AVX512": 0, "AVX2": 0, "NEON": 0}
    opened = []  # of each #if that is open: whose branch this is
    for line in map(str.strip, path.read_text().splitlines()):
        if line.startswith(("#if", "#elif", "#else", "#endif")):
            found = _BRANCH.match(line)
            of = None if found is None or "AVX" in found[2] else found[1]
            if line.startswith("#if"):
                opened.append([of, of is not None])
            elif line.startswith("#endif"):
                opened.pop()
            else:
                # Behind branches of x86's stands NEON's, behind NEON's what both of x86 have.
                after = "NEON" if opened[-1][1] and opened[-1][0] != "NEON" else None
                opened[-1][0] = of if line.startswith("#elif") else after
        elif opened and line and not line.startswith(("//", "#")):
            innermost = next((of for of, _ in reversed(opened) if of is not None), None)
            if innermost is not None:
                counts[innermost] += 1
    return counts


def test_the_documented_count_of_lines_per_instruction_set_is_true():
    per_file = {path.name: isa_lines(path) for path in KERNELS.glob("*.h")}
    own = sorted(name for name, counts in per_file.items() if any(counts.values()))
    total = [sum(counts[isa] for counts in per_file.values()) for isa in ("AVX512", "AVX2", "NEON")]
    files = ", ".join(
        f"`{name}`"
        for name in sorted(own, key=("simd.h", "quant_simd.h", "compact.h", "dropout.h", "transpose.h").index)
    )
    row = f"| AVX-512, AVX2, NEON | {', '.join(map(str, total))} | {files}: "
    assert row in (KERNELS.parents[4] / "docs/architecture.md").read_text(), row


def test_the_documented_count_of_the_cuda_lane_s_own_lines_is_true():
    folder = KERNELS.parents[4] / "plugins/mens-torch-cuda/src/mens_torch_cuda/kernels"
    counts = {path.stem: code_lines(path.read_text().splitlines()) for path in folder.glob("*.h")}
    codes = ("packed", "super", "tiles", "few_rows", "ring_rows", "many_rows", "warpgroup_tiles")
    products = (*codes, "chains", "row_tiles", "sliced", "broad", "thin")
    attention = ("attend", "attend_few", "attend_rows", "one_row", "some_rows", "pairs")
    between = ("ways", "row_norm", "step_weights", "step", "between", "heads", "sums")
    assert sorted(counts) == sorted((*products, *attention, *between))
    said = [sum(counts[name] for name in group) for group in (products, attention, between)]
    row = (
        f"| CUDA, for speed | {sum(counts.values()):,} | `mens_torch_cuda/kernels`: {said[0]:,} of products, "
        f"{said[1]:,} of attention, {said[2]:,} that join what stands before, between and behind them |"
    )
    assert row in (KERNELS.parents[4] / "docs/architecture.md").read_text(), row
    fast = code_lines((folder.parent / "fast/kernels/fused.cu").read_text().splitlines())
    row = f"| CUDA, for fast mode | {fast} | `mens_torch_cuda/fast/kernels`: "
    assert row in (KERNELS.parents[4] / "docs/architecture.md").read_text(), row


def code_lines(lines):
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("//"))
