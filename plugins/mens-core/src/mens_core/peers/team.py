"""Rank 0's side of a training on several devices: it asks, collects, and ends with a reason.

A step's examples are shared out as runs of neighbours; each rank sums its own by the step's tree as far as
whole nodes go, and rank 0 pushes the nodes of all ranks, in order, into that tree. What follows is computed
by rank 0 alone, and its bytes are given to the others. So no bit depends on how many they are.
"""

from __future__ import annotations

import atexit
import os
import select
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from mens_core.differentiate import Score
from mens_core.micro_batches import Example
from mens_core.ops import Tensor
from mens_core.peers.link import Link
from mens_core.peers.meeting import gather, leave, new_place
from mens_core.peers.messages import (
    Broke,
    Connect,
    Connected,
    Done,
    End,
    Give,
    Holds,
    Load,
    Ready,
    Take,
    Work,
)
from mens_core.peers.ranks import in_parts
from mens_core.peers.sharing import shares
from mens_core.peers.wire import PeerSetup, Place, Wire
from mens_core.step_gradients import Gradients
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import Message
from vox_plugin_api.train_messages import TrainExample

__all__ = ["Asked", "Team"]

SILENCE_S = 300.0
"""Without a word from a rank that something is waited for."""
_POLL_S = 0.25
_END_S = 5.0

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class Asked:
    """Work that the other ranks do."""

    number: int
    mine: range
    """The examples that are rank 0's."""


