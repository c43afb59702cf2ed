"""Read a certificate that was made elsewhere: nothing in it is believed before all of it was held (pure).

A damaged record is told as that, with the place, what belongs there and what is there. It must not
become a verdict on a plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vox_host.counted import counted
from vox_host.errors import IntegrityError, UsageError
from vox_host.parity.certificate import DIGEST, VERSION, is_certificate, signed
from vox_host.parity.compare import Answered, SideResult
from vox_host.parity.fields import CertificateFields, SideFields
from vox_host.parity.training import Taken
from vox_host.printable import printable
from vox_plugin_api.strict_json import CheckpointError, parse_json_object

__all__ = ["AskedHere", "Elsewhere", "parse_certificate", "refuse_other_numerics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedHere:
    """What this command asks: a certificate has to be about the same."""

    model_digest: str
    prompts_sha256: str
    requests: int
    training_sha256: str | None
    options: Mapping[str, Any]
    """As `certificate` takes them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """What a certificate adds to a comparison."""

    name: str
    """Of the file."""
    sides: list[SideResult]
    left_out: str | None
    """What it holds and is not compared, in words."""


def parse_certificate(data: bytes, name: str, asked: AskedHere) -> Elsewhere:
    """Return the sides of a certificate from elsewhere, to be compared by their hashes.

    Args:
        name: of the file, for labels and messages.

    Raises:
        UsageError: it is no certificate, one of an older vox-host, of another model or of other requests.
        IntegrityError: it is damaged.
    """
    name = printable(name)
    read = _read(data, name)
    _refuse_another(read, name, asked)
    if read.requests != asked.requests:
        raise _damaged(name, "requests", str(asked.requests), str(read.requests))
    if asked.training_sha256 is not None and len(read.sides[0].taken) - 1 != asked.options["train_steps"]:
        expected = f"{counted(asked.options['train_steps'], 'step')} and what was before"
        raise _damaged(name, "sides.0.taken", expected, f"{len(read.sides[0].taken)} entries")
    is_left_out = read.training_digest is not None and asked.training_sha256 is None
    steps = len(read.sides[0].taken) - 1
    return Elsewhere(
        name=name,
        sides=[_result(side, name, with_steps=not is_left_out) for side in read.sides],
        left_out=f"training ({steps} in {name})" if is_left_out else None,
    )


def refuse_other_numerics(certificate: Elsewhere, numerics: str, version: int) -> None:
    """Refuse a certificate of other rules than those of the plugin that was loaded: nothing can be equal.

    Raises:
        UsageError: it is one.
    """
    for side in certificate.sides:
        if (side.numerics, side.numerics_version) != (numerics, version):
            raise _of_another(
                certificate.name,
                "it is about other numerics; nothing was asked",
                f"{numerics} {version}",
                f"{side.numerics} {side.numerics_version}",
                "Make it with a plugin of the same numerics, and of the version that this plugin has.",
            )


def _read(data: bytes, name: str) -> CertificateFields:
    try:
        facts = parse_json_object(data, source=f"--against {name}", code="certificate-invalid")
    except CheckpointError as problem:
        found = problem.facts.get("found")
        raise _no_certificate(printable(problem.message) + (f"; found {found}" if found else "")) from None
    if not is_certificate(facts):
        raise _no_certificate(f"--against {name}: this is no certificate of `vox-host parity`")
    if facts["certificate"] == 1 and facts["certificate"] is not True and DIGEST not in facts:
        raise UsageError(
            "certificate-older",
            f"--against {name}: an older vox-host made it, and nothing binds what it says; nothing was "
            "started",
            facts=[
                ("expected", f"certificate {VERSION}, with its own digest"),
                ("found", "certificate 1"),
            ],
            remedy="Make it again with this vox-host.",
        )
    try:
        read = CertificateFields.model_validate(facts)
    except ValidationError as problem:
        first = problem.errors(include_url=False)[0]
        is_missing = first["type"] == "missing"
        raise _damaged(
            name,
            ".".join(map(str, first["loc"])),
            "a value" if is_missing else _belongs(first),
            "no such field" if is_missing else _spelled(first["input"]),
        ) from None
    try:
        found = signed(facts)[DIGEST]
    except (ValueError, RecursionError):
        raise _damaged(name, "its text", "JSON that can be written again", "what can't be") from None
    if found != read.certificate_digest:
        raise _damaged(name, DIGEST, f"sha256:{read.certificate_digest}", f"sha256:{found}, of what it says")
    _check_whole(read, name)
    return read


