"""The Metal lane on machines that won't do: what it says, with what torch and the system say handed in."""

from __future__ import annotations

import platform
import sys
import types

import pytest

from lanes.tiny_models import QWEN3, write_model
from mens_torch_mps.gpu import FORBIDDEN_VARIABLES, Gpu, Sight, find_gpu, look, refusal
from mens_torch_mps.runtime import WorkingSet
from mens_torch_mps.start import start_on
from metal_shim.stand_in import CpuStandIn
from vox_plugin_api.backend import BackendError

MAC = {"system": "Darwin", "machine": "arm64", "macos": "15.5", "torch": "2.13.0"}
READY = {**MAC, "is_built": True, "is_available": True}


@pytest.mark.parametrize("macos", ["15", "15.0", "15.0.1", "26"])
def test_the_oldest_macos_that_will_do_is_taken_however_it_is_written(macos):
    assert refusal(Sight(**{**READY, "macos": macos}, name="Apple M2")) is None


@pytest.mark.parametrize(
    ("sight", "code", "named"),
    [
        (Sight(**{**READY, "macos": "14"}, name="Apple M1"), "macos-too-old", "macOS 14 "),
        (Sight(**{**READY, "system": "Linux"}, name="Apple M2"), "platform-unsupported", "this is Linux"),
        (Sight(**{**READY, "machine": "x86_64"}, name="Apple M2"), "python-translated", "Rosetta"),
        (Sight(**{**READY, "macos": "14.7.1"}, name="Apple M1"), "macos-too-old", "14.7.1"),
        (Sight(**{**READY, "macos": ""}, name="Apple M1"), "macos-too-old", "of unknown version"),
        (Sight(**{**READY, "macos": "10.16"}, name="Apple M1"), "macos-unknown", "says 10.16"),
        (Sight("Darwin", "arm64", "15.5", problem="No module named 'torch'"), "torch-missing", "No module"),
        (Sight(**MAC), "torch-without-mps", "build without MPS"),
        (Sight(**MAC, is_built=True), "device-missing", "sees no GPU"),
        (Sight(**MAC, is_built=True, problem="no Metal\nmore"), "device-missing", "(no Metal)"),
        (Sight(**READY, name="Apple Paravirtual device"), "device-virtual", "virtual machine's GPU"),
        (Sight(**READY, name="AMD Radeon Pro 5500M"), "device-unsupported", "AMD Radeon"),
    ],
)
def test_each_reason_has_its_code_and_a_remedy(sight, code, named):
    error = refusal(sight).error
    assert error.code == code
    assert named in error.message
    assert error.message.endswith("; the Metal lane was not started")
    assert error.remedy
    assert error.facts["torch"] == sight.torch


@pytest.mark.parametrize("name", ["Apple M1", "Apple M2 Max", "Apple M5 Pro"])
@pytest.mark.parametrize("macos", ["15.0", "15.5", "26.1"])
def test_an_apple_gpu_under_a_new_macos_is_taken(name, macos):
    assert refusal(Sight(**{**READY, "macos": macos}, name=name)) is None


