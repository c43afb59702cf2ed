"""Grade tokens and logprobs against the recorded ones (pure).

Numerics that promise bits are held to them. Others are graded: the same tokens, or tokens that
part only where the reference itself was nearly undecided, with logprobs no further off than the
tolerance of the model.

**The tolerance** of a tiny model is twice the greatest difference in a logprob that rounding the
output of every operator to bfloat16 makes; it was measured on the reference when the suite was
recorded. So an engine that computes in bfloat16 throughout fits, and a wrong model does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vox_host.conformance.compare import Difference, show_f32
from vox_host.conformance.verdict import CaseResult
from vox_host.counted import counted
from vox_plugin_api.messages import f32_from_bits

__all__ = ["TOLERANCE", "grade_rows"]

TOLERANCE = (
    "for each model twice the greatest change of a logprob that rounding every operator's output "
    "to bfloat16 makes in the reference"
)

Row = Sequence[Any]
"""Token id, its logprob's bits or None, the likeliest tokens with theirs."""


def grade_rows(
    expected: Sequence[Row],
    found: Sequence[Row],
    *,
    group: str,
    case: str,
    tolerance: float | None = None,
    margins: Sequence[str] = (),
) -> CaseResult:
    """Compare an answer token by token.

    Args:
        tolerance: None: every bit counts. Otherwise the greatest difference of a logprob.
        margins: with a tolerance, per token the bits of the reference's lead over its second choice:
            where it is within twice the tolerance another token is no mistake, and what follows it
            can't be compared.
    """
    for position, (wanted, made) in enumerate(zip(expected, found, strict=False)):
        difference = _differs(position, list(wanted), list(made), exact=tolerance is None)
        if difference is None:
            if tolerance is not None and (off := _off_by(wanted, made)) > tolerance:
                return _failed(
                    _logprob(position, wanted, made),
                    group,
                    case,
                    f"; off by {off:.3g}, allowed {tolerance:.3g}",
                )
            continue
        if tolerance is not None and margins and f32_from_bits(margins[position]) <= 2 * tolerance:
            detail = f"token {position} was nearly undecided in the reference (lead {margins[position]})"
            return CaseResult(name=case, grade="within tolerance", detail=detail)
        return _failed(difference, group, case)
    if len(expected) != len(found):
        end = min(len(expected), len(found))
        if tolerance is not None and end < len(margins) and f32_from_bits(margins[end]) <= 2 * tolerance:
            detail = f"it ended elsewhere, where the reference was nearly undecided (lead {margins[end]})"
            return CaseResult(name=case, grade="within tolerance", detail=detail)
        short = Difference(
            operator="token",
            element=end,
            expected=counted(len(expected), "token"),
            found=counted(len(found), "token"),
        )
        return _failed(short, group, case)
    if tolerance is None:
        return CaseResult(name=case, grade="bitwise")
    is_same = all(list(a) == list(b) for a, b in zip(expected, found, strict=True))
    return CaseResult(name=case, grade="bitwise" if is_same else "same tokens")


def _differs(position: int, wanted: Row, made: Row, *, exact: bool) -> Difference | None:
    if wanted[0] != made[0]:
        return Difference(operator="token", element=position, expected=str(wanted[0]), found=str(made[0]))
    if not exact or wanted == made:
        return None
    return _logprob(position, wanted, made)


def _logprob(position: int, wanted: Row, made: Row) -> Difference:
    pairs = [("logprob", wanted[1], made[1])]
    for rank, (a, b) in enumerate(zip(wanted[2], made[2], strict=False)):
        pairs.append((f"rank {rank}", f"token {a[0]}", f"token {b[0]}"))
        pairs.append((f"logprob of rank {rank}", a[1], b[1]))
    name, expected, found = next(
        (pair for pair in pairs if pair[1] != pair[2]), ("likeliest tokens", len(wanted[2]), len(made[2]))
    )
    return Difference(
        operator="logprob", name=name, element=position, expected=_shown(expected), found=_shown(found)
    )


def _off_by(wanted: Row, made: Row) -> float:
    if wanted[1] is None or made[1] is None:
        return 0.0
    return abs(f32_from_bits(wanted[1]) - f32_from_bits(made[1]))


def _shown(value: Any) -> str:
    text = str(value)
    return show_f32(text) if len(text) == 8 and set(text) <= set("0123456789abcdef") else text


def _failed(difference: Difference, group: str, case: str, more: str = "") -> CaseResult:
    placed = Difference(**{**difference.as_dict(), "group": group, "case": case})
    return CaseResult(name=case, grade="failed", detail=f"{placed}{more}", difference=placed)
