"""Which examples are held out, and the order of the others: pure, and a matter of the seed alone.

Sorting by SHA-256 instead of shuffling makes the order one that any program can work out again
(docs/training-data.md), whatever its random generator is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from vox_host.counted import counted
from vox_host.training.data.encoding import Example

__all__ = ["Split", "order", "split"]


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of examples, ascending; every example is in one of the two."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def order(seed: int, epoch: int, count: int) -> list[int]:
    """Return the indices 0 to `count` - 1 in the order of this epoch.

    They are sorted by SHA-256 of "vox-order", seed, epoch and index, each number as 8 bytes, little-endian.
    """
    head = b"vox-order" + _u64(seed) + _u64(epoch)
    return sorted(range(count), key=lambda index: hashlib.sha256(head + _u64(index)).digest())


def split(examples: Sequence[Example], held_out: int | float, seed: int) -> Split:
    """Hold out about `held_out` examples: a number of them, or a share below 1.

    They are chosen by SHA-256 of "vox-split", the seed and the example's tokens and mask, so the choice
    depends on no order and equal examples are never on both sides: a group of equal ones that would
    straddle is trained on.

    Raises:
        ValueError: less than 0, or not less than there are.
    """
    wanted = round(len(examples) * held_out) if isinstance(held_out, float) else held_out
    if held_out < 0 or (examples and wanted >= len(examples)):
        raise ValueError(f"{held_out} held out of {counted(len(examples), 'example')} leaves none to train")
    head = b"vox-split" + _u64(seed)
    keys = [hashlib.sha256(head + example.digest()).digest() for example in examples]
    by_key = sorted(range(len(examples)), key=lambda index: keys[index])
    while 0 < wanted < len(by_key) and keys[by_key[wanted - 1]] == keys[by_key[wanted]]:
        wanted -= 1
    return Split(train=tuple(sorted(by_key[wanted:])), held_out=tuple(sorted(by_key[:wanted])))


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")
