"""Which modules a configuration names, against PEFT's own functions, and expressions that run too long."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from vox_host.errors import ModelError
from vox_host.runs import expressions
from vox_host.runs.peft_config import read_peft_config
from vox_host.runs.peft_rules import PeftRules

NAMES = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
MODULES = [
    *(f"model.layers.{i}.{name}" for i in (0, 1, 2, 11, 12) for name in NAMES),
    *(f"model.language_model.layers.{i}.{name}" for i in (1, 2) for name in NAMES),
    *(f"layers.{i}.{name}" for i in (1, 2) for name in NAMES),
    "model.embed_tokens",
    "lm_head",
]
TARGETS = [
    ["q_proj", "lm_head"],
    ["self_attn.q_proj", "model.layers.1.mlp.up_proj", "embed_tokens"],
    ["proj", "_proj", ".q_proj"],
    r".*\.layers\.(1|2)\..*(q|up)_proj",
    r".*q_proj",
    "model.layers.1.self_attn.q_proj",
    "(?i).*EMBED_TOKENS",
    None,
    "all-linear",
]
EXCLUDED = [None, [], ["k_proj", "model.layers.1.self_attn.q_proj"], r".*layers\.1\..*"]
LAYERS = [(None, None), (1, None), ([1, 12], None), ([], None), (0, "layers"), ([2], ["blocks", "layers"])]
LAYERS += [([1], r"language_model\.layers"), ([2], ""), ([1], ["blocks"])]
PATTERNS = [
    {},
    {"q_proj": 2},
    {"layers.1.self_attn.q_proj": 2, "q_proj": 3, "lm_head": 5},
    {"^model.layers.1.mlp.up_proj": 7, r".*\.(q|k)_proj": 9},
    {r"layers\.\d.mlp.up_proj": 2, "up_proj": 3},
    {"embed_tokens|lm_head": 6, "proj": 4},
    {"layers.1.*": 8},
]


def written(path: Path, **fields: object) -> Path:
    asked = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **fields}
    file = path / "adapter_config.json"
    file.write_text(json.dumps(asked), "utf-8")
    return file


def rules(path: Path, **fields: object) -> PeftRules:
    file = written(path, **fields)
    return PeftRules(read_peft_config(file), MODULES, source=file)


@pytest.mark.oracle
def test_the_modules_asked_for_are_those_of_peft(tmp_path, monkeypatch):
    # A child for each of some hundred configurations would take its time.
    monkeypatch.setattr(expressions, "_HARMLESS", expressions.re.compile(".*"))
    tuners = pytest.importorskip("peft.tuners.tuners_utils", reason="the outside judge: pip install peft")
    seen = set()
    for targets, excluded, (numbers, behind) in itertools.product(TARGETS, EXCLUDED, LAYERS):
        if targets in (None, "all-linear") or (isinstance(targets, str) and numbers is not None):
            continue
        fields = {
            "target_modules": targets,
            "exclude_modules": excluded,
            "layers_to_transform": numbers,
            "layers_pattern": behind,
        }
        found = rules(tmp_path, **fields)
        theirs = SimpleNamespace(modules_to_save=None, target_parameters=None, **fields)
        for module in MODULES:
            expected = bool(tuners.check_target_module_exists(theirs, module))
            assert found.is_wanted(module) is expected, (fields, module)
            seen.add(expected)
    assert seen == {True, False}


@pytest.mark.oracle
def test_ranks_and_alphas_are_those_of_peft(tmp_path):
    utils = pytest.importorskip("peft.utils.other", reason="the outside judge: pip install peft")
    for ranks, alphas in zip(PATTERNS, [*PATTERNS[1:], {}], strict=True):
        found = rules(tmp_path, rank_pattern=ranks, alpha_pattern=alphas)
        for module in MODULES:
            assert found.rank(module) == ranks.get(utils.get_pattern_key(ranks.keys(), module), 4)
            assert found.alpha(module) == alphas.get(utils.get_pattern_key(alphas.keys(), module), 8)
        used = {utils.get_pattern_key(ranks.keys(), module) for module in MODULES}
        assert set(found.idle_entries()) >= set(ranks) - used - set(alphas)
    assert rules(tmp_path, rank_pattern={"no_proj": 3}).idle_entries() == ["no_proj"]


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_without_a_list_there_is_nothing_to_hold_against(tmp_path, targets):
    assert all(map(rules(tmp_path, target_modules=targets).is_wanted, MODULES))


@pytest.mark.parametrize(
    ("fields", "mention"),
    [
        ({"target_modules": "(q_proj"}, "is no regular expression"),
        ({"rank_pattern": {"*q_proj": 2}}, "is no regular expression"),
        ({"rank_pattern": {"q_proj\\": 2}}, "is no regular expression"),
        ({"target_modules": "q" * 10_001}, "10001 characters"),
        ({"target_modules": r"([a-z0-9_.]+)+!"}, "was not matched within"),
        ({"alpha_pattern": {r"([a-z0-9_.]*)*!": 2.0}}, "was not matched within"),
    ],
)
def test_an_expression_that_can_t_be_matched_is_refused_by_its_text(tmp_path, monkeypatch, fields, mention):
    monkeypatch.setattr(expressions, "_LIMIT_S", 0.7)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        rules(tmp_path, **fields)
    assert time.monotonic() - started < 20
    assert caught.value.code == "adapter-expression"
    assert mention in caught.value.message
    assert str(tmp_path) in caught.value.message


def test_what_is_matched_here_and_in_a_child_is_the_same(tmp_path, monkeypatch):
    found = [rules(tmp_path, rank_pattern=pattern) for pattern in PATTERNS]
    monkeypatch.setattr(expressions, "_HARMLESS", expressions.re.compile("(?!)"))
    again = [rules(tmp_path, rank_pattern=pattern) for pattern in PATTERNS]
    for one, other in zip(found, again, strict=True):
        assert [one.rank(module) for module in MODULES] == [other.rank(module) for module in MODULES]


def test_layers_beside_an_expression_are_refused_as_peft_does(tmp_path):
    with pytest.raises(ModelError) as caught:
        rules(tmp_path, target_modules=".*q_proj", layers_to_transform=[1])
    assert caught.value.code == "adapter-config"
    assert "layers_to_transform" in caught.value.message
