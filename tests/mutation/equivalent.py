"""Mutants that no vector can catch: they change no result, or something that no vector reads.

Keys are `Mutant.key`. A mutant is listed only after its reason was looked for and found.
"""

# ruff: noqa: E501  (a key is one line of source beside another)
from __future__ import annotations

__all__ = ["EQUIVALENT", "SEEN_BY_TESTS"]

EQUIVALENT: dict[str, str] = {
    "attention.h: sign of zero: l[i] = 0.0f; -> l[i] = -0.0f;": (
        "weights are not negative: the first addition gives the same sum from either zero"
    ),
    "c128.h: sign of zero: float total = 0.0f; -> float total = -0.0f;": (
        "overwritten by the first chunk before it is read"
    ),
    "c128.h: comparison: if (whole >= 4) { -> if (whole > 4) {": (
        "four chunks two by two: the same chains, folded in the same order"
    ),
    "c128.h: off by one: chains<Step, 4>(x + done, kChunk, kChunk, sums); -> chains<Step, 5>(x + done, kChunk, kChunk, sums);": (
        "a fifth chain is computed and not folded"
    ),
    "c128.h: statement dropped: side = 2; -> ;": (
        "the second of two chains is computed again by the next round"
    ),
    "elementwise.h: comparison: for (; i + kLanes <= last; i += kLanes) { -> for (; i + kLanes < last; i += kLanes) {": (
        "the last whole vector goes the way of the tail: the same operations, one by one"
    ),
    "rotate.h: comparison: for (; i + kLanes <= pairs; i += kLanes) { -> for (; i + kLanes < pairs; i += kLanes) {": (
        "the last whole vector goes the way of the tail"
    ),
    "matmul_float.h: comparison: if (!finite && (fault == 0 || 1 + r < fault)) fault = 1 + r; -> if (!finite && (fault == 0 || 1 + r <= fault)) fault = 1 + r;": (
        "assigns the number that is there"
    ),
    "norm.h: comparison: if (last - first == 8) { -> if (last - first != 8) {": (
        "eight chains side by side or one by one are the same chains; sums of rows that are not there are not read"
    ),
    "rotary.h: off by one: if (excess % 64 != 0 && excess / 64 < 3) kept |= limbs[excess / 64 + 1] << (64 - excess % 64); -> if (excess % 64 != 0 && excess / 65 < 3) kept |= limbs[excess / 64 + 1] << (64 - excess % 64);": (
        "cosines and sines are below 2^3, so excess is below 192 and either quotient below 3"
    ),
    "rotary.h: statement dropped: kept &= 0xFFFFFF; -> ;": (
        "excess is the length less 24, so no bit above the 24 is set"
    ),
    "simd.h: last bit of a constant: CANON bool is_finite(float a) { return (f_bits(a) & 0x7FFFFFFF) < 0x7F800000; } -> CANON bool is_finite(float a) { return (f_bits(a) & 0x7FFFFFFE) < 0x7F800000; }": (
        "no pattern changes sides: 7F800001 less its last bit is 7F800000"
    ),
    "canon.h: comparison: CANON float f_pick_lt(float a, float b, float yes, float no) { return a < b ? yes : no; } -> CANON float f_pick_lt(float a, float b, float yes, float no) { return a <= b ? yes : no; }": (
        "at tanh's threshold both formulas give the same bits (a vector holds it); of two equal numbers either is the greater"
    ),
    "sampling.py: comparison: if min_p > 0: -> if min_p >= 0:": (
        "a bound of zero keeps every token that has a weight at all"
    ),
    "norm.h: last bit of a constant: for (int64_t i = 0; i < norm.width; ++i) norm.out[r * norm.width + i] = f_from(0x7FC00000); -> for (int64_t i = 0; i < norm.width; ++i) norm.out[r * norm.width + i] = f_from(0x7FC00001);": (
        "another NaN: numerics asks for NaN, and its bits are no part of the claim"
    ),
    "rotary.h: sign of zero: if (exponent < 0) return 0.0f;  // far below 2^-126; excess is positive from here on -> if (exponent < 0) return -0.0f;  // far below 2^-126; excess is positive from here on": (
        "no angle of 128 bits has a sine so near to zero but zero itself, which returns earlier"
    ),
    "tile.h: off by one: case 3: VOX_TILE(3, P); break;        \\ -> case 3: VOX_TILE(4, P); break;        \\": (
        "a fourth row is computed into scratch that nobody reads"
    ),
    "attention_backward.h: off by one: int32_t lowest = kBlock, highest = 0; -> int32_t lowest = kBlock, highest = 1;": (
        "a row that sees something of a block ends at 1 or later; without one the panels are those of no row"
    ),
    "elementwise.h: off by one: if (!is_finite(task.out[i])) return 1 + i / task.width; -> if (!is_finite(task.out[i])) return 2 + i / task.width;": (
        "the lane asks only whether it is 0, and reads all rows again to name those that are not finite"
    ),
    "gates_backward.h: off by one: if (!is_finite(gates.dgate[i]) || !is_finite(gates.dup[i])) return 1 + i / gates.width; -> if (!is_finite(gates.dgate[i]) || !is_finite(gates.dup[i])) return 2 + i / gates.width;": (
        "the lane asks only whether it is 0, and reads all rows again to name those that are not finite"
    ),
    "gates_backward.h: comparison: if (const int64_t left = last - i; left > 0) { -> if (const int64_t left = last - i; left >= 0) {": (
        "with nothing left, nothing is loaded or stored, and what is looked at is zero"
    ),
    "norm_backward.h: last bit of a constant: for (int64_t i = 0; i < width; ++i) dx[i] = f_from(0x7FC00000); -> for (int64_t i = 0; i < width; ++i) dx[i] = f_from(0x7FC00001);": (
        "another NaN: numerics asks for NaN, and its bits are no part of the claim"
    ),
    "products.h: branches swapped: tile_rows(tall_count - r < kTileRows ? tall_count - r : kTileRows, (columns + kLanes - 1) / kLanes, -> tile_rows(tall_count - r < kTileRows ? kTileRows : tall_count - r, (columns + kLanes - 1) / kLanes,": (
        "more rows than six are taken as six; where fewer are left, the others lie in scratch that nobody reads"
    ),
}

