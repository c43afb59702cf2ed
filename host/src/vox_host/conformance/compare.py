"""Find the first element in which two results differ, and show both bit patterns (pure)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ELEMENT_BYTES", "Difference", "first_difference", "show_f32"]

ELEMENT_BYTES = {"f32": 4, "i32": 4, "u64": 8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where a result stops being the expected one."""

    group: str = ""
    case: str = ""
    operator: str
    """Of the contract: "linear"; or what else differs: "token", "logprob"."""
    name: str = ""
    """What was being made: "layers.0.self_attn.q_proj"."""
    element: int | None = None
    """Flat index, row-major; a position for tokens; None where only a digest is known."""
    index: tuple[int, ...] | None = None
    expected: str
    """Bits in hex; or a token's id, a shape, a name."""
    found: str
    differing: int | None = None
    """How many elements differ, where all are known."""
    elements: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        place = f" ({self.name})" if self.name and self.name != self.operator else ""
        where = "" if self.element is None else f", element {self.element}"
        if self.index is not None and len(self.index) > 1:
            where += f" {list(self.index)}"
        count = "" if self.differing is None else f"; {self.differing} of {self.elements} elements differ"
        return f"{self.operator}{place}{where}: expected {self.expected}, found {self.found}{count}"


def first_difference(
    expected: bytes, found: bytes, *, dtype: str, shape: Sequence[int], operator: str, name: str = ""
) -> Difference | None:
    """Compare little-endian elements; None: every byte is the same.

    Args:
        shape: of the expected array; lengths that differ are themselves the difference.
    """
    if expected == found:
        return None
    size = ELEMENT_BYTES[dtype]
    if len(expected) != len(found):
        return Difference(
            operator=operator,
            name=name,
            expected=f"{len(expected) // size} elements",
            found=f"{len(found) / size:g} elements",
        )
    count = len(expected) // size
    differing = [
        i for i in range(count) if expected[i * size : (i + 1) * size] != found[i * size : (i + 1) * size]
    ]
    first = differing[0]
    at = slice(first * size, (first + 1) * size)
    return Difference(
        operator=operator,
        name=name,
        element=first,
        index=_unravel(first, shape),
        # Little-endian on the wire; read as a number, highest digit first.
        expected=expected[at][::-1].hex(),
        found=found[at][::-1].hex(),
        differing=len(differing),
        elements=count,
    )


def show_f32(bits: str) -> str:
    """Return 8 hex digits with the number they stand for."""
    return f"{bits} ({struct.unpack('>f', bytes.fromhex(bits))[0]:.9g})"


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(shape):
        flat, within = divmod(flat, extent)
        index.append(within)
    return tuple(reversed(index))
