"""importing: all of a model, or nothing; and what a name that is taken means."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from filelock import FileLock

from vox_host.errors import IntegrityError, ModelError, UsageError
from vox_host.models.catalogue import Catalogue
from vox_host.models.demo_model import DemoSource
from vox_host.models.gguf_import import GgufSource
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.importing import import_model, open_source
from vox_host.models.model_manifest import read_manifest

CASES = Path(__file__).parents[2] / "cases"


def silent(step, done, total):
    pass


@pytest.fixture
def catalogue(tmp_path):
    return Catalogue(tmp_path / "store")


@pytest.fixture
def source(hugging_face_folder):
    return HuggingFaceSource(hugging_face_folder)


def bring(source, catalogue, name="tiny", accept_license=True, progress=silent):
    return import_model(source, catalogue, name=name, accept_license=accept_license, progress=progress)


def inside(catalogue):
    """What is in the store but the lock and the notes of the last check."""
    if not catalogue.models_dir.exists():
        return []
    names = (path.name for path in catalogue.models_dir.iterdir())
    return sorted(name for name in names if name != ".lock" and not name.startswith(".checked-"))


def test_an_imported_model_is_found_with_its_origin_and_terms(source, catalogue):
    imported = bring(source, catalogue)
    assert not imported.was_there
    manifest = read_manifest(imported.model.path / "model-manifest.json")
    assert manifest.name == "tiny"
    assert manifest.license.id == "mit"
    assert manifest.license.accepted
    assert manifest.source["file"] == "tiny-qwen3"
    assert manifest.digest == imported.model.digest == manifest.source["sha256"]
    assert inside(catalogue) == ["tiny"]


def test_the_source_gives_the_name_when_nobody_does(source, catalogue):
    assert bring(source, catalogue, name=None).model.name == "tiny-qwen3"


def test_without_the_licence_accepted_nothing_is_written(source, catalogue):
    with pytest.raises(UsageError) as caught:
        bring(source, catalogue, accept_license=False)
    assert caught.value.code == "license-not-accepted"
    assert "--accept-license" in caught.value.remedy
    assert ("license", "mit") in caught.value.facts
    assert not catalogue.models_dir.exists()


@pytest.mark.parametrize("name", ["", "A", "a/b", "../a", ".a", "a b", "-a", "a-", "é", "a" * 129])
def test_a_name_that_could_leave_the_store_is_refused(source, catalogue, name):
    with pytest.raises(UsageError) as caught:
        bring(source, catalogue, name=name)
    assert caught.value.code == "model-name"
    assert not catalogue.models_dir.exists()


def test_importing_the_same_bytes_again_changes_nothing(source, catalogue, hugging_face_folder):
    first = bring(source, catalogue).model
    before = (first.path / "config.json").stat().st_mtime_ns
    again = bring(HuggingFaceSource(hugging_face_folder), catalogue)
    assert again.was_there
    assert again.model == first
    assert (first.path / "config.json").stat().st_mtime_ns == before


def test_importing_again_does_not_call_a_changed_model_the_same(source, catalogue, hugging_face_folder):
    path = bring(source, catalogue).model.path / "config.json"
    path.write_bytes(path.read_bytes().replace(b"512", b"513"))
    with pytest.raises(IntegrityError) as caught:
        bring(HuggingFaceSource(hugging_face_folder), catalogue)
    assert caught.value.code == "model-digest"


def test_other_bytes_under_the_same_name_are_refused(source, catalogue, hugging_face_folder):
    bring(source, catalogue)
    (hugging_face_folder / "generation_config.json").write_text("{}")
    with pytest.raises(UsageError) as caught:
        bring(HuggingFaceSource(hugging_face_folder), catalogue)
    assert caught.value.code == "model-exists"
    assert "--name" in caught.value.remedy
    assert len({value for _, value in caught.value.facts}) == 2


def test_a_broken_model_of_that_name_is_not_taken_for_the_same(source, catalogue):
    path = bring(source, catalogue).model.path
    (path / "tokenizer.json").unlink()
    with pytest.raises(IntegrityError) as caught:
        bring(source, catalogue)
    assert caught.value.code == "model-broken"
    assert "vox-host model remove tiny" in caught.value.remedy


def test_too_little_room_is_said_before_anything_is_written(source, catalogue, monkeypatch):
    free = source.needed_bytes() - 1
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - free, free)
    )
    with pytest.raises(ModelError) as caught:
        bring(source, catalogue)
    assert caught.value.code == "disk-full"
    assert dict(caught.value.facts)["needed_bytes"] == free + 1
    assert dict(caught.value.facts)["free_bytes"] == free
    assert inside(catalogue) == []


def test_an_import_that_fails_half_way_leaves_nothing(source, catalogue, hugging_face_folder):
    def fail(step, done, total):
        if done > 20_000:
            raise OSError(28, "No space left on device")

    with pytest.raises(ModelError) as caught:
        bring(source, catalogue, progress=fail)
    assert "No space left on device" in caught.value.message
    assert inside(catalogue) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from vox_host.models.catalogue import Catalogue
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.importing import import_model

def die(step, done, total):
    if done > 20_000:
        os.kill(os.getpid(), signal.SIGKILL)

source, store = map(Path, sys.argv[1:])
import_model(HuggingFaceSource(source), Catalogue(store), name="tiny", accept_license=True, progress=die)
"""


