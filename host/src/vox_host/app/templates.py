"""The chat template that a model is served with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from vox_host.errors import ModelError
from vox_host.models.installed import InstalledModel
from vox_host.models.tokenizer import Tokenizer
from vox_host.runs.source import AdapterSource

if TYPE_CHECKING:
    from vox_host.chat.template import ChatTemplate

__all__ = ["open_template"]


async def open_template(
    stack: contextlib.AsyncExitStack,
    model: InstalledModel,
    adapter: AdapterSource | None,
    tokenizer: Tokenizer,
    warn: Callable[[str], None],
) -> tuple[ChatTemplate | None, list[str]]:
    """Open the template that the adapter was trained with, else the model's own."""
    if adapter is not None and adapter.chat_template is not None:
        text, name = adapter.chat_template, f'adapter "{adapter.name}" (chat_template.jinja)'
    elif tokenizer.chat_template is not None:
        source = tokenizer.chat_template
        text, name = source.source, f'model "{model.name}" ({source.file})'
    else:
        return None, []
    from vox_host.chat.template import ChatTemplate  # with a template engine that other models do without

    template = ChatTemplate(
        text,
        name=name,
        special_tokens=tokenizer.special_names,
        protect=tokenizer.special_tokens,
    )
    stack.callback(template.close)
    try:
        await asyncio.to_thread(template.check)
    except ModelError as error:
        # Completions need no template, so the model is served; chat requests get the same text.
        warn(error.message)
        return template, [error.message]
    return template, []
