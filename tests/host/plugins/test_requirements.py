"""Device requirements as text."""

import pytest

from vox_host.requirements import parse_requirement


def test_a_comparison_is_parsed_and_compares_versions_not_text() -> None:
    requirement = parse_requirement("nvidia :: compute_capability >= 8.0")
    assert (requirement.namespace, requirement.feature) == ("nvidia", "compute_capability")
    assert requirement.accepts("10.0")
    assert requirement.accepts("8.0")
    assert not requirement.accepts("7.5")


def test_a_comparison_may_have_two_ends() -> None:
    requirement = parse_requirement("nvidia::driver >= 550, < 600")
    assert requirement.accepts("560.35.03")
    assert not requirement.accepts("600.1")


def test_a_listed_feature_is_parsed() -> None:
    requirement = parse_requirement("cpu :: isa :: x86-64-v3")
    assert (requirement.namespace, requirement.feature, requirement.value) == ("cpu", "isa", "x86-64-v3")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "not a requirement"),
        ("nvidia", "not a requirement"),
        ("nvidia : driver >= 1", "not a requirement"),
        ("amd :: driver >= 1", "namespace 'amd'"),
        ("nvidia :: colour >= 1", "feature 'colour'"),
        ("nvidia :: driver :: 550", "compared"),
        ("cpu :: isa >= 3", "list"),
        ("nvidia :: driver >= new", "'>= new'"),
        ("nvidia :: driver", "not a requirement"),
    ],
)
def test_what_is_no_requirement_says_what_was_expected(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse_requirement(text)
