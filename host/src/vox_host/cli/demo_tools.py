"""The demo's second act: a small adapter is trained to call tools, and asked beside its base.

Both get the very same prompts: rows that were not trained on, rendered by the template that trained.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Literal

import typer

from vox_host.cli.demo_process import let_end, own_command
from vox_host.cli.demo_server import get, post, serving
from vox_host.cli.output import print_line
from vox_host.counted import counted
from vox_host.errors import VoxError
from vox_host.models.catalogue import Catalogue
from vox_host.models.tokenizer import Tokenizer
from vox_host.quoted import quoted
from vox_host.settings import load_settings
from vox_host.training.data import choose_template, read_rows, shipped_data
from vox_host.training.rates import Comparison, compare
from vox_host.training.tool_calls import Question, grade, questions

__all__ = ["second_act"]

DATA = "tool-calls"
# What two cores without a GPU do in three minutes; a slower machine is stopped, and keeps what it has.
OPTIONS = (
    *("--rank", "8", "--learning-rate", "1e-3", "--batch-size", "4", "--steps", "64"),
    *("--holdout", "8", "--eval-every", "32", "--save-every", "32"),
)
TRAIN_LIMIT_S = 225.0
QUESTIONS = 60
MAX_TOKENS = 72
AT_ONCE = 20
SHOWN = 2


def second_act(model: str, runs: Path) -> Path:
    """Train, serve both, ask both, and show what the training has gained; return the run.

    Raises:
        VoxError: something on the way failed, or the adapter is no better.
    """
    run = _train(model, runs)
    asked = questions(read_rows(shipped_data(DATA, "heldout")))[:QUESTIONS]
    prompts = _prompts(model, asked)
    many = counted(len(asked), "request")
    print_line(f"\n==> base and adapter side by side, {many} that were not trained on")
    print_line(f"    vox-host serve --model {model}\n    vox-host serve --model {quoted(run)}")
    with serving(model) as base, serving(str(run)) as adapted:
        started = time.monotonic()
        answers = [_answers(port, prompts) for port in (base, adapted)]
        took_s = time.monotonic() - started
    for number, question in enumerate(asked[:SHOWN]):
        print_line(f"    asked     {question.messages[-1]['content']}")
        for who, texts in zip(("base", "adapter"), answers, strict=True):
            print_line(f"    {who:<8}  {' '.join(texts[number].split())[:160]}")
    found = _compared(asked, answers, "is_valid")
    right = _compared(asked, answers, "is_expected")
    print_line("    valid tool calls (JSON, a tool that was offered, arguments of its schema)")
    print_line(f"    base      {found.before}")
    print_line(f"    adapter   {found.after}")
    print_line(
        f"    gain      {found.difference:+.1%} (95% interval {found.low:+.1%} to {found.high:+.1%}), "
        f"asked in {took_s:.0f} s"
    )
    print_line(f"    the very call that was expected: base {right.before}, adapter {right.after}")
    if not found.is_improved:
        raise VoxError(
            "demo-no-gain",
            "the adapter calls tools no better than its base, as far as these requests can tell",
            facts=[("found", str(found)), ("run", str(run))],
            remedy=f"`vox-host train --resume {quoted(run)}` trains on, where it was stopped for its time.",
        )
    return run


def _train(model: str, runs: Path) -> Path:
    run = next(path for number in count(1) if not (path := runs / f"{DATA}-{number}").exists())
    data = shipped_data(DATA)
    arguments = ["train", "--model", model, "--data", str(data), "--out", str(run), *OPTIONS]
    print_line(
        f"\n==> an adapter that calls tools, trained in 4 minutes at most\n    vox-host {' '.join(arguments)}"
    )
    started = time.monotonic()
    with own_command(arguments) as process:
        try:
            process.wait(TRAIN_LIMIT_S)
        except subprocess.TimeoutExpired:
            print_line("    time is up: as Ctrl-C would, this saves what there is")
            process.send_signal(signal.SIGINT)
            let_end(process)
    status = process.returncode
    if status not in (0, 128 + signal.SIGINT):
        # The command has said what went wrong; its status is ours.
        raise typer.Exit(status)
    print_line(f"    {time.monotonic() - started:.1f} s")
    return run


def _prompts(model: str, asked: Sequence[Question]) -> list[list[int]]:
    """Return the token ids of every request, as the server makes them for a chat with tools."""
    tokenizer = Tokenizer.load(Catalogue(load_settings().models_dir).find(model).path)
    with choose_template(tokenizer).open(tokenizer) as template:
        rendered = [template.render(question.messages, tools=question.tools) for question in asked]
    return [tokenizer.encode_markup(text.text, text.positions) for text in rendered]


def _answers(port: int, prompts: Sequence[list[int]]) -> list[str]:
    name = get(port, "/v1/models")["data"][0]["id"]
    texts: list[str] = []
    for at in range(0, len(prompts), AT_ONCE):
        body = {
            "model": name,
            "prompt": prompts[at : at + AT_ONCE],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        answer, _ = post(port, "/v1/completions", body)
        texts += [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
    return texts


def _compared(
    asked: Sequence[Question], answers: Sequence[Sequence[str]], what: Literal["is_valid", "is_expected"]
) -> Comparison:
    before, after = (
        [
            bool(getattr(grade(text, question.tools, question.expected), what))
            for text, question in zip(texts, asked, strict=True)
        ]
        for texts in answers
    )
    return compare(before, after)
