"""vox-host generate and vox-host chat: answers in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.app.compose import OpenModel
from vox_host.app.model_info import merged_facts, numerics_facts
from vox_host.app.service import AnswerEnd, AnswerPiece, ModelService
from vox_host.app.usage import usage
from vox_host.cli.conversation import Conversation
from vox_host.cli.model_options import Model, RunOptions, with_model
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_json, print_line, print_piece
from vox_host.cli.sampling_options import MAX_INT, SamplingOptions
from vox_host.cli.stopping import stoppable
from vox_host.counted import counted
from vox_host.errors import UsageError
from vox_host.named_file import TEXT_LIMIT_BYTES, read_named
from vox_host.settings import load_settings
from vox_plugin_api import messages as m

__all__ = ["register"]

_GIVE_A_PROMPT = "Give --prompt TEXT or --prompt-file FILE."

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", min=0, max=MAX_INT, help="Most tokens in the answer.")
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be given several times.")
]


def register(app: typer.Typer) -> None:
    """Add both commands to the root."""
    app.command("generate", help="Continue a prompt.")(grouped(generate))
    app.command("chat", help="Talk with a model.")(grouped(chat))


@stoppable(lambda json, **_: "nothing was answered" if json else "the answer is not whole")
def generate(
    *,
    model: Model,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file with the text; - is standard input.")
    ] = None,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = 256,
    stop: Stop = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object when done.")] = False,
    run: RunOptions,
) -> None:
    """Continue a prompt; the answer streams to the terminal."""
    text = _read_prompt(prompt, prompt_file)
    if stop and not all(stop):
        raise UsageError("usage", "--stop must not be empty: it would stop before the first character")
    options = dataclasses.replace(run.for_model(model), only_text=text)
    chosen = sampling.as_params()

    async def use(opened: OpenModel) -> None:
        service = opened.service
        ids = await service.encode_prompt(text)
        if not ids:
            raise UsageError(
                "prompt-empty",
                "the prompt is empty, and this model has no token to begin a text with",
                remedy=_GIVE_A_PROMPT,
            )
        service.check_fits(len(ids), needs_room=max_tokens != 0)
        params = m.GenerateParams(
            token_ids=ids,
            max_tokens=service.room_for(len(ids), max_tokens),
            sampling=chosen,
            stop_token_ids=sorted(service.tokenizer.eos_ids),
        )
        if json:
            print_json(await _collect(service, params, stop or []))
        else:
            await stream_to_terminal(service, params, stop or [])

    with_model(load_settings(), options, use, is_quiet=json)


@stoppable("the conversation is over, and nothing of it was kept")
def chat(
    *,
    model: Model,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions before the conversation.")
    ] = None,
    sampling: SamplingOptions,
    max_tokens: MaxTokens = None,
    run: RunOptions,
) -> None:
    """Talk with a model: a line is a turn, Ctrl-C stops an answer, Ctrl-D leaves."""
    options = run.for_model(model)
    chosen = sampling.as_params()

    async def use(opened: OpenModel) -> None:
        await Conversation(opened.service, chosen, max_tokens=max_tokens, system=system).run()

    with_model(load_settings(), options, use)


async def stream_to_terminal(service: ModelService, params: m.GenerateParams, stops: list[str]) -> None:
    """Print an answer as it comes, and on a terminal what it took."""
    began = first = time.monotonic()
    pieces = 0
    end: AnswerEnd | None = None
    try:
        async with contextlib.aclosing(service.answer(params, stops)) as items:
            async for item in items:
                match item:
                    case AnswerPiece():
                        if pieces == 0:
                            first = time.monotonic()
                        pieces += 1
                        print_piece(item.text)
                    case AnswerEnd():
                        end = item
    finally:
        if end is not None or (pieces and sys.stdout.isatty()):
            # On a terminal what is said next begins a line, an answer that was cut short or not.
            print_line("")
    if end is not None and sys.stderr.isatty():
        print_line(_summary(end, began, first, params.sampling.seed), error=True)


def _summary(end: AnswerEnd, began: float, first: float, seed: int) -> str:
    now = time.monotonic()
    rate = (end.generated_tokens - 1) / (now - first) if end.generated_tokens > 1 and now > first else 0.0
    prompt = counted(end.prompt_tokens, "token")
    return (
        f"[{end.finish_reason}; prompt {prompt} in {first - began:.2f} s, answer "
        f"{counted(end.generated_tokens, 'token')} at {rate:.1f} per second; seed {seed}]"
    )


async def _collect(service: ModelService, params: m.GenerateParams, stops: list[str]) -> dict[str, Any]:
    """Return the answer as facts. No times: two runs of one request print the same bytes."""
    answer = await service.collect(params, stops)
    assert answer.end is not None
    info = service.info
    return {
        "text": answer.text,
        "token_ids": [token.token_id for token in answer.tokens],
        "finish_reason": answer.end.finish_reason,
        "model": info.name,
        "model_digest": info.digest,
        "adapter": None if info.adapter is None else info.adapter.as_dict(),
        "merged_from": merged_facts(info),
        "plugin": info.plugin_id,
        "plugin_version": info.plugin_version,
        "lane": info.lane,
        "numerics": info.numerics,
        "numerics_error": numerics_facts(info.numerics_error),
        "seed": params.sampling.seed,
        "usage": usage(answer.end.prompt_tokens, answer.end.generated_tokens, [answer.end.cached_tokens]),
        "degraded": info.degraded,
        "warnings": list(info.warnings),
    }


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UsageError("usage", "give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None and str(prompt_file) != "-":
        data = read_named(prompt_file, "--prompt-file", may_be_stream=True)
    elif prompt_file is not None or not sys.stdin.isatty():
        data = sys.stdin.buffer.read(TEXT_LIMIT_BYTES + 1)
        if not data and prompt_file is None:
            # Nobody asked for standard input: it is where a script or a service has none.
            raise UsageError(
                "prompt-empty",
                "no prompt was given, and standard input is empty; nothing was started",
                remedy=_GIVE_A_PROMPT,
            )
    else:
        raise UsageError("usage", "there is nothing to continue", remedy=_GIVE_A_PROMPT)
    if len(data) > TEXT_LIMIT_BYTES:
        raise UsageError(
            "prompt-too-long",
            f"the prompt is longer than {TEXT_LIMIT_BYTES >> 20} MiB; nothing was started",
            remedy="Give a shorter prompt: no model reads so much.",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UsageError(
            "prompt-encoding", f"the prompt is not UTF-8 (byte {problem.start})", remedy="Save it as UTF-8."
        ) from None
