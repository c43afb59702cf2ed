"""The typed messages of protocol 1.

Host and worker exchange frames (`framing`) that hold one message each, as canonical JSON
(`canonical_json`): sorted keys, no spaces, no floating-point literals in anything that is
compared. A float32 crosses as its bits, a tensor as the SHA-256 of its little-endian bytes.
Every event has a `result`, which is compared byte for byte between lanes, and an
`observation` (times, memory, host facts), which never is.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

MAGIC = "vox-plugin"
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 in lower-case hex."""

Capability = Literal["generate", "evaluate", "trace", "train", "adapters", "quantize"]
Numerics = Literal["canonical", "fast"]
FinishReason = Literal["stop", "length"]


def f32_bits(value: float) -> str:
    """Return the IEEE-754 binary32 bits of `value` (rounded to nearest even) as 8 hex digits."""
    return struct.pack(">f", value).hex()


def f32_from_bits(bits: str) -> float:
    """Return the number whose binary32 bits are the 8 hex digits `bits`."""
    if len(bits) != 8:
        raise ValueError(f"expected 8 hex digits of a float32, found {bits!r}")
    number: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return number


def _parse_f32(value: object) -> object:
    return f32_from_bits(value) if isinstance(value, str) else value


F32 = Annotated[float, BeforeValidator(_parse_f32), PlainSerializer(f32_bits, return_type=str)]
"""A float32: 8 hex digits on the wire, a Python float in memory."""


class Message(BaseModel):
    """Base of everything on the wire. Unknown keys from a newer minor peer are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class ProtocolRange(Message):
    """The protocol versions a side speaks, both ends included."""

    min: int
    max: int

    def highest_common(self, other: ProtocolRange) -> int | None:
        """Return the version both sides use, the highest they share, or None."""
        version = min(self.max, other.max)
        return version if version >= max(self.min, other.min) else None


# --- handshake -------------------------------------------------------------------------------


class HostHello(Message):
    """First frame, host to worker."""

    type: Literal["host_hello"] = "host_hello"
    magic: str = MAGIC
    protocol: ProtocolRange
    host_version: str
    plugin_id: str
    manifest_digest: Digest
    nonce: str
    purpose: Literal["serve", "check"] = "serve"
    """check: a lane that fails its self-test is not refused, so that it can be shown where it differs.
    It then answers `conformance` and `self_test` and nothing else."""


class WorkerHello(Message):
    """Answer to `HostHello`: who the worker is and what it will speak."""

    type: Literal["worker_hello"] = "worker_hello"
    magic: str = MAGIC
    protocol: ProtocolRange
    plugin_id: str
    plugin_version: str
    manifest_digest: Digest
    lane: str
    numerics: list[Numerics]
    capabilities: list[Capability]
    execution: str = ""
    """Where the lane's kernels run, if not on the device that its name says; equals the manifest's."""
    pid: int
    nonce: str


# --- errors ----------------------------------------------------------------------------------


class WorkerError(Message):
    """An error as data. `code` is stable; `facts` are what the message was made from."""

    code: str
    message: str
    facts: dict[str, Any] = {}
    remedy: str | None = None


# --- requests --------------------------------------------------------------------------------


class SamplingParams(Message):
    """How the next token is drawn. Temperature 0 is argmax before anything else is looked at."""

    temperature: F32 = 1.0
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    top_p: F32 = 1.0
    min_p: F32 = 0.0
    repetition_penalty: F32 = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer; 1: off."""
    presence_penalty: F32 = 0.0
    frequency_penalty: F32 = 0.0
    logit_bias: dict[int, F32] = {}
    seed: int = Field(default=0, ge=0, lt=2**64)
    sample: int = Field(default=0, ge=0)
    """Which of several answers to one request this is; part of the random counter."""


class RankAndAlpha(Message):
    """What the update of one layer is scaled by."""

    rank: int = Field(ge=1, le=4096)
    alpha: F32 = Field(ge=0, allow_inf_nan=False)


