"""How tokens are chosen: options of `generate` and `chat`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from vox_host.app.service import draw_seed
from vox_plugin_api import messages as m

__all__ = ["MAX_INT", "SamplingOptions"]

MAX_INT = 2**31 - 1
"""The same bound as over HTTP."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The options as given."""

    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            max=100.0,
            help="0 always takes the likeliest token; higher is more random.",
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        typer.Option("--top-k", min=0, max=MAX_INT, help="Draw among this many likeliest tokens; 0: all."),
    ] = 0
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0.0,
            max=1.0,
            help="Draw among the likeliest tokens that together have this probability.",
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            min=0.0,
            max=1.0,
            help="Leave out tokens less likely than this share of the likeliest.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        typer.Option(
            "--repetition-penalty",
            min=0.01,
            max=100.0,
            help="Above 1 makes repeated tokens less likely; 1: off.",
        ),
    ] = 1.0
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", min=-(2**63), max=2**64 - 1, help="Equal seeds give equal bytes; default: drawn."
        ),
    ] = None

    def as_params(self) -> m.SamplingParams:
        """Return them for a worker; a seed is drawn where chance has a part and none was given."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.temperature == 0 else draw_seed()
        return m.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            # As over HTTP: the generator's seed is unsigned, -1 is its last one.
            seed=seed % 2**64,
        )
