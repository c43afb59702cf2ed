"""How GGML stores a tensor's values: the types that are imported, and the names of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["GGML_TYPES", "OTHER_GGML_TYPES", "GgmlType"]


@dataclass(frozen=True, slots=True)
class GgmlType:
    """How a tensor's values are stored: `block_bytes` bytes for every `block` values."""

    name: str
    block: int
    block_bytes: int


GGML_TYPES: Mapping[int, GgmlType] = MappingProxyType(
    {
        0: GgmlType("f32", 1, 4),
        1: GgmlType("f16", 1, 2),
        30: GgmlType("bf16", 1, 2),
        2: GgmlType("q4_0", 32, 18),
        6: GgmlType("q5_0", 32, 22),
        8: GgmlType("q8_0", 32, 34),
        12: GgmlType("q4_k", 256, 144),
        13: GgmlType("q5_k", 256, 176),
        14: GgmlType("q6_k", 256, 210),
    }
)
"""The types this host imports, by their number in the file."""

OTHER_GGML_TYPES: Mapping[int, str] = MappingProxyType(
    {
        3: "q4_1", 7: "q5_1", 9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs",
        18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16",
        26: "i32", 27: "i64", 28: "f64", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4",
    }
)  # fmt: skip
"""Types that exist and aren't imported; known by name so that the refusal can say which it is."""
