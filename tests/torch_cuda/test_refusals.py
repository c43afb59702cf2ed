"""The CUDA lane on machines that won't do: what it says, with torch's own words handed in."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from mens_core.weights_fit import RESERVE_BYTES, check_fit, weight_bytes
from mens_torch_cuda.gpu import Gpu, Sight, find_gpu, look, refusal
from mens_torch_cuda.packed import bytes_more_than_in_file
from mens_torch_cuda.plugin import refuse_options
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import QuantTensor

CUDA = {"torch": "2.11.0+cu130", "cuda_of_torch": "13.0"}
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by "
    "downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver "
    "from http://www.nvidia.com/Download/index.aspx"
)


@pytest.mark.parametrize(
    ("sight", "code", "named"),
    [
        (Sight(problem="No module named 'torch'"), "torch-missing", "No module named 'torch'"),
        (
            Sight(torch="2.13.0+cpu", problem="Torch not compiled with CUDA enabled"),
            "torch-without-cuda",
            "2.13.0+cpu",
        ),
        (Sight(**CUDA, problem=NO_DRIVER), "driver-missing", "no NVIDIA driver"),
        (Sight(**CUDA, problem=TOO_OLD), "driver-too-old", "CUDA 13.0"),
        (Sight(**CUDA, problem="No CUDA GPUs are available"), "device-missing", "no GPU"),
        (Sight(**CUDA, problem="CUDA unknown error - this may be\nmore"), "cuda-failed", "unknown error"),
        (Sight(**CUDA, name="Tesla T4", capability=(7, 5)), "device-too-old", "7.5"),
        (Sight(**CUDA), "cuda-failed", "could not be initialised"),
    ],
)
def test_each_reason_has_its_code_and_a_remedy(sight, code, named):
    error = refusal(sight).error
    assert error.code == code
    assert named in error.message
    assert "the CUDA lane was not started" in error.message
    assert error.remedy
    assert error.facts["torch"] == sight.torch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 1)])
def test_from_ampere_on_nothing_is_refused(capability):
    assert refusal(Sight(**CUDA, name="a GPU", capability=capability, total_bytes=1)) is None


def a_torch(version, cuda, init=None, capability=(9, 0)):
    """A module in torch's place."""

    def raising():
        if init is not None:
            raise init

    properties = types.SimpleNamespace(
        name="a GPU", major=capability[0], minor=capability[1], total_memory=24 << 30
    )
    torch = types.ModuleType("torch")
    torch.__version__ = version
    torch.version = types.SimpleNamespace(cuda=cuda)
    torch.cuda = types.SimpleNamespace(init=raising, get_device_properties=lambda number: properties)
    return torch


@pytest.mark.parametrize(
    ("torch", "code"),
    [
        (None, "torch-missing"),
        (
            a_torch("2.13.0+cpu", None, AssertionError("Torch not compiled with CUDA enabled")),
            "torch-without-cuda",
        ),
        (a_torch("2.11.0+cu130", "13.0", RuntimeError(TOO_OLD)), "driver-too-old"),
        (a_torch("2.11.0+cu130", "13.0", capability=(7, 0)), "device-too-old"),
    ],
)
def test_what_torch_says_becomes_the_lane_s_error(monkeypatch, torch, code):
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(BackendError) as caught:
        find_gpu()
    assert caught.value.error.code == code


def test_a_gpu_that_will_do_is_described(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", a_torch("2.11.0+cu130", "13.0"))
    assert find_gpu() == Gpu("a GPU", (9, 0), 24 << 30, "2.11.0+cu130")
    assert find_gpu().capability_text == "9.0"


def test_the_backend_refuses_here_as_a_worker_would_hear_it(monkeypatch):
    """With torch left out, whatever this machine has: importing and calling the entry point stays quiet."""
    from mens_torch_cuda.plugin import backend

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError) as caught:
        backend()
    assert caught.value.error.code == "torch-missing"
    assert look().torch is None


def test_weights_that_do_not_fit_are_refused_before_one_is_read(tmp_path: Path):
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 700)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 300)
    (tmp_path / "config.json").write_bytes(b"x" * 9000)
    weights = weight_bytes(tmp_path)
    assert weights == 1000
    check_fit(weights, free=RESERVE_BYTES + 1000, total=1 << 40, device="a GPU", remedy="Wait.")
    with pytest.raises(BackendError) as caught:
        check_fit(weights, free=RESERVE_BYTES + 999, total=1 << 40, device="a GPU", remedy="Wait.")
    error = caught.value.error
    assert error.code == "insufficient-memory"
    assert (error.facts["weight_bytes"], error.facts["free_bytes"]) == (1000, RESERVE_BYTES + 999)
    assert "nothing was loaded" in error.message


def test_packed_weights_are_counted_as_they_lie_on_the_gpu():
    tensors = [QuantTensor("q4_0", (2, 64)), QuantTensor("q8_0", (2, 64)), QuantTensor("q4_k", (3, 512))]
    assert bytes_more_than_in_file(tensors) == 4 * (34 - 18) + 6 * (288 - 144)


def test_lane_options_are_refused_by_name():
    refuse_options({})
    with pytest.raises(BackendError, match="'isa'") as caught:
        refuse_options({"isa": "avx2"})
    assert caught.value.error.code == "lane-option"
