"""What the device does where memory runs out, with a driver that is not there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from mens_core.grid_device import Launch  # noqa: E402
from vox_plugin_api.backend import BackendError  # noqa: E402


@pytest.fixture
def device(monkeypatch):
    """A `CudaDevice` whose torch has one GPU of 100 bytes, none free, and whose driver has no function."""
    driver = ModuleType("cuda.bindings.driver")
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver
    for name, module in (
        ("cuda", ModuleType("cuda")),
        ("cuda.bindings", bindings),
        ("cuda.bindings.driver", driver),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mens_torch_cuda.device", raising=False)
    from mens_torch_cuda.device import CudaDevice
    from mens_torch_cuda.parameters import Parameters

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 60)
    made = CudaDevice.__new__(CudaDevice)
    made._is_capturing = False
    made._graphs = None
    made._parameters = Parameters()
    yield made
    sys.modules.pop("mens_torch_cuda.device", None)


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_no_room_is_a_typed_error_with_what_was_asked_and_what_is_free(device, monkeypatch):
    monkeypatch.setattr(torch, "empty", out_of_memory)
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    with pytest.raises(BackendError, match="no room for 4096 bytes") as caught:
        device.empty(4096)
    error = caught.value.error
    assert error.code == "out-of-device-memory"
    assert error.facts == {
        "needed_bytes": 4096, "free_bytes": 0, "total_bytes": 100, "held_by_this_worker_bytes": 60,
    }  # fmt: skip
    assert emptied, "what torch keeps for later was not given back before"


def test_what_torch_keeps_for_later_is_given_back_before_a_request_fails(device, monkeypatch):
    tries = []

    def second_time(*args, **kwargs):
        tries.append(args)
        if len(tries) == 1:
            out_of_memory()
        return SimpleNamespace(nbytes=8)

    monkeypatch.setattr(torch, "empty", second_time)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert device.empty(8).nbytes == 8
    assert len(tries) == 2


@pytest.mark.parametrize(
    ("kernel", "rows", "is_early"),
    [
        ("vox_step_normed_q8_0_16", 1, True),
        ("vox_step_attend_1_1", 1, True),
        ("vox_step_attend_few_4", 32, False),
        ("vox_step_tiles_q8_0_Wide", 1, False),
        ("vox_norm_staged", 1, False),  # it does not wait itself for what it reads
    ],
)
def test_only_kernels_of_one_row_that_wait_themselves_start_early(device, kernel, rows, is_early):
    launched = []

    class Driver:
        def cuLaunchKernel(self, *arguments):
            launched.append(False)
            return (0,)

        def cuLaunchKernelEx(self, *arguments):
            launched.append(True)
            return (0,)

    module = sys.modules["mens_torch_cuda.device"]
    device._starts_early, device._functions = True, {kernel: 1}
    device._stream = lambda: 0
    module.driver, module._early = Driver(), lambda *given: None
    device.launch(Launch(kernel, (), b"", (128, rows)))
    assert launched == [is_early]


def test_a_capture_in_pieces_is_graphs_of_so_many_launches_with_one_pool_of_memory(device, monkeypatch):
    module, said = sys.modules["mens_torch_cuda.device"], []

    class Graph:
        def capture_begin(self, *, pool, capture_error_mode):
            said.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            said.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool", raising=False)
    for piece, launches, pieces in ((0, 7, 1), (3, 7, 3), (3, 6, 2), (3, 1, 1)):
        said.clear()
        graphs = module._Graphs(piece)
        graphs.begin()
        for _ in range(launches):
            graphs.count()
            said.append("launch")
        graphs.end()
        assert len(graphs.made) == pieces
        size = piece or launches
        expected = []
        for first in range(0, launches, size):
            expected += [("begin", "pool", "thread_local"), *["launch"] * min(size, launches - first), "end"]
        assert said == expected


def test_a_part_of_a_part_is_read_and_looked_at_where_it_lies(device):
    whole = torch.zeros(64, dtype=torch.uint8)
    whole[40] = 7
    part = device.part(device.part(whole, 32, 32), 8, 16)
    assert device.get(part, "int32", (4,)).tolist() == [7, 0, 0, 0]
    # As many int32 as are in use, of each buffer.
    assert not device.are_zero([(torch.zeros(8, dtype=torch.uint8), 2), (whole, 11)])
    assert device.are_zero([(whole, 10), (torch.zeros(8, dtype=torch.uint8), 2)])
    assert device.are_zero([])
