"""Whether a plugin could load a model, as far as config.json and tensor headers tell. Pure.

What a plugin checks when it loads a model, the import checks first, by the same description
(`vox_plugin_api.families`). A family that is described there is checked whole; any other is a
third party's business, and the import says that nobody was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vox_plugin_api.families import UnknownFamilyError, parse_config, plan_tensors
from vox_plugin_api.families.tensors import StoredAs

__all__ = ["check_family"]


def check_family(
    config: Mapping[str, Any],
    stored: Mapping[str, StoredAs],
    *,
    config_source: str,
    weights_source: str,
    spell: Callable[[str], str] = str,
) -> tuple[str, ...]:
    """Hold a parsed config.json and the tensors beside it against what their family needs.

    Args:
        stored: the tensors there are, by Hugging Face's names.
        config_source: where the config is, for messages.
        weights_source: where the tensors are, for messages.
        spell: how a tensor's name reads in a message.

    Returns:
        What the user should know although it stops nothing.

    Raises:
        CheckpointError: no plugin that goes by the description could load this.
    """
    try:
        parsed = parse_config(config, source=config_source)
    except UnknownFamilyError as unknown:
        return (
            f"family {unknown.model_type!r:.80} is not one that vox-host knows, and no installed plugin has "
            "been asked: settings and tensors will be checked when a plugin loads the model",
        )
    plan = plan_tensors(parsed, stored, source=weights_source, spell=spell)
    return (*parsed.notes, *plan.notes)
