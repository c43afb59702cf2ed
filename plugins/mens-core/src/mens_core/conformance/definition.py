"""What a case asks, as a digest: every call that it makes of a lane, with every byte of its operands.

Two suites may give one name to two cases. Their outputs differ, and no lane is wrong: only cases of
one definition can be compared. The calls are made on a lane that computes nothing, so that no mistake
of the lane under test can change what it was asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.training_ops import AttentionSaved

__all__ = ["SUITE_VERSION", "definition"]

SUITE_VERSION = 5
"""Counts the changes of the cases, so that of two suites the older one can be named. Digests decide."""

_PAIRS = ("silu_gate_backward", "gelu_gate_backward", "cross_entropy")
_PER_EXAMPLE = ("example_products", "embed_backward")
_NUMBERS = {"argmax": np.int32, "token_weights": np.uint64, "log_normaliser": np.float32}
_READ = (512, 32)
"""Shape of what is read back: more rows than any case picks from. All numbers in it differ, so that
what a case picks is part of what it is."""


def definition(case: Callable[[Any], Iterator[npt.NDArray[Any]]]) -> str:
    """Return the SHA-256, in hex, of a case's calls in order and of what it takes from their results."""
    lane = _SilentLane()
    for array in case(lane):
        lane.note("output", array)
    return lane.digest.hexdigest()


class _Made:
    """What a call made; known by its number alone."""

    def __init__(self, number: int) -> None:
        self.number = number


class _SilentLane:
    """Takes every call of `Ops` and `TrainingOps`, writes it down, and computes nothing."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._made = 0

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if operator.startswith("_"):
            raise AttributeError(operator)

        def call(*operands: Any, **named: Any) -> Any:
            self.note(operator, list(operands), sorted(named.items()))
            return self._result(operator, operands, named)

        return call

    def note(self, *words: Any) -> None:
        """Take words into the digest."""
        for word in words:
            self._take(word)

    def _result(self, operator: str, operands: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if operator == "to_host":
            return np.arange(_READ[0] * _READ[1], dtype=np.float32).reshape(_READ)
        if operator in _NUMBERS:
            return np.arange(_READ[0], dtype=_NUMBERS[operator])
        if operator == "sum_of_squares":
            return np.float32(0)
        if operator == "take_faults":
            return []
        if operator == "linear_many":
            return [self._new() for _ in operands[1]]
        if operator in _PER_EXAMPLE:
            starts = named["starts"] if "starts" in named else operands[2]
            return [self._new() for _ in starts[1:]]
        if operator in _PAIRS:
            return self._new(), self._new()
        if operator == "attention_saving":
            return AttentionSaved(self._new(), self._new(), self._new())
        if operator == "attention_backward":
            return self._new(), self._new(), self._new()
        return self._new()

    def _new(self) -> _Made:
        self._made += 1
        return _Made(self._made)

    def _take(self, word: Any) -> None:
        """Take one operand: its kind, its size and its bytes, so that no two are written alike."""
        if isinstance(word, np.ndarray | np.generic):
            array = np.asarray(word, dtype=word.dtype.newbyteorder("<"))
            self._write(f"array {array.dtype.str} {array.shape}", array.tobytes())
        elif isinstance(word, memoryview | bytes | bytearray):
            self._write("bytes", bytes(word))
        elif isinstance(word, _Made):
            self._write("made", str(word.number).encode())
        elif dataclasses.is_dataclass(word) and not isinstance(word, type):
            self._write(type(word).__name__, b"")
            for field in dataclasses.fields(word):
                # What a lane calls back is no operand.
                if not callable(value := getattr(word, field.name)):
                    self.note(field.name, value)
        elif isinstance(word, list | tuple):
            self._write("list", str(len(word)).encode())
            self.note(*word)
        elif isinstance(word, float):
            self._write("float", struct.pack("<d", word))
        elif isinstance(word, str | int | None):
            self._write(type(word).__name__, str(word).encode())
        else:
            raise TypeError(f"a case has an operand of a kind that has no bytes: {type(word).__name__}")

    def _write(self, kind: str, data: bytes) -> None:
        self.digest.update(f"{kind} {len(data)}\n".encode())
        self.digest.update(data)
