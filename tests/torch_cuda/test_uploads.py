"""Weights on their way through pinned memory, with a device whose copies take place as late as they may."""

from __future__ import annotations

import numpy as np
import pytest

from mens_torch_cuda.uploads import Uploads

PIECE, SLOTS = 64, 3


class LateCarrier:
    """Copies when it is waited for, or at the very end: what overwrites a piece too early is then seen."""

    def __init__(self) -> None:
        self.queued: list[tuple[np.ndarray, bytearray, int]] = []
        self.sent = 0
        self.released = False

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, 0xEE, np.uint8)

    def send(self, source, target, first):
        entry = (source, target, first)
        self.queued.append(entry)
        self.sent += 1

        def wait() -> None:
            # A queue: what was sent before has ended, too.
            while any(one is entry for one in self.queued):
                self._copy(*self.queued.pop(0))

        return wait

    def finish(self) -> None:
        while self.queued:
            self._copy(*self.queued.pop(0))

    def release(self) -> None:
        assert not self.queued, "pinned memory was given back before the copies from it ended"
        self.released = True

    @staticmethod
    def _copy(source, target, first) -> None:
        target[first : first + len(source)] = source.tobytes()


@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, SLOTS * PIECE, 20 * PIECE + 5])
def test_every_byte_arrives_though_copies_are_late(nbytes):
    carrier = LateCarrier()
    uploads = Uploads(carrier, slots=SLOTS, piece=PIECE)
    rng = np.random.default_rng(nbytes)
    sources = [rng.integers(0, 256, nbytes, dtype=np.uint8) for _ in range(3)]
    targets = [bytearray(nbytes) for _ in sources]
    for source, target in zip(sources, targets, strict=True):
        changed = source.copy()
        uploads.copy(changed, target)
        changed[:] = 0  # unmapped, as soon as the call has returned
    assert carrier.sent == 3 * -(-nbytes // PIECE)
    carrier.finish()
    assert [bytes(target) for target in targets] == [source.tobytes() for source in sources]
    uploads.close()
    assert carrier.released


def test_nothing_is_given_back_before_the_last_copy_has_ended():
    carrier = LateCarrier()
    uploads = Uploads(carrier, slots=SLOTS, piece=PIECE)
    target = bytearray(5 * PIECE)
    uploads.copy(np.arange(5 * PIECE, dtype=np.uint8), target)
    assert carrier.queued, "a device that copies at once shows nothing"
    uploads.close()
    assert carrier.released and bytes(target) == bytes(np.arange(5 * PIECE, dtype=np.uint8))
