"""catalogue: every entry is a value, whole or broken."""

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

from vox_host.errors import IntegrityError, ModelError, UsageError, VoxError
from vox_host.models.catalogue import Catalogue
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.importing import import_model
from vox_host.models.installed import BrokenModel, InstalledModel
from vox_host.models.verifying import verify_files


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
    with pytest.raises(VoxError) as caught:
        catalogue.find(entry.name)
    assert entry.problem in caught.value.message
    assert "vox-host model remove" in caught.value.remedy
    assert caught.value.exit_code == entry.error.exit_code
    return entry


def test_a_directory_without_a_manifest_is_listed_with_what_is_missing(catalogue):
    (catalogue.models_dir / "half").mkdir(parents=True)
    entry = broken(catalogue)
    assert entry.missing == ("model-manifest.json",)
    assert isinstance(entry.error, ModelError)  # nothing was recorded that it could differ from


def test_a_lost_file_is_named(catalogue, model):
    (model.path / "model-00002-of-00002.safetensors").unlink()
    entry = broken(catalogue)
    assert entry.code == "model-incomplete"
    assert entry.missing == ("model-00002-of-00002.safetensors",)
    assert isinstance(entry.error, IntegrityError)
    assert dict(entry.error.facts)["found"] == "no such file"


def test_a_cut_file_is_named_with_both_sizes(catalogue, model):
    size = (model.path / "tokenizer.json").stat().st_size
    os.truncate(model.path / "tokenizer.json", 10)
    entry = broken(catalogue)
    assert f"tokenizer.json has 10 bytes where {size} were imported" in entry.problem
    assert isinstance(entry.error, IntegrityError)
    assert str(size) in dict(entry.error.facts)["expected"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": true}'])
def test_a_manifest_that_is_none_any_more_is_an_integrity_failure(catalogue, model, text):
    (model.path / "model-manifest.json").write_text(text)
    error = broken(catalogue).error
    assert isinstance(error, IntegrityError)
    assert error.code == "model-manifest-changed"
    assert dict(error.facts)["found"] == f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def test_a_manifest_that_cannot_be_read_is_not_called_changed(catalogue, model, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(type(model.path), "read_bytes", refuse)
    error = broken(catalogue).error
    assert isinstance(error, ModelError)
    assert error.message.endswith("model-manifest.json cannot be read: Permission denied")


def test_a_manifest_of_a_newer_version_is_not_taken_for_a_changed_one(catalogue, model):
    (model.path / "model-manifest.json").write_text('{"schema_version": 2}')
    error = broken(catalogue).error
    assert isinstance(error, ModelError)
    assert error.code == "model-manifest-version"


def change_manifest(model, change, *, is_signed=False):
    path = model.path / "model-manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    if is_signed:
        fields["manifest_digest"] = None
    path.write_text(json.dumps(fields))


CHANGES = {
    "a file's digest": lambda m: m["files"]["config.json"].update(sha256="0" * 64),
    "a file's size": lambda m: m["files"]["config.json"].update(size_bytes=1),
    "a file less": lambda m: m["files"].pop("tokenizer_config.json"),
    "the digest": lambda m: m.update(digest="0" * 64),
    "its own digest": lambda m: m.update(manifest_digest="0" * 64),
    "the licence": lambda m: m["license"].update(id="mine"),
    "the origin": lambda m: m["source"].update(file="elsewhere"),
    "the name": lambda m: m.update(name="other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_changed_in_a_manifest_is_an_integrity_failure_with_both_digests(
    catalogue, model, change
):
    change_manifest(model, CHANGES[change])
    error = broken(catalogue).error
    assert isinstance(error, IntegrityError)
    assert error.code == "model-manifest-changed"
    digests = {dict(error.facts)[key] for key in ("expected", "found")}
    assert len(digests) == 2
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", digest) for digest in digests)


def test_a_manifest_without_a_digest_of_its_own_is_held_against_the_files_it_lists(catalogue, model):
    change_manifest(model, lambda m: None, is_signed=True)
    assert isinstance(catalogue.list()[0], InstalledModel)
    change_manifest(model, CHANGES["a file's digest"], is_signed=True)
    assert broken(catalogue).code == "model-manifest-changed"


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
    (entry,) = catalogue.list()
    assert (entry.state, entry.touched) == ("changed", (path.name,))
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


def state(catalogue):
    (entry,) = catalogue.list()
    return entry.state, entry.touched


def test_a_listing_says_what_was_touched_and_a_check_that_passes_settles_it(catalogue, model):
    assert state(catalogue) == ("ok", ())
    os.utime(model.path / "config.json")
    assert state(catalogue) == ("changed", ("config.json",))
    verify_files(model, silent)
    assert state(catalogue) == ("ok", ())
    (model.path / "chat_template.jinja").write_text("")
    assert state(catalogue) == ("changed", ("chat_template.jinja",))


def test_a_changed_byte_is_listed_although_size_and_modification_time_are_the_same(catalogue, model):
    path = model.path / "model-00001-of-00002.safetensors"
    before = path.stat()
    flip_last_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert state(catalogue) == ("changed", (path.name,))
    with pytest.raises(IntegrityError):
        verify_files(model, silent, trust_unchanged=True)
    assert state(catalogue) == ("changed", (path.name,))


def test_without_a_record_of_a_check_a_listing_does_not_say_ok(catalogue, model):
    (catalogue.models_dir / ".checked-tiny.json").unlink()
    assert state(catalogue)[0] == "unchecked"
    assert set(state(catalogue)[1]) >= {"config.json", "tokenizer.json"}


def test_a_listing_reads_no_weight(catalogue, model, monkeypatch):
    opened = []
    monkeypatch.setattr("builtins.open", lambda *args, **_: opened.append(args) or 1 / 0)
    real = type(model.path).open
    monkeypatch.setattr(
        type(model.path), "open", lambda self, *a, **k: opened.append(self.name) or real(self, *a, **k)
    )
    assert state(catalogue) == ("ok", ())
    assert opened
    assert not [name for name in opened if "safetensors" in str(name) or "tokenizer" in str(name)]


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