def test_a_killed_import_leaves_nothing_to_see_and_the_next_one_cleans_up(
    hugging_face_folder, catalogue, run_python
):
    done = run_python(KILLED, hugging_face_folder, catalogue.models_dir)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert catalogue.list() == []
    left = inside(catalogue)
    assert len(left) == 1
    assert any(path.suffix == ".safetensors" for path in (catalogue.models_dir / left[0]).rglob("*"))
    bring(HuggingFaceSource(hugging_face_folder), catalogue)
    assert inside(catalogue) == ["tiny"]


def test_two_imports_at_once_are_refused(source, catalogue):
    catalogue.models_dir.mkdir()
    with FileLock(catalogue.models_dir / ".lock"), pytest.raises(UsageError) as caught:
        bring(source, catalogue)
    assert caught.value.code == "store-busy"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_is_named(source, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ModelError) as caught:
        bring(source, Catalogue(tmp_path / "locked" / "store"))
    assert caught.value.code == "import-failed"


def test_a_store_whose_parent_is_a_file_is_named(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError) as caught:
        bring(source, Catalogue(tmp_path / "file" / "store"))
    assert caught.value.code == "import-failed"
    assert str(tmp_path / "file") in caught.value.message


# --- what a source's name means ---------------------------------------------------------------


def test_a_source_is_known_by_what_it_is(tmp_path, write_gguf, hugging_face_folder):
    write_gguf(tmp_path / "m.gguf")
    assert isinstance(open_source(str(tmp_path / "m.gguf"), environment={}), GgufSource)
    assert isinstance(open_source(str(hugging_face_folder), environment={}), HuggingFaceSource)
    assert isinstance(open_source("gemma-3-270m", environment={}), DemoSource)


def test_a_gguf_file_gives_a_name_that_can_be_one(tmp_path, write_gguf):
    write_gguf(tmp_path / "My Model (v2).Q4_K_M.gguf")
    opened = open_source(str(tmp_path / "My Model (v2).Q4_K_M.gguf"), environment={})
    assert opened.default_name == "my-model-v2-.q4_k_m"


def test_nothing_of_that_name_lists_the_demo_models():
    with pytest.raises(UsageError) as caught:
        open_source("no-such-thing", environment={})
    assert "gemma-3-270m" in dict(caught.value.facts)["demo_models"]


def test_a_folder_of_gguf_files_asks_for_one_of_them(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        open_source(str(tmp_path), environment={})
    assert str(tmp_path / "a.gguf") in caught.value.remedy


def test_one_file_of_a_folder_asks_for_the_folder(hugging_face_folder):
    with pytest.raises(UsageError) as caught:
        open_source(str(hugging_face_folder / "model-00001-of-00002.safetensors"), environment={})
    assert str(hugging_face_folder) in caught.value.remedy


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "HTML page"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"\xff\0\0\0\0\0\0\0{}", "declares a header of 255 bytes"),
        (b"", "has 0 bytes"),
    ],
)
def test_a_file_that_only_has_the_name_of_weights_is_told_what_it_is(tmp_path, data, said):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        open_source(str(tmp_path / "model.safetensors"), environment={})
    assert said in caught.value.message
    assert "nothing was imported" in caught.value.message


def test_a_json_file_is_a_part_of_a_model_only_beside_weights(tmp_path, hugging_face_folder):
    (tmp_path / "data.json").write_text("{}")
    with pytest.raises(UsageError, match="not a model"):
        open_source(str(tmp_path / "data.json"), environment={})
    with pytest.raises(UsageError, match="one file of a model"):
        open_source(str(hugging_face_folder / "config.json"), environment={})


def test_a_file_of_weights_that_is_not_there_is_not_taken_for_one(tmp_path):
    with pytest.raises(UsageError, match="neither a file"):
        open_source(str(tmp_path / "absent.safetensors"), environment={})


def test_any_other_file_is_told_that_it_is_no_gguf():
    with pytest.raises(ModelError, match="magic at byte 0 is '# In'; a GGUF file has 'GGUF'"):
        open_source(str(CASES / "README.md"), environment={})
