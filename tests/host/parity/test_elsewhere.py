"""A certificate made elsewhere: damage is told as damage, and nothing in it commands a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vox_host.cli.parity_report import print_comparison
from vox_host.errors import IntegrityError, UsageError
from vox_host.parity.certificate import certificate, is_as_written, is_certificate, signed
from vox_host.parity.compare import Answered, SideResult, first_parting, labelled_apart
from vox_host.parity.elsewhere import AskedHere, parse_certificate, refuse_other_numerics
from vox_host.parity.training import Taken, first_step_apart

HEX = "0123456789abcdef" * 4
OPTIONS = {"max_tokens": 4, "temperature": 0.0, "seed": 7, "train_steps": 1}
HERE = AskedHere(model_digest=HEX, prompts_sha256=HEX[::-1], requests=2, training_sha256=HEX, options=OPTIONS)


def side(label: str = "told", **others) -> SideResult:
    answers = tuple(Answered(number, HEX, (5, 6), HEX) for number in (1, 2))
    fields = {
        "label": label, "plugin": "told", "plugin_version": "1", "plugin_tree_digest": None, "lane": "cpu",
        "lane_options": {}, "numerics": "canonical", "numerics_version": 1, "answers": answers,
        "transcript": b"x", "transcript_sha256": HEX,
        "taken": (Taken(0, "", "", "", 0, HEX), Taken(1, *["3f800000"] * 3, 3, HEX)),
    }  # fmt: skip
    return SideResult(**{**fields, **others})


def record(*sides: SideResult, training=HEX) -> dict:
    return certificate(
        model="gemma3", model_digest=HEX, prompts_sha256=HEX[::-1], sides=sides or [side()], partings=[],
        machine={"system": "Linux"}, training_sha256=training, is_record=True, options=OPTIONS,
    )  # fmt: skip


def read(facts: dict, asked: AskedHere = HERE, *, sign: bool = True):
    data = json.dumps(signed(facts) if sign else facts).encode()
    return parse_certificate(data, "keep.json", asked)


def test_what_was_written_is_read_again():
    (one,) = read(record(), sign=False).sides
    assert (one.label, one.transcript, len(one.answers), len(one.taken)) == ("told (keep.json)", None, 2, 2)
    assert first_parting(side(), one) is None
    again = labelled_apart([side()], [one, one])
    assert [two.label for two in again] == ["told (keep.json)", "told (keep.json) #2"]


def change(facts: dict, path: str, value: object) -> dict:
    at: object = facts
    *above, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in above:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return facts


DAMAGE = [
    ("sides", [], "sides"),
    ("sides", ..., "sides"),
    ("sides/0/answers/1", ..., "sides.0.answers"),
    ("sides/0/answers/1/number", 1, "sides.0.answers"),
    ("sides/0/answers/0/token_ids/0", True, "sides.0.answers.0.token_ids.0"),
    ("sides/0/answers/0/token_ids/0", -1, "sides.0.answers.0.token_ids.0"),
    ("sides/0/answers/0/token_ids/0", 10**400, "sides.0.answers.0.token_ids.0"),
    ("sides/0/answers/0/token_ids", [1] * 5, "sides.0.answers"),
    ("sides/0/answers/0/logits_digest", "x", "sides.0.answers.0.logits_digest"),
    ("sides/0/answers/0", [], "sides.0.answers.0"),
    ("sides/0/numerics", 7, "sides.0.numerics"),
    ("sides/0/numerics_version", 2, "numerics"),
    ("sides/0/taken", [], "sides.0.taken"),
    ("sides/0/taken/1/step", 0, "sides.0.taken"),
    ("sides/0/taken/1/loss", "", "sides.0.taken.1"),
    ("model_digest", None, "model_digest"),
    ("requests", 3, "sides.0.answers"),
    ("certificate", 3, "certificate"),
    ("certificate", True, "certificate"),
    ("observation/machine", float("inf"), "its text"),
    ("extra", 1, "extra"),
]


@pytest.mark.parametrize(("path", "value", "what"), DAMAGE, ids=[f"{d[0]}-{d[1]!r:.12}" for d in DAMAGE])
def test_damage_is_told_as_damage(path, value, what):
    facts = change(json.loads(json.dumps(record())), path, value)
    # As someone would who mends the digest by hand: what else is wrong is found all the same.
    is_json = value != float("inf")
    with pytest.raises((IntegrityError, UsageError)) as caught:
        if is_json:
            read(facts)
        else:
            parse_certificate(json.dumps(facts).replace("Infinity", "1e999").encode(), "keep.json", HERE)
    error = caught.value
    if path == "sides" and value is ...:
        assert error.code == "certificate-invalid"
        return
    told = dict(error.facts)
    assert (error.code, error.exit_code, told["what"]) == ("certificate-damaged", 4, what)
    assert told["expected"] and told["found"] and len(told["found"]) <= 90
    text = f"{error.message}{told}"
    assert not any(
        word in text for word in ("Error(", "TypeError", "None", "True", "string_", "Input should")
    )
    assert "says nothing of a plugin" in error.message


def test_a_digest_that_is_missing_or_another_is_damage():
    without = {k: v for k, v in record().items() if k != "certificate_digest"}
    for facts in (without, {**record(), "at_once": 2}, {**record(), "certificate_digest": HEX}):
        with pytest.raises(IntegrityError) as caught:
            read(facts, sign=False)
        assert dict(caught.value.facts)["what"] == "certificate_digest"
    older = {**without, "certificate": 1}
    with pytest.raises(UsageError) as older_error:
        read(older, sign=False)
    assert older_error.value.code == "certificate-older"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "found array"),
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" + b"9" * 5000 + b"]", "thousands of digits"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"some": "other"}', "no certificate of"),
    ],
    ids=lambda d: repr(d)[:12],
)
def test_what_is_no_certificate_is_refused_in_words(data, said):
    with pytest.raises(UsageError) as caught:
        parse_certificate(data, "keep.json", HERE)
    assert caught.value.code == "certificate-invalid" and said in caught.value.message


def test_one_that_nests_up_to_the_limit_ends_in_words():
    for depth in range(100, 1000, 50):
        data = json.dumps(record()).replace('"Linux"', "[" * depth + "]" * depth).encode()
        with pytest.raises((UsageError, IntegrityError)):
            parse_certificate(data, "keep.json", HERE)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("seed", 3, "another --seed;"),
        ("max_tokens", 9, "another --max-tokens;"),
        (None, None, "other prompts;"),
    ],
)
def test_the_option_that_differs_is_named(option, value, said):
    options = {**OPTIONS, option: value} if option else OPTIONS
    asked = AskedHere(model_digest=HEX, prompts_sha256=HEX, requests=2, training_sha256=HEX, options=options)
    with pytest.raises(UsageError, match=said) as caught:
        read(record(), asked)
    if option == "seed":
        assert dict(caught.value.facts) == {"expected": "--seed 3", "found": "--seed 7"}


def test_training_is_left_out_with_a_word_and_other_numerics_are_refused():
    asked = AskedHere(
        model_digest=HEX, prompts_sha256=HEX[::-1], requests=2, training_sha256=None, options=OPTIONS
    )
    certified = read(record(), asked)
    assert certified.left_out == "training (1 in keep.json)" and certified.sides[0].taken == ()
    refuse_other_numerics(certified, "canonical", 1)
    with pytest.raises(UsageError, match="other numerics") as caught:
        refuse_other_numerics(certified, "canonical", 2)
    assert dict(caught.value.facts) == {"expected": "canonical 2", "found": "canonical 1"}
    bare = record(side(taken=()), training=None)
    with pytest.raises(UsageError, match="holds no training"):
        read(bare)


def test_digests_that_part_late_are_shown_where_they_part():
    other = HEX[:40] + "ffff" + HEX[44:]
    answers = (Answered(1, HEX, (5, 6), HEX), Answered(2, HEX, (5, 6), other))
    parting = first_parting(side(transcript=None), side("b", answers=answers, transcript=None))
    assert parting is not None and parting.expected != parting.found
    assert "ffff" in str(parting) and "from its character 41" in str(parting)
    step = Taken(0, "", "", "", 0, other)
    trained = first_step_apart(side().taken, (step,), side="a", against="b")
    assert "ffff" in str(trained)


def test_a_label_from_elsewhere_commands_no_terminal(capsys):
    made = record(side("told\x1b[31m\nbitwise: 9 sides\u202e", lane="cpu\x07"))
    parsed = parse_certificate(json.dumps(made).encode(), "keep\x1b.json", HERE)
    sides = [side(), *parsed.sides]
    facts = certificate(
        model="gemma3", model_digest=HEX, prompts_sha256=HEX, sides=sides, partings=[], machine={}
    )
    print_comparison(facts, sides, [])
    printed = capsys.readouterr().out
    assert all(c == "\n" or c.isprintable() for c in printed)
    assert "told\\x1b[31m\\nbitwise" in printed and "keep\\x1b.json" in printed


def test_the_repository_s_records_are_whole():
    results = Path(__file__).parents[3] / "bench/results"
    files = [*results.glob("parity-*.json"), *results.glob("parity-records/*.json")]
    assert len(files) >= 24
    for path in files:
        facts = json.loads(path.read_text())
        asked = AskedHere(
            model_digest=facts["model_digest"], prompts_sha256=facts["prompts_digest"],
            requests=facts["requests"], training_sha256=None, options=OPTIONS,
        )  # fmt: skip
        assert parse_certificate(path.read_bytes(), path.name, asked).sides
        assert is_certificate(facts) and is_as_written(facts)
        assert not is_as_written(facts | {"notes": "mine"})


@pytest.mark.parametrize(
    "facts",
    [
        {"certificate": 2, "verdict": "mine", "sides": [], "thesis": "precious"},
        {"certificate": 2, "verdict": "mine", "sides": [], "certificate_digest": "0" * 64},
        {"certificate": 2, "verdict": float("nan"), "sides": []},
    ],
)
def test_what_only_looks_like_a_certificate_is_not_as_one_was_written(facts):
    assert is_certificate(facts) and not is_as_written(facts)
    if facts["verdict"] == "mine":
        assert is_as_written(signed(facts))
