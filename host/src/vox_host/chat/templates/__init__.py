"""Chat templates with names, for models that come without one.

They are rendered like any model's (`chat.template`), and use no special token but the model's own
beginning and end. A run directory holds a copy, so what trained is what serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import UsageError

__all__ = ["BASE_TEMPLATE", "NamedTemplate", "named_template", "template_names"]

BASE_TEMPLATE = "plain-turns"
"""What a base model gets unless another is asked for."""


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A template and its name."""

    name: str
    source: str


def template_names() -> list[str]:
    """Return every name."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.jinja"))


def named_template(name: str) -> NamedTemplate:
    """Return the template of this name.

    Raises:
        UsageError: there is none.
    """
    names = template_names()
    if name not in names:
        raise UsageError(
            "template-unknown",
            f'there is no chat template named "{name}"; nothing was read',
            facts=[("known", ", ".join(names))],
            remedy="Name one of those, or leave --template out.",
        )
    return NamedTemplate(name, (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8"))
