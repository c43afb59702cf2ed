"""Which chat template trains: the model's own, or a named one for a model that has none.

The run directory gets the very text, and serving a run reads it from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vox_host.chat.template import ChatTemplate
from vox_host.chat.templates import BASE_TEMPLATE, named_template
from vox_host.models.tokenizer import Tokenizer

__all__ = ["TemplateChoice", "choose_template"]


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """A template and where it is from."""

    source: str
    origin: str
    """For people: a file of the model, or 'the named template "..."'."""
    name: str | None
    """The name of a named template; None for the model's own."""

    @contextmanager
    def open(self, tokenizer: Tokenizer) -> Iterator[ChatTemplate]:
        """Give the template as the server would make it; its process ends with the block.

        Raises:
            ModelError: it doesn't compile.
        """
        template = ChatTemplate(
            self.source,
            name=self.origin,
            special_tokens=tokenizer.special_names,
            protect=tokenizer.special_tokens,
        )
        try:
            template.check()
            yield template
        finally:
            template.close()


def choose_template(tokenizer: Tokenizer, name: str | None = None) -> TemplateChoice:
    """Return the named template if one is named, else the model's own, else the one for base models.

    Raises:
        UsageError: there is no template of this name.
    """
    own = tokenizer.chat_template
    if name is None and own is not None:
        return TemplateChoice(own.source, f"the model ({own.file})", None)
    found = named_template(name or BASE_TEMPLATE)
    return TemplateChoice(found.source, f'the named template "{found.name}"', found.name)
