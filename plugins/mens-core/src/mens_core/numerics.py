"""Which rules the bits follow."""

__all__ = ["NUMERICS_VERSION"]

NUMERICS_VERSION = 1
"""The number of docs/numerics.md; it changes when bits change."""
