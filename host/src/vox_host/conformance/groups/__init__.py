"""The groups of the suite, one small module each, in the order in which they run.

A group is a name, a line of help, and a coroutine that yields the results of its cases. One that
the plugin can't answer raises `NotOfferedError` with the reason, and is shown as skipped. To add one,
write its module and name it in `GROUPS`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vox_host.conformance.groups import (
    adapters,
    backward,
    evaluation,
    forward,
    generation,
    integrity,
    lifecycle,
    operators,
    protocol,
    save_load,
    training,
    updates,
)
from vox_host.conformance.session import Session
from vox_host.conformance.verdict import CaseResult

__all__ = ["GROUPS", "Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """One group."""

    title: str
    run: Callable[[Session], AsyncGenerator[CaseResult, None]]
    needs_service: bool = True
    """Whether a lane that failed its self-test has nothing to show here."""


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        "operators": Group("every operator, byte for byte", operators.run, needs_service=False),
        "backward": Group("the backward of every operator, byte for byte", backward.run, needs_service=False),
        "updates": Group(
            "loss, gradients of parameters, the optimizer's step", updates.run, needs_service=False
        ),
        "forward": Group("whole tiny models, operator by operator", forward.run),
        "generation": Group("tokens and logprobs, alone and in company", generation.run),
        "evaluate": Group("scores of given texts", evaluation.run),
        "training": Group("steps of training, in one go, in parts and resumed", training.run),
        "adapters": Group("served with an adapter, and merged with it", adapters.run),
        "save-load": Group("load, unload and load again", save_load.run),
        "protocol": Group("hosts of other versions, unknown words", protocol.run),
        "lifecycle": Group("death, silence, noise and garbage", lifecycle.run),
        "integrity": Group("the installed bytes, after all that", integrity.run, needs_service=False),
    }
)
