"""Examples of a step, and how many of them run at once. Pure.

A micro-batch is some neighbours of the step laid side by side, one sequence each, so that no
example sees another. How a step is cut decides memory and time; no bit depends on it, since rows
are independent, gradients are made per example, and the head's slices are cut within examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mens_core.kv_blocks import blocks_for
from mens_core.models.passes import ExampleRows
from mens_core.ops import BLOCK, Batch, Ints
from vox_plugin_api.backend import BackendError
from vox_plugin_api.train_messages import TrainExample

__all__ = ["Example", "HeadSlice", "MicroBatch", "cut", "pack", "read_examples"]

MOST_EXAMPLES = 1 << 16
"""In a step: their numbers have 16 bits in the counters of random words."""


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence and the positions of the tokens that are learned, ascending, at least one."""

    token_ids: tuple[int, ...]
    trained: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Positions that are run: those that something trained follows from."""
        return self.trained[-1]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Rows whose logits are made at once: whole chunks of 128 trained positions of an example."""

    hidden_rows: Ints
    """[L] rows of the micro-batch."""
    targets: Ints
    """[L] the token that follows each."""
    rows: ExampleRows
    """One piece per owner."""
    owners: tuple[int, ...]
    """Which example of the micro-batch each piece belongs to; some may have several, in order."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Neighbouring examples, ready to run."""

    batch: Batch
    """Its logit rows are those with a trained token behind them."""
    rows: ExampleRows
    loss_positions: Ints
    """[L] position of each logit row in its example."""
    loss_starts: Ints
    """[E + 1] example e owns logit rows loss_starts[e] to loss_starts[e + 1]."""
    slices: tuple[HeadSlice, ...]

    @property
    def blocks(self) -> int:
        """KV blocks that it needs in each layer."""
        return int(self.batch.block_tables.max()) + 1


def read_examples(examples: Sequence[TrainExample], *, vocab_size: int, context_length: int) -> list[Example]:
    """Check every example before anything runs.

    Raises:
        BackendError: `invalid-example`, with the number of each one that is wrong, and why.
    """
    if len(examples) > MOST_EXAMPLES:
        raise BackendError(
            "invalid-example",
            f"a step has at most {MOST_EXAMPLES} examples; {len(examples)} were given and nothing was run",
            facts={"examples": len(examples), "limit": MOST_EXAMPLES},
            remedy="Give them to several steps.",
        )
    read: list[Example] = []
    problems: dict[str, str] = {}
    for index, example in enumerate(examples):
        problem = _problem(example, vocab_size, context_length)
        if problem is not None:
            problems[str(index)] = problem
            continue
        trained = tuple(i for i, is_trained in enumerate(example.loss_mask) if is_trained)
        read.append(Example(tuple(example.token_ids), trained))
    if problems:
        named = "; ".join(f"example {index} {problem}" for index, problem in list(problems.items())[:5])
        raise BackendError(
            "invalid-example",
            f"not right, {len(problems)} of {len(examples)} examples: {named}. Nothing was run",
            facts={"problems": problems},
        )
    return read


def _problem(example: TrainExample, vocab_size: int, context_length: int) -> str | None:
    tokens, mask = example.token_ids, example.loss_mask
    if len(mask) != len(tokens):
        return f"has {len(tokens)} tokens and a loss mask of {len(mask)}"
    if mask[0]:
        return "marks its first token as learned, which follows nothing"
    if not any(mask):
        return "has no token to learn"
    if len(tokens) > context_length:
        return f"has {len(tokens)} tokens; the context is {context_length}"
    wrong = next((i for i, token in enumerate(tokens) if not 0 <= token < vocab_size), None)
    if wrong is not None:
        return f"has token {tokens[wrong]} at position {wrong}; the vocabulary has {vocab_size}"
    return None


def cut(examples: Sequence[Example], size: int | None, rows_at_once: int = 512) -> Iterator[range]:
    """Yield which examples run together: `size` at a time, or as many as have so many rows; one, at least."""
    begin = 0
    while begin < len(examples):
        end = begin + 1
        if size is not None:
            end = min(begin + size, len(examples))
        else:
            rows = examples[begin].rows
            while end < len(examples) and rows + examples[end].rows <= rows_at_once:
                rows += examples[end].rows
                end += 1
        yield range(begin, end)
        begin = end


def pack(
    examples: Sequence[Example], first: int, *, whole: bool = False, logit_rows: int = BLOCK
) -> MicroBatch:
    """Lay examples side by side.

    Args:
        first: the number of the first one in the step.
        whole: run every position, the last ones too.
        logit_rows: rows of a head's slice at most; a chunk, at least.
    """
    lengths = [len(example.token_ids) if whole else example.rows for example in examples]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    positions = np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)
    trained = [np.array(example.trained, np.int32) - 1 for example in examples]
    rows = ExampleRows(
        positions=positions,
        examples=np.repeat(np.arange(first, first + len(examples)), lengths).astype(np.int32),
        starts=starts,
    )
    batch = Batch(
        token_ids=np.concatenate(
            [example.token_ids[:length] for example, length in zip(examples, lengths, strict=True)]
        ).astype(np.int32),
        positions=positions,
        starts=starts,
        block_tables=_block_tables(lengths),
        logit_rows=np.concatenate([start + at for start, at in zip(starts, trained, strict=False)]).astype(
            np.int32
        ),
    )
    return MicroBatch(
        batch=batch,
        rows=rows,
        loss_positions=np.concatenate(trained),
        loss_starts=np.cumsum([0, *map(len, trained)]).astype(np.int32),
        slices=tuple(_head_slices(examples, trained, starts, first, logit_rows)),
    )


def _block_tables(lengths: Sequence[int]) -> Ints:
    counts = [blocks_for(length) for length in lengths]
    tables = np.full((len(lengths), max(counts)), -1, np.int32)
    taken = 0
    for table, count in zip(tables, counts, strict=True):
        table[:count] = range(taken, taken + count)
        taken += count
    return tables


def _head_slices(
    examples: Sequence[Example], trained: Sequence[Ints], starts: Ints, first: int, most: int
) -> Iterator[HeadSlice]:
    """Gather chunks of 128 trained positions, in order, up to so many rows at once.

    A chunk is never split: what the output matrix's update sums over an example is C128, and its
    chunks are these.
    """
    pieces: list[tuple[int, Ints]] = []
    for owner, at in enumerate(trained):
        for begin in range(0, len(at), BLOCK):
            piece = at[begin : begin + BLOCK]
            if pieces and sum(len(rows) for _, rows in pieces) + len(piece) > most:
                yield _head_slice(examples, pieces, starts, first)
                pieces = []
            pieces.append((owner, piece))
    yield _head_slice(examples, pieces, starts, first)


def _head_slice(
    examples: Sequence[Example], pieces: Sequence[tuple[int, Ints]], starts: Ints, first: int
) -> HeadSlice:
    lengths = [len(at) for _, at in pieces]
    positions = np.concatenate([at for _, at in pieces])
    owners = [owner for owner, _ in pieces]
    return HeadSlice(
        hidden_rows=np.concatenate([starts[owner] + at for owner, at in pieces]).astype(np.int32),
        targets=np.array(
            [examples[owner].token_ids[position + 1] for owner, at in pieces for position in at.tolist()],
            np.int32,
        ),
        rows=ExampleRows(
            positions=positions,
            examples=np.repeat(np.array(owners) + first, lengths).astype(np.int32),
            starts=np.cumsum([0, *lengths]).astype(np.int32),
        ),
        owners=tuple(owners),
    )
