"""Device requirements of a manifest: `namespace :: feature comparison value`.

The vocabulary follows the wheel-variant proposals, so that moving there is a rename:
`nvidia :: compute_capability >= 8.0`, `nvidia :: driver >= 550, < 600`,
`apple :: macos >= 14.0`, `cpu :: isa :: x86-64-v3`. Pure; what the machine has is `hardware`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.specifiers import InvalidSpecifier, SpecifierSet

__all__ = ["FEATURES", "Requirement", "parse_requirement"]

FEATURES: dict[str, dict[str, str]] = {
    "nvidia": {"compute_capability": "version", "driver": "version", "memory_gib": "version"},
    "apple": {"macos": "version", "memory_gib": "version"},
    "cpu": {"isa": "member"},
}
"""Namespace to feature to how it is stated: compared as a version, or present in a list."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One parsed expression."""

    namespace: str
    feature: str
    value: str
    """A version specifier for compared features, the word itself for listed ones."""
    text: str
    """As written, for messages."""

    def accepts(self, version: str) -> bool:
        """Say whether `version` meets a compared requirement."""
        return SpecifierSet(self.value).contains(version, prereleases=True)


def parse_requirement(text: str) -> Requirement:
    """Parse one expression.

    Raises:
        ValueError: it is not one; the message says what was expected.
    """
    match = re.fullmatch(r"\s*(\w+)\s*::\s*(\w+)\s*(?:::\s*([\w.-]+)|([<>=!~].*))\s*", text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a requirement; write one like 'nvidia :: compute_capability >= 8.0' "
            "or 'cpu :: isa :: x86-64-v3'"
        )
    namespace, feature, member, comparison = match.groups()
    if namespace not in FEATURES:
        raise ValueError(f"{text!r}: unknown namespace {namespace!r}; known: {', '.join(FEATURES)}")
    kind = FEATURES[namespace].get(feature)
    if kind is None:
        known = ", ".join(FEATURES[namespace])
        raise ValueError(f"{text!r}: unknown feature {feature!r} of {namespace}; known: {known}")
    if kind == "member":
        if member is None:
            raise ValueError(f"{text!r}: {feature} is a list; write '{namespace} :: {feature} :: value'")
        return Requirement(namespace, feature, member, text)
    if comparison is None:
        raise ValueError(f"{text!r}: {feature} is compared; write '{namespace} :: {feature} >= value'")
    try:
        specifiers = SpecifierSet(comparison)
    except InvalidSpecifier:
        raise ValueError(f"{text!r}: {comparison.strip()!r} is not a comparison like '>= 8.0'") from None
    return Requirement(namespace, feature, str(specifiers), text)
