"""catalogue: every entry is a value, whole or broken."""

import json
import os
import subprocess
import sys

import pytest

from vox_host.errors import IntegrityError, ModelError, UsageError
from vox_host.models.catalogue import BrokenModel, Catalogue, InstalledModel, verify_files
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.importing import import_model


def silent(step, done, total):
    pass


@pytest.fixture
def catalogue(tmp_path):
    return Catalogue(tmp_path / "store")


@pytest.fixture
def model(catalogue, hugging_face_folder):
    source = HuggingFaceSource(hugging_face_folder)
    return import_model(source, catalogue, name="tiny", accept_license=True, progress=silent).model


def test_a_store_that_does_not_exist_is_empty(catalogue):
    assert catalogue.list() == []


def test_a_model_is_as_large_as_the_weights_inside(catalogue, model):
    weights = sum(path.stat().st_size for path in model.path.glob("*.safetensors"))
    assert model.size_bytes == weights
    assert isinstance(catalogue.list()[0], InstalledModel)
    assert (model.architecture, model.license, model.context_length) == ("qwen3", "mit", 512)


def test_entries_come_in_order_and_hidden_ones_not_at_all(catalogue, hugging_face_folder):
    source = HuggingFaceSource(hugging_face_folder)
    for name in ("b", "a.1", "a"):
        import_model(source, catalogue, name=name, accept_license=True, progress=silent)
    (catalogue.models_dir / ".importing-x").mkdir()
    (catalogue.models_dir / "notes.txt").write_text("")
    assert [entry.name for entry in catalogue.list()] == ["a", "a.1", "b"]


def broken(catalogue):
    (entry,) = catalogue.list()
    assert isinstance(entry, BrokenModel)
    with pytest.raises(ModelError) as caught:
        catalogue.find(entry.name)
    assert entry.problem in caught.value.message
    assert "vox-host model remove" in caught.value.remedy
    return entry


def test_a_directory_without_a_manifest_is_listed_with_what_is_missing(catalogue):
    (catalogue.models_dir / "half").mkdir(parents=True)
    entry = broken(catalogue)
    assert entry.missing == ("model-manifest.json",)


def test_a_lost_file_is_named(catalogue, model):
    (model.path / "model-00002-of-00002.safetensors").unlink()
    entry = broken(catalogue)
    assert entry.code == "model-incomplete"
    assert entry.missing == ("model-00002-of-00002.safetensors",)


def test_a_cut_file_is_named_with_both_sizes(catalogue, model):
    os.truncate(model.path / "tokenizer.json", 10)
    assert "tokenizer.json has 10 bytes where" in broken(catalogue).problem


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}'])
def test_a_malformed_manifest_is_a_broken_entry(catalogue, model, text):
    (model.path / "model-manifest.json").write_text(text)
    assert broken(catalogue).code == "model-manifest-invalid"


def test_a_manifest_whose_files_were_changed_is_a_broken_entry(catalogue, model):
    path = model.path / "model-manifest.json"
    fields = json.loads(path.read_text())
    fields["files"]["config.json"]["sha256"] = "0" * 64
    path.write_text(json.dumps(fields))
    assert "digest" in broken(catalogue).problem


def test_an_unknown_model_is_told_with_those_there_are(catalogue, model):
    with pytest.raises(UsageError) as caught:
        catalogue.find("other")
    assert dict(caught.value.facts)["models"] == ["tiny"]


@pytest.mark.parametrize("name", ["..", ".", "", ".lock", "a/b", "/etc"])
def test_nothing_outside_the_store_can_be_named(catalogue, model, name):
    for action in (catalogue.find, catalogue.remove):
        with pytest.raises(UsageError) as caught:
            action(name)
        assert caught.value.code == "model-name"
    assert model.path.is_dir()


def test_removing_leaves_nothing_of_the_model(catalogue, model):
    assert catalogue.remove("tiny") == model.path
    assert catalogue.list() == []
    assert [path.name for path in catalogue.models_dir.iterdir()] == [".lock"]
    with pytest.raises(UsageError):
        catalogue.remove("tiny")


def test_a_broken_model_can_be_removed(catalogue, model):
    (model.path / "model-manifest.json").write_text("")
    catalogue.remove("tiny")
    assert catalogue.list() == []


def test_verifying_finds_one_changed_byte(catalogue, model):
    verify_files(model, silent)
    path = model.path / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert isinstance(catalogue.list()[0], InstalledModel)
    with pytest.raises(IntegrityError) as caught:
        verify_files(model, silent)
    facts = dict(caught.value.facts)
    assert facts["file"] == str(path)
    assert facts["expected"] != facts["found"]


def flip_last_byte(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def hashed_files(model):
    """Count the files that a check before use reads."""
    read = set()
    verify_files(model, lambda step, done, total: read.add(done), trust_unchanged=True)
    return len(read)


def test_an_import_counts_as_the_first_check_and_nothing_is_read_again(catalogue, model):
    assert hashed_files(model) == 0


def test_a_file_that_was_touched_is_read_once_and_found_unchanged(catalogue, model):
    os.utime(model.path / "config.json")
    assert hashed_files(model) == 1
    assert hashed_files(model) == 0


def test_a_changed_byte_is_found_although_size_and_modification_time_are_the_same(catalogue, model):
    path = model.path / "model-00001-of-00002.safetensors"
    before = path.stat()
    flip_last_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    for _ in range(2):  # a mismatch is not remembered as a check that passed
        with pytest.raises(IntegrityError) as caught:
            verify_files(model, silent, trust_unchanged=True)
        assert caught.value.code == "model-digest"
        assert dict(caught.value.facts)["file"] == str(path)


def test_a_lost_or_torn_cache_costs_time_only(catalogue, model):
    cache = catalogue.models_dir / ".checked-tiny.json"
    for text in (None, "", "[]", '{"tree_digest": "0", "files": {}}'):
        cache.unlink() if text is None else cache.write_text(text)
        assert hashed_files(model) > 1
        assert hashed_files(model) == 0


def test_a_file_that_would_be_read_in_place_of_a_recorded_one_is_refused(catalogue, model):
    (model.path / "notes.txt").write_text("harmless")
    verify_files(model, silent, trust_unchanged=True)
    (model.path / "model.safetensors").write_bytes(b"")
    with pytest.raises(IntegrityError) as caught:
        verify_files(model, silent, trust_unchanged=True)
    assert caught.value.code == "model-file-added"
    assert dict(caught.value.facts)["file"] == str(model.path / "model.safetensors")


def test_listing_needs_neither_numpy_nor_a_tokenizer(catalogue, model):
    script = (
        "import sys; from pathlib import Path\n"
        "from vox_host.models.catalogue import Catalogue\n"
        "assert len(Catalogue(Path(sys.argv[1])).list()) == 1\n"
        "print([name for name in ('numpy', 'tokenizers', 'gguf', 'torch') if name in sys.modules])\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(catalogue.models_dir)], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"
