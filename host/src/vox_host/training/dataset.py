"""From data files to the examples that a run trains on and those it holds out."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vox_host.counted import agreeing, counted
from vox_host.errors import UsageError
from vox_host.models.tokenizer import Tokenizer
from vox_host.training.data import Encoded, Example, Rows, TemplateChoice, encode_rows, read_rows, split
from vox_host.training.data.encoding import Answers

__all__ = ["Dataset", "Holdout", "encode_dataset", "parse_holdout", "read_dataset"]

Holdout = int | Path | None
"""How many examples to hold out, a file of them, or None: as many as seems right."""

_SHARE, _MOST, _FEWEST_ROWS = 10, 64, 20
"""Where nobody chose: a tenth, 64 at most, and nothing of fewer than 20 rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """The rows of a run, read and checked, not yet encoded."""

    rows: Rows
    held_out: Rows | None
    """Of a file of its own."""

    @property
    def needs_template(self) -> bool:
        """Say whether conversations are among them."""
        both = (self.rows, self.held_out)
        return any(rows.are_conversations for rows in both if rows is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The examples of a run."""

    train: list[Example]
    held_out: list[Example]
    warnings: tuple[str, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return max(len(example.token_ids) for example in [*self.train, *self.held_out])


def parse_holdout(text: str | None) -> Holdout:
    """Return what `--holdout` says: a number of examples, or a file.

    Raises:
        UsageError: a negative number.
    """
    if text is None:
        return None
    try:
        number = int(text)
    except ValueError:
        return Path(text)
    if number < 0:
        raise UsageError(
            "usage", f"--holdout is a number from 0 or a file; found {text}; nothing was started"
        )
    return number


def read_dataset(data: Path, holdout: Holdout) -> Files:
    """Read and check both files.

    Raises:
        UsageError: one can't be read, or holds no row.
    """
    if isinstance(holdout, Path) and not holdout.exists():
        raise UsageError(
            "data-missing",
            f"--holdout {holdout}: there is no such file, and it is no whole number; nothing was started",
            remedy="Give how many rows to hold out, or a file of them.",
        )
    return Files(rows=read_rows(data), held_out=read_rows(holdout) if isinstance(holdout, Path) else None)


def encode_dataset(
    files: Files,
    tokenizer: Tokenizer,
    template: TemplateChoice | None,
    *,
    holdout: Holdout,
    max_length: int,
    answers: Answers,
    seed: int,
    most_held_out: int | None = None,
) -> Dataset:
    """Encode the rows and hold some of them out.

    Args:
        most_held_out: a preset's bound where `holdout` is None.

    Raises:
        UsageError: a row is bad (all are named), or holding out leaves nothing to train on.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(template.open(tokenizer)) if template is not None else None

        def encode(rows: Rows) -> Encoded:
            encoded = encode_rows(rows, tokenizer, opened, max_length, answers=answers)
            encoded.check()
            return encoded

        encoded = encode(files.rows)
        beside = encode(files.held_out) if files.held_out is not None else None
    warnings = [*encoded.warnings, *_ignored(files.rows)]
    if beside is not None:
        trained = {example.digest() for example in encoded.examples}
        seen = [example.line for example in beside.examples if example.digest() in trained]
        all_held = len(beside.examples)
        if seen:
            rows = f"{counted(all_held, 'held-out row')} {agreeing(all_held, 'is', 'are')}"
            warnings.append(
                f"{len(seen)} of the {rows} also trained on "
                f"(line {seen[0]} is the first): the held-out loss will look better than it is"
            )
        return Dataset(train=encoded.examples, held_out=beside.examples, warnings=tuple(warnings))
    there = len(encoded.examples)
    wanted = _how_many(holdout if isinstance(holdout, int) else None, there, most_held_out)
    if wanted >= there:
        raise UsageError(
            "usage",
            f"--holdout {wanted} leaves nothing to train on: there {agreeing(there, 'is', 'are')} "
            f"{counted(there, 'row')}; nothing was started",
        )
    parts = split(encoded.examples, wanted, seed)
    return Dataset(
        train=[encoded.examples[index] for index in parts.train],
        held_out=[encoded.examples[index] for index in parts.held_out],
        warnings=tuple(warnings),
    )


def _how_many(asked: int | None, examples: int, most: int | None) -> int:
    if asked is not None:
        return asked
    most = _MOST if most is None else most
    return min(most, examples // _SHARE) if examples >= _FEWEST_ROWS else 0


def _ignored(rows: Rows) -> list[str]:
    return [
        f"the key {key!r} of {counted(count, 'row')} says nothing here"
        for key, count in rows.ignored_keys.items()
    ]
