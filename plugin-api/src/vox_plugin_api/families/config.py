"""A checkpoint's config.json into a `ModelConfig`: checked, and made explicit.

Whether `text_config` is present decides where the text model's settings (and, in `tensors`, its
tensors) are; the model's name never does. What a family leaves out of its config files is filled
in by its own module, and said in `notes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vox_plugin_api.families import gemma3, qwen3
from vox_plugin_api.families.fields import Fields
from vox_plugin_api.families.model_config import ModelConfig
from vox_plugin_api.strict_json import CheckpointError

__all__ = ["UnknownFamilyError", "parse_config", "text_model_type"]

_READERS: Mapping[str, Callable[[Fields, Fields, bool], ModelConfig]] = {
    "qwen3": qwen3.read,
    "gemma3": gemma3.read,
    "gemma3_text": gemma3.read,
}
"""By `model_type`."""
_SUPPORTED = "qwen3, gemma3_text, and checkpoints whose text_config is one of these (such as gemma3)"
_TOWERS = ("vision_config", "audio_config")


class UnknownFamilyError(CheckpointError):
    """A config.json of a family that is not described here; whether it is right can't be told."""

    def __init__(self, message: str, model_type: str) -> None:
        super().__init__(
            "config-unsupported",
            message,
            facts={"model_type": model_type, "supported": _SUPPORTED},
            remedy="Choose a model of a supported family, or a plugin that runs this one.",
        )
        self.model_type = model_type


def parse_config(data: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Read a Hugging Face style config.json.

    Args:
        source: the file, for messages.

    Raises:
        UnknownFamilyError: a family that is not described here.
        CheckpointError: `config-unsupported`: a setting that no family here has on;
            `config-invalid`: values of the wrong type or size, all of them named.
    """
    outer = Fields(data, source=source)
    inner = outer.child("text_config")
    outer.raise_problems("config-invalid")
    config = outer if inner is None else inner
    read = _reader(outer, config)
    _refuse_unsupported(outer, config)
    parsed = read(outer, config, config is not outer)
    config.raise_problems("config-invalid")
    _check_sizes(config, parsed)
    return parsed


def text_model_type(data: Mapping[str, Any], *, source: str = "config.json") -> str:
    """Return the `model_type` of the text model in a config.json of any family.

    Raises:
        CheckpointError: it has none.
    """
    outer = Fields(data, source=source)
    inner = outer.child("text_config")
    outer.raise_problems("config-invalid")
    return _model_type(outer, outer if inner is None else inner)


def _reader(outer: Fields, config: Fields) -> Callable[[Fields, Fields, bool], ModelConfig]:
    model_type = _model_type(outer, config)
    towers = [key for key in _TOWERS if outer.has(key)]
    is_multimodal = config is outer and (model_type == "gemma3" or bool(towers))
    why = (
        f"it describes a multimodal model ({', '.join(towers) or model_type}) and has no text_config, so its "
        "text model's sizes and tensors can't be told apart from the rest"
    )
    if model_type not in _READERS:
        more = f"; {why}" if is_multimodal else ""
        raise UnknownFamilyError(
            f"{outer.source}: model_type {model_type!r:.80} is not supported; supported are "
            f"{_SUPPORTED}{more}",
            model_type,
        )
    if is_multimodal:
        raise CheckpointError(
            "config-unsupported",
            f"{outer.source}: {why}",
            facts={"model_type": model_type, "supported": _SUPPORTED},
            remedy="Use the checkpoint's original config.json (it has a text_config) or a text-only export.",
        )
    return _READERS[model_type]


def _model_type(outer: Fields, config: Fields) -> str:
    outer_type = outer.text("model_type")
    # A text_config without a type of its own is of the outer one's family.
    model_type = outer_type if config is outer else config.text("model_type") or outer_type
    if not model_type and not config.problems:
        config.problem("model_type", f"the name of a family: {_SUPPORTED}")
    config.raise_problems("config-invalid")
    return model_type or ""


def _refuse_unsupported(outer: Fields, config: Fields) -> None:
    """Settings that change the arithmetic and that the families described here never have on."""
    for key in ("attention_bias", "use_bidirectional_attention"):
        if config.boolean(key, False):
            config.problem(key, "false: nothing else is supported")
    # A quantiser writes its settings at the top, also where the text model's are below.
    for fields in dict.fromkeys((outer, config)):
        if fields.has("quantization_config"):
            fields.problem("quantization_config", "none: import a GGUF file or unquantised safetensors")
    if config.has("partial_rotary_factor") and config.number("partial_rotary_factor") != 1:
        config.problem("partial_rotary_factor", "1")
    config.raise_problems("config-unsupported")


def _check_sizes(config: Fields, parsed: ModelConfig) -> None:
    if parsed.heads % parsed.kv_heads:
        config.problem("num_key_value_heads", f"a divisor of num_attention_heads ({parsed.heads})")
    if parsed.head_dim % 2:
        if parsed.is_head_dim_derived:
            wanted = f"an even head_dim (it gives {parsed.head_dim}): rotary pairs need one"
            config.problem("hidden_size", wanted)
        else:
            config.problem("head_dim", "a number that is even: rotary pairs need one")
    if parsed.is_head_dim_derived and parsed.hidden_size % parsed.heads:
        config.problem(
            "head_dim", f"it: hidden_size {parsed.hidden_size} / {parsed.heads} heads is not whole"
        )
    config.raise_problems("config-invalid")
