"""Loading the CPU lane: refusals that say why, and what the lane itself checks."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lanes.cpu_calls import Step
from mens_core.ops import AttentionSpec, Batch, Fault, StoredTensor
from mens_cpu_ref.arrays import AddressCache, WeightMemory, address_of, untouched_zeros
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import ABI_VERSION, load_library
from mens_cpu_ref.rotary import RotaryTable
from mens_cpu_ref.threads import usable_threads
from vox_plugin_api.backend import BackendError

ROOT = Path(__file__).parents[2]


def stored(values: np.ndarray, name: str = "w", shape: tuple[int, ...] | None = None) -> StoredTensor:
    kind = {"float32": "f32", "float16": "f16", "uint16": "bf16"}[values.dtype.name]
    return StoredTensor(name, kind, shape or values.shape, memoryview(values.tobytes()))


@pytest.fixture
def ops(library):
    return CpuOps(library.kernels)


def put(ops: CpuOps, values: list[list[float]]):
    table = ops.load_matrix(stored(np.array(values, np.float32)))
    return ops.embed(table, np.arange(len(values), dtype=np.int32), None, name="put")


# --- the library -----------------------------------------------------------------------------


def test_a_missing_library_says_which_file(tmp_path):
    with pytest.raises(BackendError) as caught:
        load_library(tmp_path / "libvox_cpu.so")
    assert caught.value.error.code == "native-library-unloadable"
    assert caught.value.error.facts == {"file": str(tmp_path / "libvox_cpu.so")}


def stand_in(tmp_path: Path, version: int, isa: str) -> Path:
    """A library that answers the first questions and has no operator."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source = tmp_path / "stand_in.c"
    source.write_text(
        f"int vox_abi_version(void) {{ return {version}; }}\n"
        f'const char* vox_isa(void) {{ return "{isa}"; }}\n'
    )
    made = tmp_path / "libvox_cpu.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def test_a_cpu_below_the_minimum_is_refused_by_name(tmp_path):
    with pytest.raises(BackendError) as caught:
        load_library(stand_in(tmp_path, ABI_VERSION, ""))
    assert caught.value.error.code == "cpu-too-old"
    assert caught.value.error.facts["needed"] == "x86-64-v3"


def test_a_library_of_another_version_is_refused(tmp_path):
    with pytest.raises(BackendError) as caught:
        load_library(stand_in(tmp_path, 99, "avx2"))
    assert caught.value.error.facts["found"] == 99


