"""Which numbers a worker may be told: all of them go to it as float32."""

from __future__ import annotations

__all__ = ["HELD", "LEAST", "MOST", "is_held"]

LEAST, MOST = 1e-30, 1e30
"""Between them, a number and its product with a rank, or its quotient by one, is a float32."""

HELD = f"a number above {LEAST:g} and below {MOST:g}: float32 holds 1.2e-38 to 3.4e38, with room for products"
"""What is wanted, for a message."""


def is_held(value: float) -> bool:
    """Say whether a number from 0 up stays what it is as float32: neither too large nor rounded to 0."""
    return value == 0 or LEAST < value < MOST