class Team:
    """The other ranks of one training. Make one with `start`."""

    def __init__(self, place: Place, links: Sequence[Link]) -> None:
        self.ranks = place.ranks
        self._place = place
        self._links = list(links)
        self._shapes: Mapping[str, tuple[int, int]] = {}
        self._wire: Wire | None = None
        self._number = 0
        self._lost: BackendError | None = None
        atexit.register(self.end)

    @classmethod
    def start(
        cls,
        setup: PeerSetup,
        ranks: int,
        load: Load,
        ops: TrainingOps,
        facts: Mapping[str, str],
        shapes: Mapping[str, tuple[int, int]],
    ) -> Generator[None, None, Team]:
        """Start the other ranks, have them load the model, and hold what they are against `facts`.

        Args:
            shapes: of the adapter's tensors, by key.

        Raises:
            BackendError: a rank refused, ended or differs; none of them is left.
        """
        place = new_place(ranks)
        try:
            links = yield from gather(place, setup, os.environ)
        except BaseException:
            leave(place)
            raise
        team = cls(place, links)
        try:
            team._shapes = shapes
            team._say(load)
            ready = yield from team._answers(Ready)
            for rank, answer in ready.items():
                _refuse_other(rank, facts, answer.facts)
            team._say(Connect())
            team._wire = setup.open_wire(place, ops, team.look)
            yield from team._answers(Connected)
        except BaseException:
            team.end(is_whole=False)
            raise
        return team

    def look(self) -> None:
        """See whether every rank is there, without waiting.

        Raises:
            BackendError: `peer-lost`; then none of them is left.
        """
        if self._lost is not None:
            raise self._lost
        try:
            for link in self._links:
                link.look()
        except BackendError as error:
            raise self._lose(error) from None

    # --- a step ----------------------------------------------------------------------------------

    def ask(
        self,
        kind: Literal["step", "evaluate"],
        step: int,
        examples: Sequence[Example],
        adapter_digest: str,
        *,
        logits_digest: bool = False,
    ) -> Asked:
        """Share the examples out and have the others begin; what was asked before is dropped.

        Raises:
            BackendError: `peer-lost`.
        """
        self.look()
        self._number += 1
        mine, *theirs = shares([example.rows for example in examples], self.ranks)
        for link, share in zip(self._links, theirs, strict=True):
            self._send(
                link,
                Work(
                    number=self._number,
                    kind=kind,
                    step=step,
                    first=share.start,
                    examples=[_message(example) for example in examples[share.start : share.stop]],
                    adapter_digest=adapter_digest,
                    logits_digest=logits_digest,
                ),
            )
        return Asked(self._number, mine)

    def join(self, asked: Asked, gradients: Gradients) -> Generator[None, None, None]:
        """Add what the others found to what rank 0 did, yielding while they work.

        Raises:
            BackendError: `peer-lost`, or a rank's own error.
        """
        answers = yield from self._answers(Done, asked.number)
        # From here on nothing yields: a transfer is never left half done.
        for link in self._links:
            done = answers[link.rank]
            gradients.losses.extend(map(np.float32, done.losses))
            if done.levels:
                self._send(link, Give(number=asked.number))
                self._push(link.rank, done.levels, gradients)

    def _push(self, rank: int, levels: Sequence[int], gradients: Gradients) -> None:
        for keys in in_parts(self._shapes):
            received = iter(self._receive([self._shapes[key] for key in keys for _ in levels], rank))
            for key in keys:
                for level in levels:
                    gradients.trees[key].push(next(received), level)

    def scores(self, asked: Asked) -> Generator[None, None, list[Score]]:
        """Return what the others found in an evaluation, in order."""
        answers = yield from self._answers(Done, asked.number)
        return [
            Score(np.float32(loss), digest)
            for link in self._links
            for loss, digest in zip(answers[link.rank].losses, answers[link.rank].logits_digests, strict=True)
        ]

    def install(self, values: Mapping[str, Tensor], adapter_digest: str) -> None:
        """Give every rank the adapter's values; each one states what it holds then.

        Raises:
            BackendError: `peer-lost`, or `peer-differs`; then none of them is left.
        """
        self.look()
        self._number += 1
        self._say(Take(number=self._number))
        for keys in in_parts(self._shapes):
            for link in self._links:
                self._transfer([values[key] for key in keys], link.rank)
        for rank, holds in _finish(self._answers(Holds, self._number)).items():
            if holds.adapter_digest != adapter_digest:
                raise self._lose(_differs(rank, "adapter_digest", adapter_digest, holds.adapter_digest))

    # --- lines and wire --------------------------------------------------------------------------

    def _say(self, message: Message) -> None:
        for link in self._links:
            self._send(link, message)

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except BackendError as error:
            raise self._lose(error) from None

    def _receive(self, shapes: Sequence[tuple[int, ...]], rank: int) -> list[Tensor]:
        assert self._wire is not None
        try:
            return self._wire.receive(shapes, rank)
        except BackendError as error:
            raise self._lose(self._cause(rank, error)) from None

    def _transfer(self, tensors: Sequence[Tensor], rank: int) -> None:
        assert self._wire is not None
        try:
            self._wire.send(tensors, rank)
        except BackendError as error:
            raise self._lose(self._cause(rank, error)) from None

    def _cause(self, rank: int, error: BackendError) -> BackendError:
        """How the rank ended, where it did: that says more than a wire that broke."""
        if self._lost is not None:
            return self._lost
        (link,) = (link for link in self._links if link.rank == rank)
        return link.lost(error.error.message)

    def _answers(self, kind: type[M], number: int | None = None) -> Generator[None, None, dict[int, M]]:
        """Return each rank's answer, yielding when a rank has moved: who stands still shows no life."""
        found: dict[int, M] = {}
        errors: dict[int, Broke] = {}
        asked_s = time.monotonic()
        while len(found) + len(errors) < len(self._links):
            self.look()
            has_moved = False
            for link in self._links:
                while (message := link.take()) is not None:
                    has_moved = True
                    if isinstance(message, Broke) and message.number is None:
                        # At the start, or its last words: it takes no further part.
                        raise self._lose(_told_by(link.rank, message))
                    if getattr(message, "number", None) != number:
                        continue  # an answer to what was dropped, or a sign of life
                    if isinstance(message, Broke):
                        errors[link.rank] = message
                    elif isinstance(message, kind):
                        found[link.rank] = message
            if has_moved:
                yield
            else:
                self._wait(asked_s, {*found, *errors})
        if errors:
            rank = min(errors)
            raise _told_by(rank, errors[rank])
        return {rank: found[rank] for rank in sorted(found)}

    def _wait(self, asked_s: float, answered: set[int]) -> None:
        select.select(self._links, [], [], _POLL_S)
        now = time.monotonic()
        for link in self._links:
            silent_s = now - max(link.heard_s, asked_s)
            if link.rank not in answered and silent_s > SILENCE_S:
                raise self._lose(
                    BackendError(
                        "peer-lost",
                        f"rank {link.rank} of the training (process {link.pid}) has said nothing for "
                        f"{silent_s:.0f} s; the training has ended",
                        facts={"rank": link.rank, "pid": link.pid, "limit_s": SILENCE_S},
                        remedy="The training can be saved as it is, and goes on from a save.",
                    )
                )

    # --- the end ---------------------------------------------------------------------------------

    def _lose(self, error: BackendError) -> BackendError:
        """End the others, and answer every later question with this error."""
        self._lost = error
        self.end(is_whole=False)
        return error

    def end(self, *, is_whole: bool = True) -> None:
        """Let the other ranks go; none of their processes is left."""
        links, self._links = self._links, []
        if not links:
            return
        atexit.unregister(self.end)
        if self._lost is None:
            self._lost = BackendError("peer-lost", "the training on several devices has ended")
        if is_whole:
            for link in links:
                try:
                    link.send(End())
                except BackendError:
                    is_whole = False
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close(is_whole=is_whole)
        for link in links:
            link.end(_END_S if is_whole else 0)
        leave(self._place)


def _message(example: Example) -> TrainExample:
    mask = [False] * len(example.token_ids)
    for at in example.trained:
        mask[at] = True
    return TrainExample(token_ids=list(example.token_ids), loss_mask=mask)


def _told_by(rank: int, broke: Broke) -> BackendError:
    error = broke.error
    return BackendError(
        error.code, f"rank {rank}: {error.message}", facts={**error.facts, "rank": rank}, remedy=error.remedy
    )


def _refuse_other(rank: int, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    for name, value in expected.items():
        if found.get(name) != value:
            raise _differs(rank, name, value, str(found.get(name)))


def _differs(rank: int, name: str, expected: str, found: str) -> BackendError:
    return BackendError(
        "peer-differs",
        f"rank {rank} of the training has another {name} than rank 0: expected {expected}, found {found}; "
        "the training on several devices was ended",
        facts={"rank": rank, "what": name, "expected": expected, "found": found},
        remedy="Every rank needs the same plugin, model and kind of arithmetic: "
        "`vox-host plugin check` on each device says which one computes otherwise.",
    )


def _finish(steps: Generator[None, None, dict[int, M]]) -> dict[int, M]:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            found: dict[int, M] = stop.value
            return found
