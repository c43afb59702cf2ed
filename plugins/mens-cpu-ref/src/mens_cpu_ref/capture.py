"""Captures what a model asks of the native library, so that `vox_recompute` repeats it on another machine.

A capture is a script of operator calls beside the bytes they start from: weights as they lie in the file,
token ids, tables. What one operator makes and a later one reads is not stored: it has a number, and a digest
to compare with. So a recompute computes the whole model anew and names the first operator whose bytes differ.

The script, one call a line: its name, then `i` integer, `f` float bits, `<` a value read, `>` a value written
(number, bytes, digest), `=` one read and written (before, after, bytes, digest), `m` a weight, `q` quantised
activations, whose layout is the library's own business.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mens_core.ops import Ints
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import Function

__all__ = ["Capture", "CapturingOps", "digest"]

_OUT_OF_RANGE = -2
_ELEMENT_BYTES = (4, 2, 2)
_BLOCK_BYTES = ((32, 34), (32, 22), (32, 18), (256, 144), (256, 176), (256, 210))

# What is at each address among an operator's arguments: its length in bytes from the other arguments.
_Length = Any
_READS: Mapping[str, Mapping[int, _Length]] = {
    "widen": {1: lambda a: a[2] * _ELEMENT_BYTES[a[0]]},
    "embed": {4: lambda a: 4 * a[5]},
    "linear": {4: lambda a: 4 * a[5] * a[3]},
    "norm": {0: lambda a: 4 * a[2] * a[3] * a[4], 1: lambda a: 4 * a[4]},
    "rotary": {0: lambda a: 16 * a[1]},
    "rope": {
        0: lambda a: 8 * a[1] * a[2] * a[3],
        4: lambda a: 1024 * a[3] * (1 + int(max(_read(a[5], 4 * a[6]).view(np.int32)))),
        5: lambda a: 4 * a[6],
        7: lambda a: 4 * a[1],
    },
    "kv_append": {
        0: lambda a: 4 * a[2] * a[3] * a[4],
        1: lambda a: 4 * a[2] * a[3] * a[4],
        5: lambda a: 4 * a[2],
        6: lambda a: 4 * (a[8] + 1),
        7: lambda a: 4 * a[8] * a[9],
    },
    "attention": {
        0: lambda a: 4 * a[1] * a[2] * a[4],
        5: lambda a: 4 * a[1],
        6: lambda a: 4 * (a[8] + 1),
        7: lambda a: 4 * a[8] * a[9],
        11: lambda a: 512 * a[10] * a[3] * a[4],
        12: lambda a: 512 * a[10] * a[3] * _stride(a[4]),
    },
    "add": {0: lambda a: 4 * a[2] * a[3], 1: lambda a: 4 * a[2] * a[3]},
    "silu_gate": {0: lambda a: 4 * a[2] * a[3], 1: lambda a: 4 * a[2] * a[3]},
    "gelu_gate": {0: lambda a: 4 * a[2] * a[3], 1: lambda a: 4 * a[2] * a[3]},
    "softcap": {0: lambda a: 4 * a[1] * a[2]},
    "penalise": {2: lambda a: 4 * a[3], 4: lambda a: 4 * a[3], 5: lambda a: 4 * a[3]},
    "argmax": {0: lambda a: 4 * a[1] * a[2]},
    "token_weights": {0: lambda a: 4 * a[1]},
    "log_normaliser": {0: lambda a: 4 * a[1] * a[2]},
    "quant_activations": {1: lambda a: 4 * a[2] * a[3]},
    "quant_linear": {},
    "quant_rows": {4: lambda a: 4 * a[5]},
}
_WRITES: Mapping[str, Mapping[int, _Length]] = {
    "widen": {4: lambda a: 4 * a[2]},
    "embed": {7: lambda a: 4 * a[5] * a[3]},
    "linear": {6: lambda a: 4 * a[5] * a[2]},
    "norm": {6: lambda a: 4 * a[2] * a[3] * a[4]},
    "rotary": {6: lambda a: 8 * a[5] * a[1]},
    "rope": {8: lambda a: 8 * a[1] * a[2] * a[3]},
    "attention": {16: lambda a: 4 * a[1] * a[2] * a[4]},
    "add": {4: lambda a: 4 * a[2] * a[3]},
    "silu_gate": {4: lambda a: 4 * a[2] * a[3]},
    "gelu_gate": {4: lambda a: 4 * a[2] * a[3]},
    "softcap": {4: lambda a: 4 * a[1] * a[2]},
    "argmax": {3: lambda a: 4 * a[1]},
    "token_weights": {3: lambda a: 8 * a[1]},
    "log_normaliser": {3: lambda a: 4 * a[1]},
    "quant_linear": {6: lambda a: 4 * a[5] * a[2]},
    "quant_rows": {7: lambda a: 4 * a[5] * a[3]},
}
_CHANGES: Mapping[str, Mapping[int, _Length]] = {
    "kv_append": {
        11: lambda a: 512 * a[10] * a[3] * a[4],
        12: lambda a: 512 * a[10] * a[3] * _stride(a[4]),
    },
    "penalise": {0: lambda a: 4 * a[1]},
}
_WEIGHTS: Mapping[str, int] = {"embed": 1, "linear": 1, "quant_linear": 1, "quant_rows": 1}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows that were packed in one call, and where their bytes lie in the data."""

    is_quantised: bool
    kind: int
    rows: int
    columns: int
    offset: int
    size: int