def test_the_dispatcher_and_pool_need_no_more_than_the_baseline(library):
    """Code that runs before the CPU is checked must not use what is being checked."""
    objdump = shutil.which("objdump")
    if objdump is None or library.isa().startswith("neon"):
        pytest.skip("needs objdump on x86-64")
    file = ROOT / "plugins/mens-cpu-ref/src/mens_cpu_ref/libvox_cpu.so"
    for symbol in ("vox_isa", "vox_force_isa", "vox_abi_version"):
        text = subprocess.run(
            [objdump, "-d", f"--disassemble={symbol}", file],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert symbol in text
        assert not any(register in text for register in ("%ymm", "%zmm"))


def test_an_instruction_set_is_refused_with_those_of_this_machine(library):
    from mens_cpu_ref.plugin import _choose

    with pytest.raises(BackendError) as caught:
        _choose(library, {"isa": "bogus"})
    known = caught.value.error.facts["known"]["isa"]
    best = library.isa()
    assert known[0] == "reference"
    assert best in known[1:]
    for name in known[1:]:
        assert _choose(library, {"isa": name})[1] == name
    others = {"neon", "neon_dot"} if best.startswith("avx") else {"avx2", "avx512"}
    assert not others & set(known)
    library.force_isa("")


def test_importing_the_plugin_loads_nothing():
    code = (
        "import sys, mens_cpu_ref.plugin as p; "
        "assert not any(m in sys.modules for m in ('numpy', 'mens_core', 'mens_cpu_ref.library')), 'loaded'"
    )
    paths = [ROOT / p for p in ("plugin-api/src", "plugins/mens-core/src", "plugins/mens-cpu-ref/src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_plugins_backend_passes_its_own_self_test(library, monkeypatch):
    from mens_cpu_ref import plugin
    from vox_plugin_api.messages import SelfTestParams

    monkeypatch.setattr(plugin, "version", lambda name: "0.1.0")
    backend = plugin.backend()
    assert (backend.info.plugin_id, backend.info.lane) == ("mens-cpu-ref", "cpu")
    result = backend.self_test(SelfTestParams()).result
    assert result.failed == []
    assert result.cases > 30


# --- loading weights -------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_refused_by_name_and_row(ops):
    weight = np.ones((5, 4), np.float32)
    weight[3, 1] = np.nan
    with pytest.raises(BackendError) as caught:
        ops.load_matrix(stored(weight, "layers.0.up"))
    assert caught.value.error.facts == {"tensor": "layers.0.up", "row": 3}
    with pytest.raises(BackendError, match="norm"):
        ops.load_vector(stored(np.array([1, np.inf], np.float32), "norm"))


def test_bytes_that_do_not_make_the_shape_are_refused(ops):
    with pytest.raises(BackendError) as caught:
        ops.load_matrix(stored(np.ones((3, 4), np.float32), shape=(3, 5)))
    assert (caught.value.error.facts["expected_bytes"], caught.value.error.facts["found_bytes"]) == (60, 48)


def test_a_matrix_is_no_vector(ops):
    with pytest.raises(BackendError, match="must be a float vector"):
        ops.load_vector(stored(np.ones((3, 4), np.float32)))


# --- shapes, faults, ranges ------------------------------------------------------------------


def test_faults_name_operator_and_every_row(ops):
    x = put(ops, [[3e38, 1.0], [1.0, 1.0], [-3e38, 0.0]])
    ops.add(x, x, name="layers.3.residual")
    assert ops.take_faults() == [Fault("layers.3.residual", (0, 2))]
    assert ops.take_faults() == []


def test_operands_that_do_not_fit_are_errors_not_reads_past_the_end(ops):
    x = put(ops, [[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="does not fit"):
        ops.linear(x, ops.load_matrix(stored(np.ones((5, 4), np.float32))), name="up")
    with pytest.raises(ValueError, match="not 2 heads"):
        ops.head_norm(x, ops.load_vector(stored(np.ones(2, np.float32))), 2, 1e-6, name="norm")
    with pytest.raises(ValueError, match="differ"):
        ops.silu_gate(x, put(ops, [[1.0, 2.0]]), name="gated")
    with pytest.raises(IndexError, match="embed_tokens"):
        table = ops.load_matrix(stored(np.ones((5, 4), np.float32)))
        ops.embed(table, np.array([5], np.int32), None, name="embed_tokens")


def test_a_step_through_the_lane_equals_the_native_call(ops, library, reference):
    step = Step.of([(3, 20), (130, 1)], 2, 24, np.random.default_rng(0))
    cache = ops.new_kv_cache(layers=2, kv_heads=2, head_dim=24, blocks=len(step.keys))
    layer_keys = cache.keys.reshape(2, *step.keys.shape)[1]
    layer_values = cache.values.reshape(2, *step.values.shape)[1]
    layer_keys[...], layer_values[...] = step.keys, step.values
    batch = Batch(
        token_ids=np.zeros(21, np.int32),
        positions=step.positions,
        starts=step.starts,
        block_tables=step.block_tables,
        logit_rows=np.zeros(0, np.int32),
    )
    q = np.random.default_rng(1).standard_normal((21, 6 * 24)).astype(np.float32)
    ops.kv_append(cache, 1, put(ops, step.k.tolist()), put(ops, step.v.tolist()), batch)
    spec = AttentionSpec(heads=6, kv_heads=2, head_dim=24, scale=0.25, window=100, softcap=None)
    found = ops.to_host(ops.attention(put(ops, q.tolist()), cache, 1, batch, spec, name="attention"))
    assert found.tobytes() == reference.attention(step, q, 100, 0.0, 0.25)[0].tobytes()
    assert ops.take_faults() == []


def test_rotary_blocks_are_made_once_and_only_when_reached(library):
    made = []

    def count(*arguments):
        made.append(arguments[4])
        return library.kernels["rotary"](*arguments)

    table = RotaryTable(count, [(1 << 128) // 7, (1 << 128) // 1000], (3, 2))
    for position in (0, 127, 1000, 5, 130, 1000):
        table.reach(np.array([position], np.int32))
    assert made == [0, 896, 128]


# --- arrays and threads ----------------------------------------------------------------------


def test_zeros_are_aligned_and_take_memory_only_where_they_are_written():
    for count in (0, 1, 17, 4096):
        zeros = untouched_zeros(count, np.float32)
        assert zeros.size == count
        assert zeros.ctypes.data % 64 == 0
        assert not zeros.any()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_reader_that_measures_bandwidth_reads_every_word(library, threads):
    library.set_threads(threads)
    words = np.random.default_rng(5).integers(0, 1 << 63, (5 << 20) // 8, dtype=np.uint64)
    folded = np.zeros(1, np.uint64)
    assert library.kernels["read"](address_of(words), words.nbytes, address_of(folded)) == 0
    assert folded[0] == np.bitwise_xor.reduce(words)
    library.set_threads(1)


def test_weights_lie_behind_one_another_and_large_ones_alone():
    memory = WeightMemory()
    first, second, large = memory.take(100), memory.take(70), memory.take(20 << 20)
    assert address_of(second) - address_of(first) == 128
    assert address_of(first) % 64 == address_of(large) % 4096 == 0
    assert (first.size, second.size, large.size) == (100, 70, 20 << 20)
    filled = [memory.take(15 << 20) for _ in range(5)]
    for i, piece in enumerate(filled):
        assert not piece.any()
        piece[:] = i + 1
    assert [int(piece[0]) for piece in filled] == [int(piece[-1]) for piece in filled] == [1, 2, 3, 4, 5]
    assert not second.any()


def test_a_kv_cache_that_the_system_does_not_reserve_is_refused_with_numbers(library):
    with pytest.raises(BackendError) as caught:
        CpuOps(library.kernels).new_kv_cache(layers=2, kv_heads=1, head_dim=16, blocks=1 << 40)
    assert caught.value.error.code == "insufficient-memory"
    assert caught.value.error.facts == {"needed_bytes": 2 * 128 * 32 * 4 << 40, "blocks": 1 << 40}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_one_position_of_a_kv_cache_takes_a_fraction_of_a_huge_page():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    big = [untouched_zeros(1 << 22, np.float32) for _ in range(16)]
    for zeros in big:
        zeros[1 << 20] = 1.0
    assert resident() - before < 2 << 20


def test_addresses_are_those_of_numpy_read_only_and_empty_arrays_included():
    for array in (np.ones(3), np.frombuffer(b"abcd", np.uint8), np.empty(0)):
        assert address_of(array) == array.ctypes.data


def test_the_address_cache_is_not_fooled_by_a_new_array_or_an_odd_layout():
    cache = AddressCache()
    for _ in range(100):
        array = np.arange(4, dtype=np.int32)
        assert cache(array) == array.ctypes.data
        del array
    backwards = np.arange(4, dtype=np.int64)[::-1]
    assert (ctypes.c_int32 * 4).from_address(cache(backwards))[:] == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("quota", "most"), [("150000 100000", 2), ("max 100000", None), ("50000 100000", 1), ("nonsense", None)]
)
def test_a_cgroups_quota_bounds_the_threads(tmp_path, quota, most):
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_threads(tmp_path) == min(allowed, most or allowed)