class AdapterConfig(Message):
    """Low-rank updates on some layers of a frozen base model."""

    rank: int = Field(ge=1, le=4096)
    alpha: F32 = Field(ge=0, allow_inf_nan=False)
    """The update is multiplied by alpha / rank. 0 changes nothing: it is served, and not trained."""
    targets: list[str]
    """Names of layers, whole ("layers.0.mlp.up_proj") or their last part ("up_proj", "lm_head",
    "embed_tokens"); may be empty where `exceptions` is not."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    dropout: F32 = Field(default=0.0, ge=0, lt=1)
    """Share of an update's inputs that is dropped in training."""
    exceptions: dict[str, RankAndAlpha] = Field(default_factory=dict)
    """Layers with a rank and an alpha of their own, by their whole names. They need not be among the
    targets: a worker that doesn't know this field then finds tensors that have no place, rather than
    serve them by another factor."""

    @model_validator(mode="after")
    def _check(self) -> AdapterConfig:
        if not self.targets and not self.exceptions:
            raise ValueError("an adapter names at least one layer")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Without exceptions, a configuration is written as it was before there were any: saves of it too.
        fields: dict[str, Any] = handler(self)
        if not self.exceptions:
            fields.pop("exceptions", None)
        return fields


class AdapterParams(Message):
    """An adapter to serve the model with (capability "adapters"). It is never folded into the weights."""

    file: str
    """A safetensors file: F32, F16 or BF16, each taken exactly."""
    digest: Digest
    """SHA-256 of the file."""
    config: AdapterConfig
    key_map: dict[str, str]
    """The key in the file of each tensor, by the name that `train_save` gives it. Every tensor of the
    adapter must be in the file, and every tensor of the file the adapter's, or one of `base_copies`."""
    base_copies: dict[str, str] = Field(default_factory=dict)
    """The key in the file of what it holds of the base's own weights, by layer ("embed_tokens", "lm_head").
    They are not used; each value must be the base's, where that is not quantised (else `adapter-base`)."""


class LoadModelParams(Message):
    """Load the model in `model_dir` (config.json, *.safetensors, optional quant-metadata.json)."""

    model_dir: str
    model_digest: Digest
    context_length: int | None = None
    """Positions to provide for each sequence; None: the model's own, bounded by memory."""
    numerics: Numerics = "canonical"
    threads: int | None = None
    """CPU threads; None: as many as this process may use."""
    memory_bytes: int | None = None
    """Memory the worker may use for the KV cache; None: the worker's own bound."""
    max_sequences: int = Field(default=64, ge=1)
    adapter: AdapterParams | None = None
    """None: the model as it is."""
    lane_options: dict[str, str] = {}
    """How the lane shall compute, in words of its own (`isa`: `avx2`): for comparing ways that must
    give the same bytes. An option it does not know is refused."""


class GenerateParams(Message):
    """Continue `token_ids`."""

    token_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=0)
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: list[int] = []
    logprobs: int | None = Field(default=None, ge=0, le=20)
    """None: no logprobs; n: the chosen token's and the n most likely ones'."""
    prompt_logprobs: bool = False


class EvaluateParams(Message):
    """Score every token of each sequence given the ones before it."""

    sequences: list[list[int]] = Field(min_length=1)
    top_logprobs: int = Field(default=0, ge=0, le=20)
    logits_digest: bool = True


class TraceParams(Message):
    """Run one forward pass and return a digest per operator and layer."""

    token_ids: list[int] = Field(min_length=1)
    slices: list[str] = []
    """Names of operators whose output follows in binary frames, in this order."""


class UnloadParams(Message):
    """Forget the loaded model."""


class SelfTestParams(Message):
    """Compare the lane's operators with the numerics' vectors."""


Method = Literal[
    "load_model",
    "generate",
    "evaluate",
    "trace",
    "unload",
    "self_test",
    "conformance",
    "merge_adapter",
    "train_plan",
    "train_begin",
    "train_step",
    "train_evaluate",
    "train_save",
]
"""The messages of training are in `train_messages`, those of merging in `merge_messages`."""


class Request(Message):
    """A call. `id` is chosen by the host and unique within the worker's life."""

    type: Literal["request"] = "request"
    id: int
    method: Method
    params: dict[str, Any]


class Cancel(Message):
    """Stop request `id`; it ends with error code `cancelled` unless it had ended already."""

    type: Literal["cancel"] = "cancel"
    id: int


class Shutdown(Message):
    """Finish and exit with status 0."""

    type: Literal["shutdown"] = "shutdown"