def _check_whole(read: CertificateFields, name: str) -> None:
    """Hold fields against each other: whoever mends a digest by hand mends no more than that."""
    labels = [side.label for side in read.sides]
    if len(set(labels)) < len(labels):
        raise _damaged(name, "sides", "a label of its own for each", _spelled(labels))
    if read.verdict == "recorded" and len(labels) != 1:
        raise _damaged(name, "sides", "one, of a record", str(len(labels)))
    numerics = sorted({f"{side.numerics} {side.numerics_version}" for side in read.sides})
    if read.numerics != numerics:
        raise _damaged(name, "numerics", _spelled(numerics), _spelled(read.numerics))
    steps = len(read.sides[0].taken)
    for place, side in enumerate(read.sides):
        numbers = [answer.number for answer in side.answers]
        if numbers != list(range(1, read.requests + 1)):
            expected = f"requests 1 to {read.requests}, each once and in order"
            raise _damaged(name, f"sides.{place}.answers", expected, _spelled(numbers))
        most = read.options.max_tokens if read.options is not None else None
        if most is not None and any(len(answer.token_ids) > most for answer in side.answers):
            longest = max(len(answer.token_ids) for answer in side.answers)
            raise _damaged(
                name, f"sides.{place}.answers", f"at most {counted(most, 'token')} each", str(longest)
            )
        taken = [step.step for step in side.taken]
        if read.training_digest is None and taken:
            raise _damaged(
                name, f"sides.{place}.taken", "nothing: no training was asked for", _spelled(taken)
            )
        if read.training_digest is not None and (len(taken) < 2 or taken != list(range(steps))):
            expected = f"steps 0 to {max(steps, 2) - 1}, each once and in order"
            raise _damaged(name, f"sides.{place}.taken", expected, _spelled(taken))
        for at, step in enumerate(side.taken):
            if bool(step.step) != all((step.loss, step.gradient_norm, step.learning_rate)):
                raise _damaged(
                    name, f"sides.{place}.taken.{at}", "numbers, from step 1 on", _spelled(step.model_dump())
                )


def _refuse_another(read: CertificateFields, name: str, asked: AskedHere) -> None:
    if read.model_digest != asked.model_digest:
        raise _of_another(
            name,
            f'it is about another model, "{printable(read.model)}"; nothing was started',
            f"sha256:{asked.model_digest}",
            f"sha256:{read.model_digest}",
            "Make it with the same model.",
        )
    theirs = read.options.model_dump() if read.options is not None else {}
    # A seed, a temperature: named, since digests tell nobody which.
    differing = [option for option in theirs if theirs[option] != asked.options[option]]
    of_requests = [option for option in differing if option != "train_steps"]
    if read.prompts_digest != asked.prompts_sha256:
        if of_requests:
            raise _other_options(name, of_requests, theirs, asked.options)
        unsaid = "" if theirs else ", or another --max-tokens, --temperature or --seed"
        raise _of_another(
            name,
            f"it is about other prompts{unsaid}; nothing was started",
            f"sha256:{asked.prompts_sha256}",
            f"sha256:{read.prompts_digest}",
            "Give this command the prompts and options that it was made with, or make it again.",
        )
    if asked.training_sha256 is None or read.training_digest == asked.training_sha256:
        return
    if read.training_digest is None:
        raise _of_another(
            name,
            "it holds no training, and --train-steps asks for some; nothing was started",
            f"{counted(asked.options['train_steps'], 'step')} of training",
            "no steps of training",
            "Leave --train-steps out, or make it again with --train-steps.",
        )
    if differing:
        raise _other_options(name, differing, theirs, asked.options)
    raise _of_another(
        name,
        "it is about other training; nothing was started",
        f"sha256:{asked.training_sha256}",
        f"sha256:{read.training_digest}",
        "Make it again with the same --train-steps, by this version of vox-host.",
    )


def _other_options(
    name: str, options: list[str], theirs: Mapping[str, Any], ours: Mapping[str, Any]
) -> UsageError:
    names = [f"--{option.replace('_', '-')}" for option in options]
    given = " ".join(f"{flag} {theirs[option]}" for flag, option in zip(names, options, strict=True))
    return _of_another(
        name,
        f"it was made with another {' and another '.join(names)}; nothing was started",
        " ".join(f"{flag} {ours[option]}" for flag, option in zip(names, options, strict=True)),
        given,
        f"Give this command {given}, or make it again.",
    )


def _result(side: SideFields, name: str, *, with_steps: bool) -> SideResult:
    return SideResult(
        label=f"{side.label} ({name})",
        plugin=side.plugin,
        plugin_version=side.plugin_version,
        plugin_tree_digest=side.plugin_tree_digest,
        lane=side.lane,
        lane_options=side.lane_options,
        numerics=side.numerics,
        numerics_version=side.numerics_version,
        answers=tuple(
            Answered(one.number, one.logits_digest, tuple(one.token_ids), one.answer_sha256)
            for one in side.answers
        ),
        transcript=None,
        transcript_sha256=side.transcript_sha256,
        taken=tuple(Taken(**step.model_dump()) for step in side.taken) if with_steps else (),
    )


def _belongs(problem: Any) -> str:
    """Return what belongs in a field, in the validator's words."""
    if problem["type"] == "extra_forbidden":
        return "no such field"
    text: str = problem["msg"]
    return printable(text.removeprefix("Input should be ").removeprefix("Value should have "))


def _spelled(value: Any) -> str:
    """Return a value as JSON has it, no longer than a line."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "what can't be shown"
    return printable(text if len(text) <= 80 else f"{text[:77]}...")


def _no_certificate(message: str) -> UsageError:
    return UsageError(
        "certificate-invalid",
        f"{message}; nothing was started",
        remedy="Name what `vox-host parity --out` or `--record` wrote.",
    )


def _damaged(name: str, what: str, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        "certificate-damaged",
        f"--against {name}: the record is damaged; nothing was started, and this says nothing of a plugin",
        facts=[("what", printable(what)), ("expected", expected), ("found", found)],
        remedy="Copy it again from where it was made, or make it again with `vox-host parity --record`.",
    )


def _of_another(name: str, message: str, expected: str, found: str, remedy: str) -> UsageError:
    return UsageError(
        "certificate-of-another",
        f"--against {name}: {message}",
        facts=[("expected", expected), ("found", found)],
        remedy=remedy,
    )
