"""Serve many sequences from one model, a step at a time.

Sequences join and leave between steps (continuous batching). A step is: admit who fits, plan
the rows, run the model once over all of them, hand out tokens. Admission is first come, first
served, bounded by the block pool; who must wait waits, who can never fit is refused at once.
What a sequence gets is a function of its own request alone, never of who else is or was served:
whole KV blocks that hold its first tokens already are used as they are, and hold what it would have
written. The last token of a prompt, and every one from which logits are wanted, is always computed.
A non-finite value fails the sequence whose row it is in, and nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Many
from typing import Any, Protocol

from mens_core.kv_blocks import BlockPool, blocks_for
from mens_core.kv_memory import KvMemory
from mens_core.models.model import StepResult
from mens_core.ops import BLOCK, Batch, KvCache
from mens_core.prefix_index import WholeBlock
from mens_core.readout import LogitRow, not_finite, take_readings
from mens_core.sampling import check_sampling
from mens_core.scheduler import Slice, StepLimits, plan_step
from mens_core.sequence import Sequence, SequenceRequest
from mens_core.step_batch import assemble
from mens_core.wishes import Reading, Wish
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import FinishReason, GeneratedToken

__all__ = ["Engine", "ServedModel"]


class ServedModel(Protocol):
    """What the engine needs of a model."""

    def forward(self, batch: Batch, cache: KvCache, wishes: Many[Wish] = ()) -> StepResult:
        """Run one step over the batch's rows, and read what is wished of its logits."""
        ...


