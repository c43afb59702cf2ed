"""vox-host parity: the same requests on several plugins, compared byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.app.named_model import find_stored_model
from vox_host.cli.output import print_json, print_line, print_progress, print_table
from vox_host.cli.plugin_check import EXIT_GATE_FAILED, refuse_bad_target, write_report
from vox_host.cli.stopping import BEGINS_AGAIN, is_another_file_since, stoppable, told_when_stopped
from vox_host.counted import counted
from vox_host.discovery import discover
from vox_host.errors import UsageError
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_host.parity.certificate import certificate, machine_facts, parse_certificate
from vox_host.parity.compare import Parting, SideResult, first_parting
from vox_host.parity.requests import REFERENCE_PROMPTS, Asked, parse_prompts, prompts_digest
from vox_host.parity.run import Job, ask_side, find_candidate, locate, require_capabilities
from vox_host.parity.sides import Side, parse_sides
from vox_host.parity.training import TrainingAsked, TrainingParting, ask_steps, first_step_apart, short
from vox_host.parity.training_run import locate_operator, take_steps
from vox_host.resolution import Candidate
from vox_host.settings import load_settings
from vox_plugin_api import messages as m

__all__ = ["register"]

_NOT_COMPARED = "the comparison did not come to its end, and nothing was written"


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("parity", help="Compare plugins, or ways of one, byte for byte.")(parity)


@stoppable(f"{_NOT_COMPARED}, {BEGINS_AGAIN}")
def parity(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="A model's name (`vox-host model list` shows them); an adapter has to be merged first.",
        ),
    ],
    plugin: Annotated[
        list[str],
        typer.Option(
            "--plugin",
            help="ID or ID:NAME=VALUE,... (lane options, like mens-cpu-ref:isa=avx2). Given several times; "
            "one alone is run twice.",
        ),
    ],
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file with one prompt a line; default: three of our own."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=0, max=4096, help="Tokens to generate for each prompt.")
    ] = 16,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, max=100.0, help="0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**64 - 1, help="Where chance has a part.")] = 0,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            min=1,
            max=1024,
            help="Requests to begin together, so that their tokens come of the same steps. No answer "
            "depends on it: one made alone, elsewhere, is compared with one made in company.",
        ),
    ] = 1,
    train_steps: Annotated[
        int,
        typer.Option(
            "--train-steps",
            min=0,
            max=1000,
            help="Steps of training on the prompts' tokens, with adapters of rank 8 on all linear layers; "
            "--seed draws their first values. Needs plugins that train.",
        ),
    ] = 0,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="A certificate made elsewhere with the same model and requests."),
    ] = None,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Ask one plugin, once, and write what it answered to --out, for --against elsewhere; "
            "nothing is compared.",
        ),
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="CPU threads; default: all usable.")
    ] = None,
    context_length: Annotated[
        int | None, typer.Option("--context-length", min=1, help="Tokens of prompt and answer together.")
    ] = None,
    kv_cache_mib: Annotated[
        int | None,
        typer.Option(
            "--kv-cache-mib",
            min=1,
            help="Memory for the keys and values of all requests at once; default: the plugin's own bound.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the certificate to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate.")] = False,
) -> None:
    """Compare plugins, or ways of one, byte for byte. Exits with 6 if they differ."""
    settings = load_settings()
    if out is not None:
        refuse_bad_target(out)
    sides = parse_sides(plugin)
    if record:
        _check_record(sides, against, out)
    elif len(sides) == 1 and not against:
        sides = parse_sides([plugin[0], plugin[0]])
    found = find_stored_model(Catalogue(settings.models_dir), model, what="comparing plugins on")
    candidates = discover(settings.plugins_dir)
    chosen = [(side, find_candidate(candidates, side.plugin)) for side in sides]
    needed: tuple[m.Capability, ...] = ("generate", "evaluate")
    candidates = [candidate for _, candidate in chosen]
    require_capabilities(candidates, (*needed, "train") if train_steps else needed)
    verify_files(found, lambda *_: None, trust_unchanged=True)
    asked = _asked(found, prompts, max_tokens, m.SamplingParams(temperature=temperature, seed=seed))
    digest = prompts_digest(asked)
    training = ask_steps(asked, train_steps, seed) if train_steps else None
    certified = [
        side
        for path in against or []
        for side in parse_certificate(
            _read(path, "--against"),
            path.name,
            model_digest=found.digest,
            prompts_sha256=digest,
            training_sha256=training.digest if training else None,
        )
    ]
    job = Job(
        settings=settings,
        model=found,
        asked=asked,
        threads=threads,
        context_length=context_length,
        at_once=at_once,
        kv_cache_bytes=None if kv_cache_mib is None else kv_cache_mib << 20,
        say=print_progress,
    )
    is_written = is_another_file_since(out) if out is not None else lambda: False
    written = f"{out} is written, and only the rest was not shown"
    with told_when_stopped(lambda: written if is_written() else f"{_NOT_COMPARED}, {BEGINS_AGAIN}"):
        results, partings, apart = asyncio.run(_run(job, chosen, certified, training))
        facts = certificate(
            model=found.name,
            model_digest=found.digest,
            prompts_sha256=digest,
            sides=results,
            partings=partings,
            machine=machine_facts(),
            training_sha256=training.digest if training else None,
            training_partings=apart,
            at_once=at_once,
            is_record=record,
        )
        if out is not None:
            write_report(out, facts)
        if as_json:
            print_json(facts)
        else:
            _print(facts, results, [*partings, *apart])
        if facts["verdict"] == "failed" or (facts["verdict"] == "same tokens" and _promise_bits(results)):
            raise typer.Exit(EXIT_GATE_FAILED)


async def _run(
    job: Job,
    chosen: Sequence[tuple[Side, Candidate]],
    certified: Sequence[SideResult],
    training: TrainingAsked | None,
) -> tuple[list[SideResult], list[Parting], list[TrainingParting]]:
    results = [await ask_side(job, side, candidate) for side, candidate in chosen]
    if training is not None:
        results = [
            replace(result, taken=await take_steps(job, side, candidate, training))
            for result, (side, candidate) in zip(results, chosen, strict=True)
        ]
    partings: list[Parting] = []
    for place, result in enumerate([*results, *certified]):
        parting = first_parting(results[0], result)
        if parting is None:
            continue
        if place < len(chosen):
            answers = {answer.number: answer.token_ids for answer in results[0].answers}
            answer = answers.get(parting.request, ())
            parting = await locate(job, parting, chosen[0], chosen[place], answer)
        partings.append(parting)
    apart: list[TrainingParting] = []
    for place, result in enumerate([*results, *certified]):
        step = first_step_apart(results[0].taken, result.taken, side=result.label, against=results[0].label)
        if step is None:
            continue
        if place < len(chosen):
            step = await locate_operator(job, step, chosen[0], chosen[place])
        apart.append(step)
    return [*results, *certified], partings, apart


def _check_record(sides: Sequence[Side], against: Sequence[Path] | None, out: Path | None) -> None:
    """Refuse `--record` with anything to compare, or with nowhere to write to."""
    if len(sides) == 1 and not against and out is not None:
        return
    raise UsageError(
        "usage",
        "--record takes one --plugin and --out, and no --against: it compares nothing; nothing was started",
        facts=[
            ("plugins", len(sides)),
            ("--against", len(against or [])),
            ("--out", out or "not given"),
        ],
        remedy="Record each side with a command of its own, then compare: `vox-host parity` with the other "
        "plugin and --against FILE.",
    )


def _asked(
    model: InstalledModel, prompts: Path | None, max_tokens: int, sampling: m.SamplingParams
) -> list[Asked]:
    texts: Sequence[str] = REFERENCE_PROMPTS
    if prompts is not None:
        texts = parse_prompts(_read(prompts, "--prompts"), prompts.name)
    tokenizer = Tokenizer.load(model.path)
    stops = tuple(sorted(tokenizer.eos_ids))
    return [
        Asked(number, tuple(tokenizer.encode(text)), max_tokens, sampling, stops)
        for number, text in enumerate(texts, start=1)
    ]


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise UsageError(
            "file-unreadable",
            f"{option} {path}: {problem.strerror}; nothing was started",
            remedy="Name a file that this user can read.",
        ) from None


def _promise_bits(results: Sequence[SideResult]) -> bool:
    return all(result.numerics == "canonical" for result in results)


def _print(
    facts: dict[str, Any], results: Sequence[SideResult], partings: Sequence[Parting | TrainingParting]
) -> None:
    rows = [
        (
            result.label,
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
            result.label,
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
        print_line(f"{result.label}: lane {result.lane}, transcript sha256:{result.transcript_sha256}")
    taken = max(len(result.taken) for result in results) - 1 if steps else 0
    # A verdict is quoted alone: where each side ran is a part of it.
    lanes = ", ".join(dict.fromkeys(f"lane {result.lane}" for result in results))
    for parting in partings:
        print_line(f"{parting.side} differs from {parting.against}: {parting}")
    print_line(
        f"{facts['verdict']}: {counted(len(results), 'side')} ({lanes}), "
        f"{counted(facts['requests'], 'request')}, "
        f"{counted(taken, 'step')} of training, "
        f"model sha256:{facts['model_digest']}, prompts sha256:{facts['prompts_digest']}"
    )
