"""Options that all generating endpoints share, read into one frozen value.

What is known and honoured is checked; what would change the meaning of an answer and is not
built is refused by name; everything else is ignored, as clients send fields of many servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vox_host.app.service import ModelInfo, draw_seed
from vox_host.server.api_error import ApiError, bad_request
from vox_host.server.fields import Fields
from vox_plugin_api import messages as m

__all__ = ["Options", "check_model", "parse_options", "refuse_unsupported"]

MAX_CHOICES = 128
_HUGE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to answer."""

    sampling: m.SamplingParams
    seed: int
    """As given, or as drawn."""
    max_tokens: int | None
    stops: tuple[str, ...]
    n: int
    stream: bool
    include_usage: bool
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]


def check_model(fields: Fields, info: ModelInfo) -> None:
    """Refuse a request for a model that is not served here."""
    wanted = fields.text("model")
    if wanted is not None and wanted != info.name:
        raise ApiError(
            404,
            f'the model "{wanted[:100]}" is not served here; this server has "{info.name}"',
            code="model_not_found",
            param="model",
        )


def parse_options(
    fields: Fields,
    info: ModelInfo,
    *,
    max_tokens_names: tuple[str, ...] = ("max_tokens",),
    default_max_tokens: int | None,
    least_max_tokens: int,
) -> Options:
    """Read the shared options.

    Raises:
        ApiError: 400, naming the field.
    """
    max_tokens: int | None = None
    for name in max_tokens_names:
        given = fields.integer(name, low=least_max_tokens, high=_HUGE)
        max_tokens = given if max_tokens is None else max_tokens
    n = fields.integer("n", low=1, high=MAX_CHOICES)
    stream = fields.flag("stream")
    stream_options = fields.object("stream_options")
    include_usage = stream_options.get("include_usage")
    if include_usage is not None and not isinstance(include_usage, bool):
        raise bad_request(
            "stream_options.include_usage", "stream_options.include_usage must be true or false"
        )
    seed = fields.integer("seed", low=-(2**63), high=2**64 - 1)
    if seed is None:
        # Without chance there is nothing to draw, and equal requests stay equal to the last byte.
        seed = 0 if fields.number("temperature", 1.0, low=0.0, high=100.0) == 0 else draw_seed()
    return Options(
        sampling=_sampling(fields, info, seed),
        seed=seed,
        max_tokens=default_max_tokens if max_tokens is None else max_tokens,
        stops=fields.stops(),
        n=1 if n is None else n,
        stream=stream,
        include_usage=bool(include_usage) and stream,
        ignore_eos=fields.flag("ignore_eos"),
        stop_token_ids=_stop_token_ids(fields, info),
    )


def _sampling(fields: Fields, info: ModelInfo, seed: int) -> m.SamplingParams:
    top_k = fields.integer("top_k", low=-1, high=_HUGE) or 0
    return m.SamplingParams(
        temperature=fields.number("temperature", 1.0, low=0.0, high=100.0),
        top_k=max(top_k, 0),
        top_p=fields.number("top_p", 1.0, low=0.0, high=1.0),
        min_p=fields.number("min_p", 0.0, low=0.0, high=1.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, low=0.01, high=100.0),
        presence_penalty=fields.number("presence_penalty", 0.0, low=-2.0, high=2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, low=-2.0, high=2.0),
        logit_bias=fields.token_biases("logit_bias", info.vocab_size),
        # The API's seed is a signed 64-bit number, the generator's an unsigned one.
        seed=seed % 2**64,
    )


def _stop_token_ids(fields: Fields, info: ModelInfo) -> tuple[int, ...]:
    value = fields.raw("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(
        isinstance(t, int) and not isinstance(t, bool) and 0 <= t < info.vocab_size for t in value
    ):
        raise bad_request(
            "stop_token_ids", f"stop_token_ids must be a list of token ids below {info.vocab_size}"
        )
    return tuple(value)


def _is_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_NOT_BUILT = "is not supported by this server"

_REFUSED: dict[str, Any] = {
    # field -> whether a value means the same as leaving the field out
    "best_of": lambda value: value == 1,
    "suffix": lambda value: value == "",
    "response_format": _is_text_format,
    "functions": lambda value: value == [],
    "function_call": lambda value: value == "none",
    "tool_choice": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": lambda _: False,
    "web_search_options": lambda _: False,
    "grammar": lambda value: value == "",
    "regex": lambda _: False,
    "json_schema": lambda _: False,
    "structured_outputs": lambda _: False,
    "guided_json": lambda _: False,
    "guided_regex": lambda _: False,
    "guided_choice": lambda _: False,
    "guided_grammar": lambda _: False,
    "min_tokens": lambda value: value == 0,
    "prompt_logprobs": lambda value: value is False,
    "use_beam_search": lambda value: value is False,
    "bad_words": lambda value: value == [],
    "lora": lambda value: value == [],
    "adapter": lambda _: False,
    "continue_final_message": lambda value: value is False,
    "add_generation_prompt": lambda value: value is True,
}


def refuse_unsupported(fields: Fields) -> None:
    """Refuse fields that would silently change what an answer means.

    Raises:
        ApiError: 400, naming the field.
    """
    for name, means_nothing in _REFUSED.items():
        if fields.has(name) and not means_nothing(fields.raw(name)):
            raise bad_request(
                name,
                f"{name} {_NOT_BUILT}; it would change what the answer means, so it is not ignored",
                code="not_supported",
            )
