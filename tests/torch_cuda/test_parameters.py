"""What a launch hands to the driver, read back as the driver reads it."""

from __future__ import annotations

import ctypes

import pytest

torch = pytest.importorskip("torch")

from mens_torch_cuda.parameters import Parameters, Part  # noqa: E402


def read(address: int, count: int, size: int) -> tuple[list[int], bytes]:
    """The buffers' addresses and the constants, through the array of addresses of both."""
    places = (ctypes.c_void_p * (count + 1)).from_address(address)
    pointers = [ctypes.c_uint64.from_address(place).value for place in places[:count]]
    return pointers, ctypes.string_at(places[count], size)


def test_each_launch_has_its_own_buffers_and_constants():
    parameters = Parameters()
    buffers = [torch.zeros(64, dtype=torch.uint8) for _ in range(5)]
    # As many buffers again, fewer, more, and constants of other lengths: nothing of an earlier one is left.
    for some, constants in (
        (buffers[:3], b"abcdefgh"),
        (buffers[2:], b"ijkl"),
        (buffers[:1], b""),
        (buffers, b"m" * 60),
        (buffers[:3], b"nopqrstu"),
    ):
        address = parameters.write(tuple(some), constants)
        assert read(address, len(some), len(constants)) == ([x.data_ptr() for x in some], constants)


def test_a_part_is_where_it_says_and_no_more_than_there_is():
    whole = torch.arange(64, dtype=torch.uint8)
    part = Part(whole, 16, 32)
    assert part.data_ptr() == whole.data_ptr() + 16
    assert part.tensor().tolist() == list(range(16, 48))
    assert part.narrow(0, 4, 2).tolist() == [20, 21]
    Part(whole, 64, 0)
    for first, nbytes in ((-1, 4), (0, 65), (40, 32), (65, 0), (4, -1)):
        with pytest.raises(ValueError, match="of a buffer of 64"):
            Part(whole, first, nbytes)
