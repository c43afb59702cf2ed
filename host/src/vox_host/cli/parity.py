"""vox-host parity: the same requests on several plugins, compared byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from vox_host.app.named_model import find_stored_model
from vox_host.cli.kv_cache import kv_cache_bytes
from vox_host.cli.output import print_progress, print_warning
from vox_host.cli.parity_report import print_comparison
from vox_host.cli.plugin_check import EXIT_GATE_FAILED
from vox_host.cli.report_file import refuse_bad_target, show_and_write
from vox_host.cli.stopping import BEGINS_AGAIN, is_another_file_since, stoppable, told_when_stopped
from vox_host.discovery import discover
from vox_host.errors import UsageError
from vox_host.hardware.probe import probe_machine
from vox_host.models.catalogue import Catalogue
from vox_host.models.installed import InstalledModel
from vox_host.models.tokenizer import Tokenizer
from vox_host.models.verifying import verify_files
from vox_host.named_file import read_named
from vox_host.parity.certificate import certificate, is_as_written, machine_facts
from vox_host.parity.compare import Parting, SideResult, first_parting, labelled_apart
from vox_host.parity.elsewhere import AskedHere, parse_certificate, refuse_other_numerics
from vox_host.parity.requests import (
    REFERENCE_PROMPTS,
    Asked,
    parse_prompts,
    prompts_digest,
    refuse_too_long,
)
from vox_host.parity.run import Job, ask_side, check_options, find_candidate, locate, require_capabilities
from vox_host.parity.sides import Side, parse_sides
from vox_host.parity.training import TrainingAsked, TrainingParting, ask_steps, first_step_apart
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
        refuse_bad_target(out, "whole record or certificate of `vox-host parity`", is_as_written)
        _refuse_own_input(out, against or [])
    sides = parse_sides(plugin)
    if record:
        _check_record(sides, against, out)
    elif len(sides) == 1 and not against:
        sides = parse_sides([plugin[0], plugin[0]])
    kv_bytes = kv_cache_bytes(kv_cache_mib, probe_machine)
    texts = parse_prompts(read_named(prompts, "--prompts"), prompts.name) if prompts else REFERENCE_PROMPTS
    recorded = [(path, read_named(path, "--against")) for path in against or []]
    found = find_stored_model(Catalogue(settings.models_dir), model, what="comparing plugins on")
    candidates = discover(settings.plugins_dir)
    chosen = [(side, find_candidate(candidates, side.plugin)) for side in sides]
    needed: tuple[m.Capability, ...] = ("generate", "evaluate")
    candidates = [candidate for _, candidate in chosen]
    require_capabilities(candidates, (*needed, "train") if train_steps else needed)
    verify_files(found, lambda *_: None, trust_unchanged=True)
    asked = _asked(found, texts, max_tokens, m.SamplingParams(temperature=temperature, seed=seed))
    _refuse_too_long(asked, found, context_length)
    training = ask_steps(asked, train_steps, seed) if train_steps else None
    here = AskedHere(
        model_digest=found.digest,
        prompts_sha256=prompts_digest(asked),
        requests=len(asked),
        training_sha256=training.digest if training else None,
        options={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "train_steps": train_steps,
        },
    )
    certificates = [parse_certificate(data, path.name, here) for path, data in recorded]
    left_out = [one.left_out for one in certificates if one.left_out is not None]
    for what in left_out:
        print_warning(f"{what} is left out: --train-steps was not given, and only the answers are compared")

    def refuse_others(load: m.LoadResult) -> None:
        for one in certificates:
            refuse_other_numerics(one, load.numerics, load.numerics_version)

    job = Job(
        settings=settings,
        model=found,
        asked=asked,
        threads=threads,
        context_length=context_length,
        at_once=at_once,
        kv_cache_bytes=kv_bytes,
        say=print_progress,
        check=refuse_others,
    )
    is_written = is_another_file_since(out) if out is not None else lambda: False
    written = f"{out} is written, and not all of it was shown"
    with told_when_stopped(lambda: written if is_written() else f"{_NOT_COMPARED}, {BEGINS_AGAIN}"):
        certified = [side for one in certificates for side in one.sides]
        results, partings, apart = asyncio.run(_run(job, chosen, certified, training))
        facts = certificate(
            model=found.name,
            model_digest=found.digest,
            prompts_sha256=here.prompts_sha256,
            sides=results,
            partings=partings,
            machine=machine_facts(),
            training_sha256=here.training_sha256,
            training_partings=apart,
            at_once=at_once,
            is_record=record,
            options=here.options,
            left_out=left_out,
        )
        show_and_write(
            out, facts, lambda: print_comparison(facts, results, [*partings, *apart]), as_json=as_json
        )
        if facts["verdict"] == "failed" or (facts["verdict"] == "same tokens" and _promise_bits(results)):
            raise typer.Exit(EXIT_GATE_FAILED)


async def _run(
    job: Job,
    chosen: Sequence[tuple[Side, Candidate]],
    certified: Sequence[SideResult],
    training: TrainingAsked | None,
) -> tuple[list[SideResult], list[Parting], list[TrainingParting]]:
    # The first side's are checked as it begins.
    await check_options(job, chosen[1:])
    results = [await ask_side(job, side, candidate) for side, candidate in chosen]
    certified = labelled_apart(results, certified)
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


def _refuse_own_input(out: Path, against: Sequence[Path]) -> None:
    """Refuse to replace a certificate that the same command compares with."""
    for path in against:
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                "out-exists",
                f"--out {out} is what --against names, and would be replaced; nothing was started",
                remedy="Name another file with --out.",
            )


def _refuse_too_long(asked: Sequence[Asked], model: InstalledModel, context_length: int | None) -> None:
    """Refuse prompts beyond the context that was asked for, or else the model's."""
    models = model.context_length
    is_models = context_length is None or (models is not None and models <= context_length)
    refuse_too_long(asked, models if is_models else context_length, is_models=is_models)


def _asked(
    model: InstalledModel, texts: Sequence[str], max_tokens: int, sampling: m.SamplingParams
) -> list[Asked]:
    tokenizer = Tokenizer.load(model.path)
    stops = tuple(sorted(tokenizer.eos_ids))
    return [
        Asked(number, tuple(tokenizer.encode(text)), max_tokens, sampling, stops)
        for number, text in enumerate(texts, start=1)
    ]


def _promise_bits(results: Sequence[SideResult]) -> bool:
    return all(result.numerics == "canonical" for result in results)
