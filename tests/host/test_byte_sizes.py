"""byte_sizes: a size is never shown as nothing, nor in a unit that makes it thousands."""

import pytest

from vox_host.byte_sizes import byte_size


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (13_210, "12.9 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (240 * 2**20, "240.0 MiB"),
        (2**30 - 1, "1.0 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (5 * 2**42, "20.0 TiB"),
    ],
)
def test_the_unit_fits_the_size(count, text):
    assert byte_size(count) == text