# --- results ---------------------------------------------------------------------------------


class TensorsReport(Message):
    """What became of each tensor of a checkpoint."""

    used: list[str]
    unused: list[str]
    """In the file, not needed by the model (each is named; none is silently dropped)."""


class NumericsError(Message):
    """How far fast numerics were from the same lane's canonical ones, measured as the model was loaded."""

    positions: int = Field(ge=1)
    """Rows of logits that were compared, of reference prompts that follow from the vocabulary's size."""
    max_logit_difference: float
    """The greatest difference of a logit."""
    mean_kl: float
    """Mean divergence of the fast distribution from the canonical one, in nats."""
    equal_argmax: float
    """Share of positions with the same likeliest token."""


class LoadResult(Message):
    """What was loaded. Compared between lanes."""

    architecture: str
    model_digest: Digest
    numerics: Numerics
    numerics_version: int
    parameters: int
    layers: int
    vocab_size: int
    context_length: int
    """Positions one sequence may use now."""
    model_context_length: int
    """Positions the model was made for."""
    tensors: TensorsReport
    adapter_digest: Digest | None = None
    """Of the adapter's tensors (docs/numerics.md), as training gives it; None: there is none."""
    numerics_error: NumericsError | None = None
    """None: the numerics are canonical, or a plugin of fast ones alone has nothing to measure them by."""
    warnings: list[str] = []


class TokenLogprob(Message):
    """A token and its natural-log probability under the unmodified distribution (temperature 1)."""

    token_id: int
    logprob: F32


class GeneratedToken(Message):
    """One token of an answer."""

    token_id: int
    logprob: F32 | None = None
    # A default that is a list would be copied, by `copy.deepcopy`, for each token.
    top: list[TokenLogprob] = Field(default_factory=list)


class GenerateResult(Message):
    """A piece of an answer; the last one has a `finish_reason` and the counts."""

    tokens: list[GeneratedToken] = Field(default_factory=list)
    prompt: list[GeneratedToken] | None = None
    """With `prompt_logprobs`, once: every prompt token; the first has no logprob."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None


class EvaluateResult(Message):
    """Scores of one sequence."""

    index: int
    tokens: list[GeneratedToken]
    logits_digest: Digest | None = None


class OperatorDigest(Message):
    """SHA-256 of one operator's output (little-endian, row-major, shape as stated)."""

    name: str
    operator: str
    shape: list[int]
    dtype: str
    digest: Digest


class TraceResult(Message):
    """One entry per operator call, in order."""

    operators: list[OperatorDigest]


class SelfTestResult(Message):
    """Zero cases is a failure."""

    numerics_version: int
    cases: int
    failed: list[str]
    vectors_digest: Digest


class Event(Message):
    """Part of the answer to request `id`. `final` ends it."""

    type: Literal["event"] = "event"
    id: int
    final: bool
    result: dict[str, Any] | None = None
    observation: dict[str, Any] | None = None
    slices: int = 0
    """How many binary frames follow this one."""


class Failed(Message):
    """Request `id` ended with an error."""

    type: Literal["failed"] = "failed"
    id: int
    error: WorkerError


class Heartbeat(Message):
    """Sent about once a second. `progress` counts finished units of work: busy differs from stuck."""

    type: Literal["heartbeat"] = "heartbeat"
    state: Literal["idle", "busy"]
    progress: int
    resident_bytes: int | None = None


class Refused(Message):
    """The worker can't serve this host; it exits after sending this."""

    type: Literal["refused"] = "refused"
    error: WorkerError


ToWorker = Annotated[HostHello | Request | Cancel | Shutdown, Field(discriminator="type")]
ToHost = Annotated[WorkerHello | Event | Failed | Heartbeat | Refused, Field(discriminator="type")]


def canonical_json(message: BaseModel | dict[str, Any]) -> bytes:
    """Return the one byte string that stands for `message`: UTF-8, sorted keys, no spaces.

    Raises:
        ValueError: it holds NaN or infinity.
    """
    value = message.model_dump(mode="json") if isinstance(message, BaseModel) else message
    return _CANONICAL.encode(value).encode("utf-8")


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
"""Made once: `json.dumps` makes one for each message."""
