"""model_manifest: one digest for one model."""

import hashlib

from vox_host.models.model_manifest import model_digest

ONE, TWO, THREE = ("1" * 64, "2" * 64, "3" * 64)


def test_the_digest_is_over_names_and_digests_in_order():
    expected = hashlib.sha256(f"{TWO}  a\n{ONE}  b\n".encode()).hexdigest()
    assert model_digest({"b": ONE, "a": TWO}) == expected


def test_the_digest_does_not_depend_on_the_order_of_files():
    assert model_digest({"a": ONE, "b": TWO}) == model_digest({"b": TWO, "a": ONE})


def test_exchanged_contents_are_another_model():
    assert model_digest({"a": ONE, "b": TWO}) != model_digest({"a": TWO, "b": ONE})


def test_the_terms_beside_a_model_are_no_part_of_it():
    with_terms = {"a": ONE, "license/LICENSE": THREE}
    assert model_digest(with_terms) == model_digest({"a": ONE})
    assert model_digest({"a": ONE, "license.json": THREE}) != model_digest({"a": ONE})
