"""How a comparison is printed for people: tables, where sides part, and one line that is the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vox_host.cli.output import print_line, print_table
from vox_host.counted import counted
from vox_host.parity.compare import Parting, SideResult
from vox_host.parity.training import TrainingParting, short
from vox_host.printable import printable

__all__ = ["print_comparison"]


def print_comparison(
    facts: dict[str, Any], results: Sequence[SideResult], partings: Sequence[Parting | TrainingParting]
) -> None:
    """Print a comparison; what a certificate from elsewhere says is spelled where it is no plain text.

    Args:
        facts: the certificate that is made of it.
        results: of all sides, those from elsewhere behind those asked here.
    """
    rows = [
        (
            printable(result.label),
            str(answer.number),
            short(answer.logits_digest),
            str(len(answer.token_ids)),
            short(answer.answer_sha256),
        )
        for result in results
        for answer in result.answers
    ]
    print_table(("side", "request", "logits", "tokens", "answer"), rows)
    steps = [
        (
            printable(result.label),
            str(step.step) if step.step else "before",
            step.loss,
            step.gradient_norm,
            step.learning_rate,
            short(step.adapter_digest),
        )
        for result in results
        for step in result.taken
    ]
    if steps:
        print_table(("side", "step", "loss", "gradient norm", "learning rate", "adapter"), steps)
    for result in results:
        lane = printable(result.lane)
        print_line(f"{printable(result.label)}: lane {lane}, transcript sha256:{result.transcript_sha256}")
    if any(
        result.transcript is None and result.transcript_sha256 != results[0].transcript_sha256
        for result in results
    ):
        print_line(
            "A transcript from elsewhere is not compared, its answers are, one by one: a transcript also "
            "holds in which order they came (--at-once) and the context that was given (--context-length, "
            "--kv-cache-mib)."
        )
    taken = max(len(result.taken) for result in results) - 1 if steps else 0
    # A verdict is quoted alone: where each side ran is a part of it.
    lanes = ", ".join(dict.fromkeys(f"lane {printable(result.lane)}" for result in results))
    for parting in partings:
        print_line(f"{printable(parting.side)} differs from {printable(parting.against)}: {parting}")
    left_out = "".join(f", {what} left out" for what in facts["left_out"])
    print_line(
        f"{facts['verdict']}: {counted(len(results), 'side')} ({lanes}), "
        f"{counted(facts['requests'], 'request')}, "
        f"{counted(taken, 'step')} of training{left_out}, "
        f"model sha256:{facts['model_digest']}, prompts sha256:{facts['prompts_digest']}"
    )
