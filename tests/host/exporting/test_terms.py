"""The base model's terms: beside what is exported, in a GGUF file itself, and found again by an import."""

from __future__ import annotations

import dataclasses

import gguf
import pytest

from fixtures.adapters import import_base
from host.exporting.test_gguf import config_of
from host.exporting.test_merged_folder import write as write_merged
from vox_host.exporting.gguf_adapter import write_gguf_adapter
from vox_host.exporting.terms import gguf_license, write_terms

LINK = "https://example.org/terms"
TEXTS = {"TINY_TERMS.html": "<p>Terms", "NOTICE.md": "Notice"}


@pytest.fixture
def linked(make_job):
    """A job whose base has terms as the demo model has them: a link, and texts of any name."""
    job = make_job("gemma3", ["q_proj"])
    folder = job.base.path / "license"
    (folder / "LICENSE").unlink()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, "utf-8")
    return dataclasses.replace(job, base=dataclasses.replace(job.base, license_terms=LINK))


def test_the_texts_and_the_link_are_written_and_named(linked, tmp_path):
    (tmp_path / "out").mkdir()
    assert write_terms(linked.base, tmp_path / "out", "It is this.") == sorted(TEXTS)
    assert (tmp_path / "out" / "README.md").read_text("utf-8") == (
        f"---\nlicense: tiny-1.0\nlicense_link: {LINK}\n---\nIt is this.\n"
        f"The base model's terms apply (tiny-1.0): {LINK}, NOTICE.md, TINY_TERMS.html\n"
    )
    assert {name: (tmp_path / "out" / name).read_text("utf-8") for name in TEXTS} == TEXTS


def test_without_texts_it_says_what_was_noted_at_the_import(linked, tmp_path):
    for name in TEXTS:
        (linked.base.path / "license" / name).unlink()
    base = dataclasses.replace(linked.base, license_terms="the file states no licence")
    (tmp_path / "out").mkdir()
    assert write_terms(base, tmp_path / "out", "It is this.") == []
    said = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert (
        said.endswith("terms apply (tiny-1.0): the file states no licence\n") and "license_link" not in said
    )
    assert gguf_license(base) == {"general.license": "tiny-1.0"}


def test_an_import_of_what_was_merged_has_them_all(linked, tmp_path):
    write_merged(linked, tmp_path / "out")
    again = import_base(tmp_path / "home", tmp_path / "out", "again")
    assert (again.license, again.license_terms) == ("tiny-1.0", LINK)
    kept = {file.name: file.read_text("utf-8") for file in (again.path / "license").iterdir()}
    assert kept == TEXTS


def test_a_gguf_adapter_states_them_itself(linked, tmp_path):
    target = tmp_path / "a.gguf"
    write_gguf_adapter(linked.adapter, linked.base, config_of(linked), target, lambda *_: None)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(target).fields.items()}
    assert fields["general.license"] == "tiny-1.0" and fields["general.license.link"] == LINK