class Capture:
    """A script in the making; `functions` are the native ones, watched."""

    def __init__(self, functions: Mapping[str, Function], folder: Path) -> None:
        self._native = functions
        self._lines: list[str] = []
        self._data = (folder / "data").open("wb")
        self._script = folder / "script"
        self._values: dict[bytes, int] = {}
        self._numbers = 0
        self._pieces: dict[int, _Piece] = {}
        self._weights: dict[int, tuple[int, str]] = {}
        self._activations: dict[int, int] = {}
        # Without these, the lane calls operators one by one, computes every output, and packs as is noted.
        shortcuts = {"replay", "quant_choose", "quant_choose_bytes", "quant_greatest"}
        shortcuts |= {"compact_measure", "compact_bytes", "compact_pack"}
        self.functions = {name: self._watched(name) for name in functions if name not in shortcuts}

    def close(self) -> None:
        """Write the script; the capture can be recomputed now."""
        self._data.close()
        lines = [f"weight m{number} {place}" for number, place in self._weights.values()]
        self._script.write_text("\n".join(["vox-capture 1", *lines, *self._lines, ""]), encoding="ascii")

    def show(self, label: str, values: np.ndarray[Any, Any]) -> None:
        """Have the recompute print a value's digest under a label without spaces."""
        self._lines.append(f"show {label} {self._value(np.ascontiguousarray(values).tobytes())}")

    def take_rows(self, x: np.ndarray[Any, Any], rows: Ints, taken: np.ndarray[Any, Any]) -> None:
        """Note a copy of rows, which is made in Python."""
        source = self._value(x.tobytes())
        index = self._value(np.ascontiguousarray(rows, np.int32).tobytes())
        width = x.shape[1]
        made = self._made(taken.tobytes())
        self._lines.append(f"take_rows <{source} <{index} i{len(rows)} i{width} {made}")

    def _watched(self, name: str) -> Function:
        native = self._native[name]
        if name in ("pack", "quant_pack"):
            return lambda *arguments: self._pack(name, native, arguments)
        if name not in _READS:
            return native
        return lambda *arguments: self._call(name, native, arguments)

    def _call(self, name: str, native: Function, arguments: tuple[Any, ...]) -> int:
        try:
            reads = {
                at: self._value(_bytes(arguments[at], size(arguments))) for at, size in _READS[name].items()
            }
            changes = {
                at: (self._value(_bytes(arguments[at], size(arguments))), size(arguments))
                for at, size in _CHANGES.get(name, {}).items()
            }
        except ValueError:  # a table that is not there yet
            return native(*arguments)
        code = native(*arguments)
        if code == _OUT_OF_RANGE:
            return code
        words = [name]
        for at, value in enumerate(arguments):
            if at in reads:
                words.append(f"<{reads[at]}")
            elif at in changes:
                before, size = changes[at]
                words.append(f"={before}:{self._made(_bytes(value, size))[1:]}")
            elif at in _WRITES.get(name, {}):
                words.append(self._made(_bytes(value, _WRITES[name][at](arguments))))
            elif _WEIGHTS.get(name) == at:
                words.append(f"m{self._weight(value, arguments[at + 1])}")
            elif name == "quant_activations" and at == 4:
                self._numbers += 1
                self._activations[value] = self._numbers
                words.append(f"q{self._numbers}")
            elif name == "quant_linear" and at == 4:
                words.append(f"q{self._activations[value]}")
            elif isinstance(value, float):
                words.append(f"f{struct.unpack('<I', struct.pack('<f', value))[0]:08x}")
            else:
                words.append(f"i{value}")
        self._lines.append(" ".join(words))
        return code

    def _pack(self, name: str, native: Function, arguments: tuple[Any, ...]) -> int:
        """Note what was packed to where; a large weight is packed piece after piece."""
        kind, source, rows, columns, packed = arguments
        if name == "pack":
            data = _bytes(source, rows * columns * _ELEMENT_BYTES[kind])
            self._data.write(bytes(-self._data.tell() % 64))
        else:
            block, nbytes = _BLOCK_BYTES[kind]
            data = _bytes(source, rows * columns // block * nbytes)
        code = native(*arguments)
        self._pieces[packed] = _Piece(name == "quant_pack", kind, rows, columns, self._data.tell(), len(data))
        self._data.write(data)
        return code

    def _weight(self, address: int, rows: int) -> int:
        """The number of the weight at `address`: as many pieces behind one another as make up its rows."""
        if address not in self._weights:
            first = piece = self._pieces[address]
            found, size, at = piece.rows, piece.size, address
            while found < rows:
                at += self._native["quant_packed_bytes"](piece.kind, piece.rows, piece.columns)
                piece = self._pieces[at]
                assert piece.offset == first.offset + size, "pieces of a weight lie apart in the data"
                found, size = found + piece.rows, size + piece.size
            self._numbers += 1
            self._weights[address] = (
                self._numbers,
                f"{'quantised' if first.is_quantised else 'float'} {first.kind} {rows} {first.columns} "
                f"{first.offset} {size}",
            )
        return self._weights[address][0]

    def _value(self, content: bytes) -> int:
        """The number of a value: the one that made it, or of new data."""
        key = hashlib.sha256(content).digest()
        if key not in self._values:
            self._numbers += 1
            self._values[key] = self._numbers
            # In multiples of 64 bytes, as an allocation would lie.
            self._data.write(bytes(-self._data.tell() % 64))
            self._lines.append(f"data {self._numbers} {self._data.tell()} {len(content)}")
            self._data.write(content)
        return self._values[key]

    def _made(self, content: bytes) -> str:
        self._numbers += 1
        self._values[hashlib.sha256(content).digest()] = self._numbers
        return f">{self._numbers}:{len(content)}:{digest(content)}"


class CapturingOps(CpuOps):
    """The CPU lane, captured."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture.functions)
        self._capture = capture

    def take_rows(self, x: Rows, rows: Ints) -> Rows:
        """x[rows], copied."""
        taken = super().take_rows(x, rows)
        self._capture.take_rows(x.values, rows, taken.values)
        return taken


def digest(content: bytes) -> str:
    """Four interleaved polynomials of the 64-bit words, as `vox_recompute` computes them; not for secrets."""
    padded = content + bytes(-len(content) % 32)
    words = np.frombuffer(padded, "<u8").reshape(-1, 4)
    prime = np.uint64(0x100000001B3)
    sums = np.full(4, 0xCBF29CE484222325, np.uint64)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), 4096):
            part = words[start : start + 4096]
            powers = _powers(len(part))
            sums = sums * powers[0] * prime + (part * powers[:, None]).sum(axis=0, dtype=np.uint64)
        total = np.uint64(len(content))
        for value in sums:
            total = total * prime + value
    return f"{int(total):016x}"


def _powers(count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    prime = 0x100000001B3
    powers = [1]
    for _ in range(count - 1):
        powers.append(powers[-1] * prime % (1 << 64))
    return np.array(powers[::-1], np.uint64)


def _bytes(address: int, size: int) -> bytes:
    if not address:
        raise ValueError("no array here yet")
    return ctypes.string_at(address, size)


def _read(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(_bytes(address, size), np.uint8)


def _stride(head_dim: int) -> int:
    return -(-head_dim // 16) * 16
