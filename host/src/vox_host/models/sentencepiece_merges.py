"""Make the list of merges that a SentencePiece vocabulary implies. Pure.

Such a vocabulary has pieces with scores and no list of merges. Any two neighbouring pieces
whose concatenation is a piece may merge, the highest score first. Gemma's own tokenizer.json
lists all 514,906 of these pairs; more than half can never fire, and are left out here
(`_last_merge` says why this changes nothing). Loading takes a third of the memory for it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Priority", "sentencepiece_merges"]

Priority = tuple[float, int]
"""Of a piece: minus its score, and its id where scores are equal. The lowest merges first."""


def sentencepiece_merges(priorities: Mapping[str, Priority]) -> list[str]:
    """Return "left right" for every merge that can fire, the first to be tried first.

    Args:
        priorities: of every piece that takes part in merging.
    """
    merges: list[tuple[float, int, int, int, str]] = []
    for piece, (cost, i) in priorities.items():
        pair = _last_merge(piece, priorities)
        if pair is not None:
            left, right = pair
            merges.append((cost, -len(left), -len(right), i, f"{left} {right}"))
    merges.sort()
    return [text for *_, text in merges]


def _last_merge(piece: str, priorities: Mapping[str, Priority]) -> tuple[str, str] | None:
    """Return the one pair of pieces from which merging ever makes `piece`, or None.

    Merging looks at neighbours only, and takes the best pair of the whole text each time, so
    the merges inside a stretch of text happen in the order they would have if the stretch
    stood alone, until one crosses its border. A stretch that becomes `piece` was never
    crossed. So it becomes `piece` from the same two parts everywhere: those it comes down to
    alone. Every other split of `piece` into two pieces never fires.
    """
    parts = list(piece)
    if len(parts) < 2 or not all(part in priorities for part in parts):
        return None
    while len(parts) > 2:
        best: tuple[float, int, int, int, int] | None = None
        for at in range(len(parts) - 1):
            left, right = parts[at], parts[at + 1]
            found = priorities.get(left + right)
            if found is not None:
                merge = (found[0], -len(left), -len(right), found[1], at)
                if best is None or merge < best:
                    best = merge
        if best is None:
            return None
        at = best[-1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
