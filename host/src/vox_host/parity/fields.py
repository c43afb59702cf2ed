"""The fields of a certificate as JSON has them, typed strictly: what else is there is damage (pure)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vox_plugin_api.messages import Numerics

__all__ = ["CertificateFields", "OptionFields", "SideFields"]

_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Bits = Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$")]
"""Of a float32; empty before any step."""
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Word = Annotated[str, Field(max_length=1000)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Answer(_Strict):
    """An entry of `answers`: `Answered`."""

    number: _Count
    logits_digest: _Hex
    token_ids: list[_Count]
    answer_sha256: _Hex


class _Step(_Strict):
    """An entry of `taken`: `Taken`."""

    step: _Count
    loss: _Bits
    gradient_norm: _Bits
    learning_rate: _Bits
    trained_tokens: _Count
    adapter_digest: _Hex


class SideFields(_Strict):
    """An entry of `sides`: `SideResult`, without its transcript."""

    label: _Word
    plugin: _Word
    plugin_version: _Word
    plugin_tree_digest: _Hex | None
    lane: _Word
    lane_options: dict[_Word, _Word]
    numerics: Numerics
    numerics_version: int = Field(ge=1, lt=2**31)
    answers: list[_Answer] = Field(min_length=1)
    transcript_sha256: _Hex
    taken: list[_Step]


class OptionFields(_Strict):
    """What the requests were made with; null where whoever wrote it kept none."""

    max_tokens: _Count
    temperature: float = Field(ge=0, allow_inf_nan=False)
    seed: int = Field(ge=0, lt=2**64)
    train_steps: _Count


class CertificateFields(_Strict):
    """The whole file."""

    certificate: Literal[2]
    verdict: Literal["recorded", "bitwise", "same tokens", "failed"]
    model: _Word
    model_digest: _Hex
    prompts_digest: _Hex
    training_digest: _Hex | None
    options: OptionFields | None
    requests: int = Field(ge=1, lt=2**31)
    at_once: int = Field(ge=1, lt=2**31)
    numerics: list[_Word]
    sides: list[SideFields] = Field(min_length=1)
    differences: list[dict[str, Any]]
    training_differences: list[dict[str, Any]]
    left_out: list[_Word]
    observation: dict[str, Any]
    certificate_digest: _Hex