class Engine:
    """One model, one KV cache, and the sequences they serve."""

    def __init__(
        self,
        model: ServedModel,
        cache: KvCache,
        *,
        vocab_size: int,
        context_length: int,
        blocks: int,
        max_sequences: int = 64,
        limits: StepLimits | None = None,
        origin: str = "",
        memory: KvMemory | None = None,
    ) -> None:
        """Start with nothing queued and no block touched.

        Args:
            origin: what decides a block's bytes beside token ids: model, adapter, numerics.
            memory: what blocks take that nobody has touched yet; None: all of it is taken already.
        """
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_sequences = max_sequences
        self._limits = limits or StepLimits()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._kept_out: tuple[Sequence, int] | None = None
        """Who was not admitted last, and what had changed in the pool until then."""
        self._origin = origin
        self._memory = memory
        self.pool = BlockPool(blocks, taken_freely=None if memory is None else memory.taken_freely)
        self.steps = 0
        self.computed = 0
        """Rows that the model ran."""
        self.reused = 0
        """Positions of prompts that it need not run."""

    @property
    def waiting(self) -> int:
        """Sequences that are not admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Sequences that own blocks."""
        return len(self._running)

    def facts(self) -> dict[str, int]:
        """Return what was computed and what was not, and the KV blocks that it took, as an observation."""
        return {
            "peak_kv_blocks": self.pool.touched,
            "kept_kv_blocks": self.pool.kept,
            "computed_tokens": self.computed,
            "cached_tokens": self.reused,
        }

    # --- coming and going ----------------------------------------------------------------------

    def submit(self, request: SequenceRequest) -> Sequence:
        """Queue a sequence; nothing is computed yet.

        Raises:
            BackendError: `invalid-token`, `invalid-sampling`, `context-overflow` or
                `kv-cache-too-small`; nothing was queued.
        """
        self.check(request)
        sequence = Sequence(request)
        self._waiting.append(sequence)
        return sequence

    def check(self, request: SequenceRequest) -> None:
        """Refuse what can never be served; see `submit`."""
        for position, token_id in enumerate(request.token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise BackendError(
                    "invalid-token",
                    f"token {token_id} at position {position} is not in the vocabulary; nothing was started",
                    facts={"token_id": token_id, "position": position, "vocab_size": self._vocab_size},
                )
        check_sampling(request.sampling, self._vocab_size)
        prompt = len(request.token_ids)
        if prompt + request.max_tokens > self._context_length:
            raise BackendError(
                "context-overflow",
                f"{prompt} prompt tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{self._context_length} positions; nothing was started",
                facts={
                    "prompt_tokens": prompt,
                    "max_tokens": request.max_tokens,
                    "requested": prompt + request.max_tokens,
                    "context_length": self._context_length,
                },
                remedy="Shorten the prompt, lower max_tokens, or load with a larger context_length.",
            )
        needed = blocks_for(request.positions)
        if needed > self.pool.total:
            raise BackendError(
                "kv-cache-too-small",
                f"the request needs {needed} KV blocks of {self.pool.total}; nothing was started",
                facts={
                    "needed_blocks": needed,
                    "total_blocks": self.pool.total,
                    "positions": request.positions,
                },
                remedy="Lower max_tokens or allow a larger --kv-cache-mib.",
            )

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence and free its blocks now; one that is done stays as it is."""
        if not sequence.is_done:
            sequence.is_cancelled = True
            self._let_go(sequence)

    def stop(self, code: str, message: str) -> None:
        """End every sequence with an error; afterwards the engine is empty."""
        for sequence in [*self._waiting, *self._running]:
            self._fail(sequence, code, message, {"generated_tokens": sequence.generated})

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.blocks is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            sequence.blocks.release()
            sequence.blocks = None

    def _admit(self) -> None:
        # Strictly in order: letting a short request pass a long one could starve the long one.
        while self._waiting and len(self._running) < self._max_sequences:
            sequence = self._waiting[0]
            if self._kept_out == (sequence, self.pool.changes):
                return  # to look a long prompt up again costs milliseconds, in every step
            needed = blocks_for(sequence.request.positions)
            prefix = self._known_prefix(sequence)
            self._kept_out = (sequence, self.pool.changes)
            if not self.pool.can_reserve(needed, prefix):
                return
            refusal = None if self._memory is None else self._memory.refusal(self.pool, needed, prefix)
            if refusal is not None and self.pool.reserved:
                return  # whoever ends first leaves blocks that are touched already
            if refusal is not None:
                said = refusal.error
                self._fail(sequence, said.code, said.message, said.facts, said.remedy)
                continue
            self._kept_out = None
            self._waiting.popleft()
            sequence.blocks = self.pool.reserve(needed, prefix)
            self._skip(sequence, len(prefix))
            self._running.append(sequence)

    def _known_prefix(self, sequence: Sequence, behind: Many[WholeBlock] = ()) -> list[WholeBlock]:
        return self.pool.find_prefix(
            self._origin, sequence.request.token_ids, sequence.request.reusable, behind
        )

    def _skip(self, sequence: Sequence, blocks: int) -> None:
        sequence.cached += blocks * BLOCK
        sequence.reused += blocks * BLOCK
        self.reused += blocks * BLOCK

    def _reuse(self) -> None:
        """Let prompts go on with blocks that others have written since they were admitted."""
        for sequence in self._running:
            blocks = sequence.blocks
            if blocks is None or sequence.prompt_is_cached:
                continue
            # Only where the next position begins a block, and none is taken for it yet.
            if sequence.cached == len(blocks.shared) * BLOCK == len(blocks.table) * BLOCK:
                found = self._known_prefix(sequence, blocks.shared)
                for whole in found:
                    blocks.adopt(whole)
                self._skip(sequence, len(found))

    # --- one step ------------------------------------------------------------------------------

    def step(self) -> int:
        """Run the model once over what is due; return how many rows that were.

        0 means that nobody can go on: nothing is queued, or every running sequence waits for
        its consumer. When the lane refuses a step with a typed error (a device has no room for it),
        the sequence with most rows fails with that, and the others are tried again. When it raises
        anything else, the sequences of the step fail with `step-failed`, and the exception goes to
        the caller.
        """
        self._admit()
        self._reuse()
        slices = plan_step(self._running, self._limits)
        if not slices:
            return 0
        self.steps += 1
        try:
            self._run(slices)
        except BackendError as refusal:
            # The one that asked for most; the others' rows are due again in the next step.
            said, largest = refusal.error, max(slices, key=lambda piece: piece.count)
            self._fail(largest.sequence, said.code, said.message, dict(said.facts), said.remedy)
        except Exception as error:
            for piece in slices:
                self._fail(
                    piece.sequence,
                    "step-failed",
                    f"the lane raised {type(error).__name__} during a step; the answer is incomplete",
                    {"exception": f"{type(error).__name__}: {error}"},
                )
            raise
        return sum(piece.count for piece in slices)

    def _run(self, slices: list[Slice]) -> None:
        batch, wanted = assemble(slices)
        result = self._model.forward(batch, self._cache, [row.wish for row in wanted])
        if result.faults:
            owners = [piece.sequence for piece in slices for _ in range(piece.count)]
            for fault in result.faults:
                self._fail_non_finite(owners[fault.row], fault.name, int(batch.positions[fault.row]))
        self.computed += len(batch.positions)
        for piece in slices:
            sequence = piece.sequence
            sequence.cached += piece.count
            # One that failed in this step has let go of its blocks: what it wrote last is not shared.
            if sequence.blocks is not None:
                sequence.blocks.share_whole(self._origin, sequence.tokens, sequence.cached)
        self._read_out(list(zip(wanted, result.readings, strict=True)), spoiled=bool(result.faults))
        for piece in slices:
            self._finish_if_only_scored(piece.sequence)

    def _read_out(self, read: list[tuple[LogitRow, Reading]], *, spoiled: bool) -> None:
        """Take what was read; `spoiled`: some sequence of the step has failed already."""
        if spoiled:
            read = _alive(read)
        if faults := not_finite(read):
            for found in faults:
                self._fail_non_finite(found.row.sequence, found.operator, found.row.position)
            read = _alive(read)
        for one in take_readings(read):
            self._append(one.row.sequence, one.token)

    def _append(self, sequence: Sequence, token: GeneratedToken) -> None:
        sequence.generated += 1
        if token.token_id in sequence.request.stop_token_ids:
            sequence.stop_token_id = token.token_id
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(token.token_id)
        sequence.penalties.note(token.token_id)
        sequence.ready.append(token)
        if sequence.generated == sequence.request.max_tokens:
            self._finish(sequence, "length")

    def _finish_if_only_scored(self, sequence: Sequence) -> None:
        if sequence.request.max_tokens == 0 and sequence.prompt_is_cached and not sequence.is_done:
            self._finish(sequence, "length")

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._let_go(sequence)

    # --- failures ------------------------------------------------------------------------------

    def _fail_non_finite(self, sequence: Sequence, operator: str, position: int) -> None:
        self._fail(
            sequence,
            "non-finite",
            f"{operator} is not finite at position {position}; only this request ends",
            {"operator": operator, "position": position, "generated_tokens": sequence.generated},
        )

    def _fail(
        self, sequence: Sequence, code: str, message: str, facts: dict[str, Any], remedy: str | None = None
    ) -> None:
        # The first operator that went wrong is the cause; the rest is what followed from it.
        if not sequence.is_done:
            sequence.failure = BackendError(code, message, facts=facts, remedy=remedy)
            self._let_go(sequence)


def _alive(read: list[tuple[LogitRow, Reading]]) -> list[tuple[LogitRow, Reading]]:
    """Leave out what belongs to a sequence that has ended."""
    return [(row, reading) for row, reading in read if not row.sequence.is_done]
