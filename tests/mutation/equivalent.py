"""Mutants that no vector can catch, because they change no result; each with the reason.

Keys are `Mutant.key`. A mutant is listed only after its reason was looked for and found.
"""

from __future__ import annotations

__all__ = ["EQUIVALENT"]

EQUIVALENT: dict[str, str] = {}