def a_mac(monkeypatch, *, built=True, available=True, name="Apple M2", machine="arm64"):
    """A Mac, and a module in torch's place."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.5", ("", "", ""), machine))
    torch = types.ModuleType("torch")
    torch.__version__ = "2.13.0"
    mps = types.SimpleNamespace(is_built=lambda: built, is_available=lambda: available, get_name=lambda: name)
    torch.backends = types.SimpleNamespace(mps=mps)
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("mac", "code"),
    [
        ({"built": False}, "torch-without-mps"),
        ({"available": False}, "device-missing"),
        ({"name": "Apple Paravirtual device"}, "device-virtual"),
        ({"machine": "x86_64"}, "python-translated"),
    ],
)
def test_what_torch_says_becomes_the_lane_s_error(monkeypatch, mac, code):
    a_mac(monkeypatch, **mac)
    with pytest.raises(BackendError) as caught:
        find_gpu({})
    assert caught.value.error.code == code


def test_a_gpu_that_will_do_is_described(monkeypatch):
    a_mac(monkeypatch)
    assert find_gpu({"PYTORCH_MPS_FAST_MATH": "0"}) == Gpu("Apple M2", "15.5", "2.13.0")


@pytest.mark.parametrize("name", FORBIDDEN_VARIABLES)
def test_a_variable_that_would_change_what_runs_is_refused_with_the_reason(monkeypatch, name):
    a_mac(monkeypatch)
    with pytest.raises(
        BackendError, match=f"{name}=1 has torch .*; the Metal lane was not started"
    ) as caught:
        find_gpu({name: "1"})
    assert caught.value.error.code == "environment-refused"
    assert caught.value.error.remedy == f"Unset {name}."


def test_the_backend_refuses_here_as_a_worker_would_hear_it(monkeypatch):
    from mens_torch_mps.plugin import backend

    monkeypatch.setattr(platform, "system", lambda: "Linux")
    with pytest.raises(BackendError) as caught:
        backend()
    assert caught.value.error.code == "platform-unsupported"
    assert look().system == "Linux"


def test_what_is_not_on_the_gpu_and_says_nothing_is_refused():
    """A stand-in can't leave its label out: memory that is not the GPU's gives it away."""

    class Silent(CpuStandIn):
        execution = ""

    with pytest.raises(BackendError, match="put the lane's memory on 'cpu', not on the GPU") as caught:
        start_on(Silent(), {})
    assert caught.value.error.code == "not-on-gpu"


def test_kernels_that_can_t_be_built_or_are_too_large_are_told():
    class Refusing(CpuStandIn):
        def compile(self, source):
            raise SyntaxError("program_source:3:1: error: unknown type name 'half'")

    class Small(CpuStandIn):
        def compile(self, source):
            kernels = super().compile(source)
            kernels["vox_norm"].max_threads_per_threadgroup = 64
            return kernels

    for runtime, code, named in ((Refusing(), "kernels-not-built", "program_source:3:1"),
                                 (Small(), "kernels-too-large", "vox_norm")):  # fmt: skip
        with pytest.raises(BackendError, match=named) as caught:
            start_on(runtime, {})
        assert caught.value.error.code == code


def test_memory_that_is_not_to_be_had(monkeypatch, started):
    device = started().device

    def full(nbytes):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 9 GB, max allowed: 9 GB)")

    monkeypatch.setattr(device, "_tensor", full)
    monkeypatch.setattr(device._runtime, "working_set", lambda: WorkingSet(limit=10, held=9))
    with pytest.raises(BackendError, match="no room for 77 bytes") as caught:
        device.empty(77)
    assert caught.value.error.facts["limit_bytes"] == 10


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(started, tmp_path, monkeypatch):
    from mens_torch_mps import plugin
    from vox_plugin_api.messages import LoadModelParams

    monkeypatch.setattr(plugin, "version", lambda name: "0.1.0")
    ready = started()
    monkeypatch.setattr(ready.runtime, "working_set", lambda: WorkingSet(limit=1 << 20, held=0))
    backend = plugin.backend_on(ready)
    params = LoadModelParams(model_dir=str(write_model(tmp_path, QWEN3)), model_digest="0" * 64)
    with pytest.raises(BackendError) as caught:
        list(backend.load_model(params))
    assert caught.value.error.code == "insufficient-memory"


def test_the_cache_is_what_the_working_set_has_room_for_beside_the_weights(started, tmp_path, monkeypatch):
    from mens_torch_mps import plugin
    from vox_plugin_api.messages import LoadModelParams

    monkeypatch.setattr(plugin, "version", lambda name: "0.1.0")
    ready = started()
    block_bytes = 2 * 3 * 2 * 16 * 128 * 4
    # Before the weights, by who plans and by who loads, and beside them: a tenth of it is left.
    sizes = iter([1 << 30, 1 << 30, 4 * block_bytes])
    monkeypatch.setattr(ready.runtime, "working_set", lambda: WorkingSet(limit=next(sizes), held=0))
    backend = plugin.backend_on(ready)
    params = LoadModelParams(model_dir=str(write_model(tmp_path, QWEN3)), model_digest="0" * 64)
    *_, reply = backend.load_model(params)
    assert reply.result.context_length == 3 * 128
    assert reply.observation["kv_cache"]["free_bytes"] == 4 * block_bytes
