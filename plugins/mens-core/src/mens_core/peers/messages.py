"""What rank 0 and the other ranks of a training say to each other, in the frames of protocol 1.

Tensors go another way (`wire`): these say when, in which order and how many.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from vox_plugin_api.framing import Frame, ProtocolError
from vox_plugin_api.messages import F32, AdapterConfig, Digest, LoadModelParams, Message, WorkerError
from vox_plugin_api.train_messages import TrainExample

__all__ = [
    "Alive",
    "Broke",
    "Connect",
    "Connected",
    "Done",
    "End",
    "Give",
    "Holds",
    "Joined",
    "Load",
    "Ready",
    "Take",
    "Work",
    "decode_from_peer",
    "decode_to_peer",
]


class Load(Message):
    """Load the model; what is to be trained on it."""

    type: Literal["load"] = "load"
    model: LoadModelParams
    adapter: AdapterConfig
    seed: int
    micro_batch_size: int | None
    remember_bytes: int = 0


class Connect(Message):
    """Open the way for tensors, now that every rank is there."""

    type: Literal["connect"] = "connect"


class Work(Message):
    """Compute gradients, or losses alone; what was asked before is of no more use."""

    type: Literal["work"] = "work"
    number: int
    """Rank 0 counts what it asks: an answer to an earlier question is told by it."""
    kind: Literal["step", "evaluate"]
    step: int
    """Steps taken so far."""
    first: int
    """Number of the first example in the step."""
    examples: list[TrainExample]
    adapter_digest: Digest
    """Of what the rank must hold by now."""
    logits_digest: bool = False


class Give(Message):
    """Send the sums of the last step's examples over the wire."""

    type: Literal["give"] = "give"
    number: int


class Take(Message):
    """Receive the adapter's values over the wire and hold them from now on."""

    type: Literal["take"] = "take"
    number: int


class End(Message):
    """Finish and exit with status 0."""

    type: Literal["end"] = "end"


class Joined(Message):
    """First message of a rank."""

    type: Literal["joined"] = "joined"
    rank: int
    pid: int


class Ready(Message):
    """The model is loaded; `facts` must be those of rank 0."""

    type: Literal["ready"] = "ready"
    facts: dict[str, str]


class Connected(Message):
    """The way for tensors is open."""

    type: Literal["connected"] = "connected"


class Alive(Message):
    """Something was finished; said a few times a second at most."""

    type: Literal["alive"] = "alive"


class Done(Message):
    """Work is done."""

    type: Literal["done"] = "done"
    number: int
    losses: list[F32]
    """Of each example, in order."""
    logits_digests: list[Digest | None] = Field(default_factory=list)
    levels: list[int] = Field(default_factory=list)
    """Of the nodes that every parameter's sums are held in (`ExampleTree.nodes`)."""


class Holds(Message):
    """The values are taken."""

    type: Literal["holds"] = "holds"
    number: int
    adapter_digest: Digest


class Broke(Message):
    """What was asked was not done."""

    type: Literal["broke"] = "broke"
    number: int | None
    error: WorkerError


ToPeer = Load | Connect | Work | Give | Take | End
FromPeer = Joined | Ready | Connected | Alive | Done | Holds | Broke


def decode_to_peer(frame: Frame) -> ToPeer:
    """Parse a frame from rank 0.

    Raises:
        ProtocolError: it is none of its messages.
    """
    message: ToPeer = _decode(frame, _to_peer())
    return message


def decode_from_peer(frame: Frame) -> FromPeer:
    """Parse a frame from another rank.

    Raises:
        ProtocolError: it is none of its messages.
    """
    message: FromPeer = _decode(frame, _from_peer())
    return message


def _decode(frame: Frame, adapter: TypeAdapter[Any]) -> Any:
    try:
        if frame.kind != "J":
            raise ValueError(f"{len(frame.payload)} bytes of binary")
        return adapter.validate_json(frame.payload)
    except (ValueError, ValidationError) as problem:
        shown = frame.payload[:64].decode("utf-8", "backslashreplace")
        raise ProtocolError(
            "bad-message",
            f"not a message between the ranks of a training: {shown!r}",
            {"problem": str(problem).splitlines()[0]},
        ) from None


@cache
def _to_peer() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[ToPeer, Field(discriminator="type")])


@cache
def _from_peer() -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[FromPeer, Field(discriminator="type")])
