"""An example as the model sees it: text with the part that is learned told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from vox_host.models.tokenizer import Tokenizer
from vox_host.printable import printable
from vox_host.training.data.encoding import Example

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["PreviewPiece", "marked_preview", "preview", "render_preview"]

_READ_STYLE = "dim"
_TRAINED_STYLE = "bold green"


@dataclass(frozen=True, slots=True)
class PreviewPiece:
    """Tokens that follow each other and are all learned, or all not."""

    text: str
    is_trained: bool
    token_ids: tuple[int, ...]


def preview(example: Example, tokenizer: Tokenizer) -> list[PreviewPiece]:
    """Return the pieces of an example; special tokens are shown as they are spelled."""
    pieces: list[PreviewPiece] = []
    pairs = zip(example.token_ids, example.loss_mask, strict=True)
    for is_trained, run in groupby(pairs, key=lambda pair: bool(pair[1])):
        ids = tuple(token_id for token_id, _ in run)
        content = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        pieces.append(PreviewPiece(content.decode("utf-8", "replace"), is_trained, ids))
    return pieces


def render_preview(pieces: Sequence[PreviewPiece]) -> Text:
    """Return the pieces in colour: what is learned is bold and green, the rest dim."""
    from rich.text import Text

    text = Text()
    for piece in pieces:
        text.append(_shown(piece.text), style=_TRAINED_STYLE if piece.is_trained else _READ_STYLE)
    return text


def marked_preview(pieces: Sequence[PreviewPiece]) -> str:
    """Return the pieces without colour: what is learned lies between >>> and <<<."""
    return "".join(f">>>{_shown(p.text)}<<<" if p.is_trained else _shown(p.text) for p in pieces)


def _shown(text: str) -> str:
    """Spell control characters: a data file must not command the terminal."""
    return printable(text, keep="\n\t")
