"""Read a data file: its format, its digest, and every row that is not fit to be trained on.

Rows are not kept: iterating reads the file again and holds one at a time, and says so where it is
no longer the file that was checked.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import UsageError
from vox_host.quoted import quoted
from vox_host.training.data.formats import CONVERSATIONS, Content, FormatName, detect, parse
from vox_host.training.data.lines import Line, LineReader, changed, open_lines
from vox_host.training.data.problems import Problem, Problems, data_error
from vox_host.training.data.row_json import RowError, parse_line

__all__ = ["Row", "Rows", "read_rows"]


@dataclass(frozen=True, slots=True)
class Row:
    """What one line says."""

    line: int
    """From 1."""
    content: Content


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A data file, checked."""

    path: Path
    digest: str
    """SHA-256 of the file, in hex."""
    format: FormatName | None
    """That of most rows; None where no row has one."""
    count: int
    """Rows that can be used."""
    found: Problems
    ignored_keys: dict[str, int]
    """Keys that say nothing here, and in how many rows they are."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Bad rows by line; of very many, the first thousand."""
        return tuple(sorted(self.found.kept))

    @property
    def problem_count(self) -> int:
        """How many there are."""
        return self.found.count

    @property
    def are_conversations(self) -> bool:
        """Whether the rows are rendered by a chat template."""
        return self.format in CONVERSATIONS

    def check(self) -> None:
        """Refuse the file if a row is bad.

        Raises:
            UsageError: with every bad row and its line.
        """
        if self.found.count:
            raise data_error(self.path, self.found)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Row]:
        """Read the usable rows again, one at a time.

        Raises:
            UsageError: the file can't be read, or is no longer the one that was checked.
        """
        with open_lines(self.path) as lines:
            for line in _rows_of(lines):
                try:
                    row = parse_line(line.content, is_first=line.number == 1)
                    if detect(row) != self.format:
                        continue
                    content, _ = parse(row, self.format)
                except RowError:
                    continue  # reported by `read_rows`; a file that changed is caught by its digest
                yield Row(line.number, content)
            if lines.digest != self.digest:
                raise changed(self.path)


def read_rows(path: Path) -> Rows:
    """Read and check a whole file; the tokenizer's part of the checks is in `encode_rows`.

    Raises:
        UsageError: the file is missing, no regular file or not readable, or holds no row.
    """
    problems = Problems()
    ignored: Counter[str] = Counter()
    lines_by_format: dict[FormatName, array[int]] = {}
    bad_lines: dict[FormatName, set[int]] = {}
    any_line = False
    with open_lines(path) as lines:
        for line in _rows_of(lines):
            any_line = True
            form: FormatName | None = None
            try:
                row = parse_line(line.content, is_first=line.number == 1)
                form = detect(row)
                lines_by_format.setdefault(form, array("Q")).append(line.number)
                ignored.update(parse(row, form)[1])
            except RowError as error:
                problems.add(line.number, str(error))
                if form is not None:
                    bad_lines.setdefault(form, set()).add(line.number)
        digest = lines.digest
    if not any_line:
        raise UsageError(
            "data-empty",
            f"{path} holds no row; nothing was trained",
            remedy='Write a JSON object a line: {"messages": [...]} or {"prompt": "", "completion": ""}.',
        )
    if problems.count and _is_array(path, has_rows=bool(lines_by_format), is_one=problems.count == 1):
        raise UsageError(
            "data-is-array",
            f"{path} is one JSON array; a data file has a JSON object a line (JSONL); nothing was trained",
            remedy=f"`jq -c '.[]' {quoted(path)} > rows.jsonl` makes one of it, then --data rows.jsonl.",
        )
    chosen = max(lines_by_format, key=lambda name: len(lines_by_format[name]), default=None)
    for form, numbers in lines_by_format.items():
        if form != chosen:
            for number in numbers:
                if number not in bad_lines.get(form, ()):
                    problems.add(number, f"is {form}, but most rows of the file are {chosen}")
    good = 0 if chosen is None else len(lines_by_format[chosen]) - len(bad_lines.get(chosen, ()))
    return Rows(
        path=path,
        digest=digest,
        format=chosen,
        count=good,
        found=problems.joined(Problems()),
        ignored_keys=dict(ignored),
    )


def _is_array(path: Path, *, has_rows: bool, is_one: bool) -> bool:
    """Whether the file is one array over its lines, rather than lines of which one is an array."""
    with path.open("rb") as file:
        first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0].rstrip()
    if has_rows:
        # Written with an object a line, the last of them has no comma and is a row.
        return first == b"["
    return first.startswith(b"[") and (is_one or not first.endswith(b"]"))


def _rows_of(lines: LineReader) -> Iterator[Line]:
    """Leave out blank lines behind the last row: editors add them. Others are an error."""
    blank: list[Line] = []
    for line in lines:
        if line.content is not None and not line.content.strip():
            blank.append(line)
            continue
        yield from blank
        blank.clear()
        yield line