SEEN_BY_TESTS: dict[str, str] = {
    "quant_pack.cpp: and, or: if (fault == 0 || first + row + 1 < fault) fault = first + row + 1; -> if (fault == 0 && first + row + 1 < fault) fault = first + row + 1;": (
        "tests/conformance/test_quant_linear.py::test_a_scale_that_is_not_finite_is_refused_by_row"
    ),
    "rotary.py: off by one: multiplier = 1 << FACTOR_BITS if factor is None else (factor[0] << FACTOR_BITS) // factor[1] -> multiplier = 1 << FACTOR_BITS if factor is None else (factor[0] << FACTOR_BITS) // factor[2]": (
        "tests/core/test_double_rounding.py::test_the_planted_lane_is_right_but_for_its_fma"
    ),
    "rotary.py: comparison: kept += rest > half or (rest == half and kept & 1) -> kept += rest >= half or (rest == half and kept & 1)": (
        "tests/core/test_double_rounding.py::test_the_planted_lane_is_right_but_for_its_fma"
    ),
    "rotary.py: and, or: kept += rest > half or (rest == half and kept & 1) -> kept += rest > half or (rest == half or kept & 1)": (
        "tests/core/test_double_rounding.py::test_the_planted_lane_is_right_but_for_its_fma"
    ),
    "readout.py: arithmetic swapped: faults += found -> faults -= found": (
        "tests/core/test_engine.py::test_a_penalty_that_overflows_fails_only_its_own_sequence"
    ),
}
"""Of a file that the judge's lane does not run (`rotary.py`), or of an error that no vector makes: the test
that fails. Each was seen to fail."""
