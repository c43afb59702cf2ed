"""Compiling and keeping the CUDA kernels, with a compiler that is handed in; and what its code may hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mens_core.kernel_source import CUDA_OPTIONS
from mens_torch_cuda.compiler import CompileError, architecture, cache_folder, compile_kernels
from mens_torch_cuda.ptx import forbidden_instructions
from vox_plugin_api.backend import BackendError

CLEAN = """
.visible .entry vox_silu_gate(
	.param .u64 vox_silu_gate_param_0
)
{
	.reg .f32 	%f<9>;
	ld.global.f32 	%f1, [%rd1];
	fma.rn.ftz.f32 	%f2, %f1, %f1, %f1;
	mul.rn.ftz.f32 	%f3, %f2, 0f3F800000;
@%p1 	add.rn.ftz.f32 	%f4, %f3, %f2;
	div.rn.ftz.f32 	%f5, %f4, %f3;
	setp.geu.ftz.f32 	%p2, %f5, %f4;
	cvt.rn.f32.s32 	%f6, %r1;
	st.global.f32 	[%rd2], %f6;
	mul.wide.u32 	%rd9, %r1, 4;
	ret;
}
"""


def in_kernel(line, kernel="vox_silu_gate"):
    return CLEAN.replace("vox_silu_gate", kernel).replace("\tret;", f"\t{line}\n\tret;")


class Compiler:
    """Compiles nothing; counts."""

    def __init__(self, ptx=CLEAN, version="NVRTC 13.0", problem=None):
        self.ptx, self.name, self.problem, self.calls = ptx, version, problem, []

    def version(self):
        if isinstance(self.problem, OSError):
            raise self.problem
        return self.name

    def compile(self, source, options):
        self.calls.append(options)
        if self.problem is not None:
            raise self.problem
        return f"code of {source}".encode(), self.ptx


def compiled(folder, compiler, *, source="kernels", options=CUDA_OPTIONS, capability=(9, 0)):
    return compile_kernels(source, options, capability, compiler, folder)


def test_code_is_compiled_once_and_then_read(tmp_path: Path):
    compiler = Compiler()
    first, second = (compiled(tmp_path / "a/b", compiler) for _ in range(2))
    assert (first.cache, second.cache) == ("written", "read")
    assert first.cubin == second.cubin == b"code of kernels"
    assert compiler.calls == [("--gpu-architecture=sm_90a", *CUDA_OPTIONS, "--no-cache")]
    assert [path.suffix for path in (tmp_path / "a/b").iterdir()] == [".cubin"]


@pytest.mark.parametrize(
    "change",
    [
        {"source": "other"},
        {"options": (*CUDA_OPTIONS, "-G")},
        {"capability": (8, 0)},
        {"compiler": Compiler(version="NVRTC 13.1")},
    ],
)
def test_all_that_decides_the_code_is_in_its_name(tmp_path: Path, change):
    compiled(tmp_path, Compiler())
    again = compiled(tmp_path, change.pop("compiler", Compiler()), **change)
    assert again.cache == "written"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40] + b"\0" + b[41:], lambda b: b""])
def test_a_damaged_file_counts_as_absent_and_is_written_again(tmp_path: Path, damage):
    compiled(tmp_path, Compiler())
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert compiled(tmp_path, Compiler()).cache == "written"
    assert compiled(tmp_path, Compiler()).cache == "read"


def test_a_folder_that_cannot_be_written_costs_the_cache_only(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    kernels = compiled(tmp_path / "file/kernels", Compiler())
    assert kernels.cubin == b"code of kernels"
    assert kernels.cache.startswith("not written:")


def test_the_cache_lies_where_the_user_s_caches_lie():
    assert cache_folder({"HOME": "/home/a"}) == Path("/home/a/.cache/mens-torch-cuda/kernels")
    assert cache_folder({"HOME": "/home/a", "XDG_CACHE_HOME": "/c"}) == Path("/c/mens-torch-cuda/kernels")


@pytest.mark.parametrize(
    ("problem", "named"),
    [
        (CompileError("grid.cu(3): error: x"), "error: x"),
        (OSError("no libnvrtc.so.13"), "libnvrtc"),
    ],
)
def test_kernels_that_cannot_be_built_refuse_the_lane(tmp_path: Path, problem, named):
    with pytest.raises(BackendError, match="kernels could not be built") as caught:
        compiled(tmp_path, Compiler(problem=problem))
    assert caught.value.error.code == "kernels-not-built"
    assert named in caught.value.error.message
    assert not list(tmp_path.iterdir())


INEXACT = [
    "ex2.approx.ftz.f32 \t%f7, %f1;",
    "rcp.approx.ftz.f32 \t%f7, %f1;",
    "rsqrt.approx.ftz.f32 \t%f7, %f1;",
    "sqrt.approx.ftz.f32 \t%f7, %f1;",
    "div.full.ftz.f32 \t%f7, %f1, %f2;",
    "tanh.approx.f32 \t%f7, %f1;",
    "mul.ftz.f32 \t%f7, %f1, %f2;",
    "@!%p3 add.ftz.f32 \t%f7, %f1, %f2;",
    "mul.rn.f32 \t%f7, %f1, %f2;",
    "fma.rz.ftz.f32 \t%f7, %f1, %f2, %f3;",
    "add.rn.f64 \t%fd7, %fd1, %fd2;",
    "fma.rn.f16x2 \t%r7, %r1, %r2, %r3;",
    "atom.global.add.f32 \t%f7, [%rd1], %f1;",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 \t{%f1}, {%r1}, {%r2}, {%f1};",
    "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 \t{%r1}, {%r2}, {%r3}, {%r1};",
    "wgmma.mma_async.sync.aligned.m64n64k32.satfinite.s32.s8.s8 \t{%r1}, %rd1, %rd2, p;",
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 \t{%f1}, %rd1, %rd2, p, 1, 1, 0, 0;",
]


@pytest.mark.parametrize("line", INEXACT)
def test_an_instruction_that_is_not_exact_refuses_the_lane(tmp_path: Path, line):
    with pytest.raises(BackendError) as caught:
        compiled(tmp_path, Compiler(ptx=in_kernel(line)))
    error = caught.value.error
    assert error.code == "kernels-not-exact"
    (found,) = error.facts["found"]["vox_silu_gate"]
    assert line.removeprefix("@!%p3 ").startswith(found)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 \t{%r1}, {%r2}, {%r3}, {%r1};",
        "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 \t{%r1}, %rd1, %rd2, p;",
        "wgmma.wait_group.sync.aligned \t0;",
    ],
)
def test_integer_products_of_the_tensor_cores_are_exact(line):
    assert forbidden_instructions(in_kernel(line)) == {}


def test_a_fused_operation_where_the_source_has_none_is_found():
    assert forbidden_instructions(CLEAN) == {}
    for kernel in ("vox_add", "vox_penalise", "vox_embed_q4_k"):
        assert forbidden_instructions(in_kernel("", kernel)) == {kernel: ("fma.rn.ftz.f32",)}


def test_of_hopper_the_compiler_is_told_that_it_is_no_other():
    named = [architecture(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 1))]
    assert named == ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_121"]


def test_a_text_without_kernels_is_no_clean_text():
    assert forbidden_instructions("") == {"": ("no kernel",)}


@pytest.mark.skipif("VOX_NVRTC" not in os.environ, reason="set VOX_NVRTC=1 where there is NVRTC")
def test_the_real_compiler_s_code_is_clean_and_its_other_options_are_not(tmp_path: Path):
    from mens_torch_cuda.compiler import Nvrtc
    from mens_torch_cuda.kernel_text import cuda_source

    source = cuda_source()
    assert compiled(tmp_path, Nvrtc(), source=source, capability=(8, 0)).cubin
    # Of the roots the source says itself that they are rounded, whatever the option.
    for wrong in ("--fmad=true", "--ftz=false", "--prec-div=false"):
        options = tuple(wrong if o.split("=")[0] == wrong.split("=")[0] else o for o in CUDA_OPTIONS)
        with pytest.raises(BackendError, match="not correctly rounded"):
            compiled(tmp_path, Nvrtc(), source=source, options=options)
