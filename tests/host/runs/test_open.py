"""What a run directory is, and what is said of one that isn't right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from fixtures.runs import LAYERS, a_checkpoint, a_run, some_facts
from vox_host.errors import IntegrityError, ModelError, UsageError, VoxError
from vox_host.runs.layout import PUBLISHED, RunDirectory
from vox_host.runs.manifest import AdapterManifest, FileRecord, manifest_text, parse_manifest
from vox_host.runs.open import is_adapter_folder, open_adapter
from vox_host.runs.publish import publish_adapter
from vox_plugin_api.adapter_keys import adapter_keys


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = a_run(tmp_path / "tools")
    checkpoint, digest = a_checkpoint(run.checkpoint(3))
    publish_adapter(run, checkpoint, some_facts(), sha256=digest)
    return run


def refusal(path: Path) -> VoxError:
    with pytest.raises(VoxError) as caught:
        open_adapter(path)
    return caught.value


def test_what_was_published_is_what_is_opened(run: RunDirectory) -> None:
    source = open_adapter(run.path)
    facts = some_facts()
    assert source.name == "tools"
    assert source.origin == "run"
    assert source.file == run.adapter_model
    assert (source.base_name, source.base_digest) == ("tiny", facts.base_model.digest)
    assert source.adapter_digest == facts.adapter_digest
    assert source.chat_template == "{{ messages }}"
    assert set(source.key_map) == {key for layer in LAYERS for key in adapter_keys(layer)}
    assert all(ours == theirs for ours, theirs in source.key_map.items())
    assert (source.config.rank, source.config.alpha) == (4, 8.0)
    assert source.config.targets == list(LAYERS)
    assert source.params().digest == source.sha256


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "adapter_config.json", "chat_template.jinja", "tokenizer.json"]
)
def test_a_changed_byte_is_named_with_both_digests(run: RunDirectory, name: str) -> None:
    content = bytearray((run.path / name).read_bytes())
    content[-1] ^= 1
    (run.path / name).write_bytes(content)
    error = refusal(run.path)
    assert isinstance(error, IntegrityError)
    assert error.exit_code == 4
    assert error.code == "adapter-changed"
    facts = dict(error.facts)
    assert facts["file"] == str(run.path / name)
    assert facts["expected"].startswith("sha256:")
    assert facts["found"].startswith("sha256:")
    assert facts["expected"] != facts["found"]


def test_a_changed_manifest_is_caught_by_its_own_digest(run: RunDirectory) -> None:
    text = run.adapter_manifest.read_text()
    run.adapter_manifest.write_text(text.replace('"alpha": 8.0', '"alpha": 9.0'))
    error = refusal(run.path)
    assert (error.exit_code, error.code) == (4, "adapter-manifest-changed")
    assert {"expected", "found"} <= dict(error.facts).keys()
    assert f"`vox-host train --resume {run.path}`" in str(error.remedy)
    (run.path / PUBLISHED).mkdir()  # a publish that was cut short is read there, and resumed where the run is
    with pytest.raises(IntegrityError) as caught:
        parse_manifest(b"{}", run.path / PUBLISHED / "adapter_manifest.json")
    assert f"`vox-host train --resume {run.path}`" in str(caught.value.remedy)


def test_a_manifest_of_before_run_digests_keeps_its_own_digest(run: RunDirectory) -> None:
    text = run.adapter_manifest.read_text()
    assert "run_digest" not in text
    manifest = parse_manifest(text.encode(), run.adapter_manifest)
    assert manifest.run_digest is None and manifest_text(manifest) == text
    bound = manifest_text(manifest.model_copy(update={"run_digest": "ab" * 32}))
    assert parse_manifest(bound.encode(), run.adapter_manifest).run_digest == "ab" * 32


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "vox-host adapter", "version": 3}', "\udcff"])
def test_a_damaged_manifest_is_an_integrity_error(run: RunDirectory, text: str) -> None:
    run.adapter_manifest.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert refusal(run.path).exit_code == 4


def test_a_manifest_of_another_version_is_named(run: RunDirectory) -> None:
    text = run.adapter_manifest.read_text()
    run.adapter_manifest.write_text(text.replace('"version": 3', '"version": 4'))
    error = refusal(run.path)
    assert isinstance(error, ModelError)
    assert dict(error.facts) == {"expected": 3, "found": 4}


def test_a_manifest_that_binds_nothing_is_refused(run: RunDirectory) -> None:
    data = run.adapter_manifest.read_bytes()
    manifest = parse_manifest(data, run.adapter_manifest)
    files = {name: record for name, record in manifest.files.items() if "model" not in name}
    run.adapter_manifest.write_text(manifest_text(manifest.model_copy(update={"files": files})))
    assert refusal(run.path).exit_code == 4


def test_a_run_without_weights_says_what_is_missing(run: RunDirectory, tmp_path: Path) -> None:
    run.adapter_model.unlink()
    error = refusal(run.path)
    assert (error.exit_code, error.code) == (4, "run-incomplete")
    assert dict(error.facts)["missing"] == ["adapter_model.safetensors"]
    assert "lacks adapter_model.safetensors" in error.message
    begun = a_run(tmp_path / "begun")
    error = refusal(begun.path)
    assert (error.exit_code, error.code) == (2, "run-incomplete")
    assert "has no adapter yet" in error.message and "first checkpoint" in str(error.remedy)
    assert dict(error.facts)["missing"] == [
        "adapter_model.safetensors", "adapter_config.json", "adapter_manifest.json",
    ]  # fmt: skip
    assert "--resume" in str(error.remedy)


NAMES = ("adapter_model.safetensors", "adapter_config.json", "chat_template.jinja", "tokenizer.json")


# A copy without both manifest and run.json is of PEFT's layout, which lacks nothing.
@pytest.mark.parametrize(
    ("name", "is_run"),
    [("adapter_manifest.json", True), *((name, is_run) for name in NAMES for is_run in (True, False))],
)
def test_a_file_of_a_published_adapter_that_is_gone_is_a_matter_of_integrity(
    run: RunDirectory, name: str, is_run: bool
) -> None:
    (run.path / name).unlink()
    if not is_run:
        run.run_json.unlink()
    error = refusal(run.path)
    assert (error.exit_code, error.code) == (4, "run-incomplete")
    assert dict(error.facts)["missing"] == [name]
    assert f"lacks {name}, which its adapter was published with" in error.message
    assert (f"--resume {run.path}` puts back" in str(error.remedy)) is is_run


def test_a_run_that_was_killed_before_its_first_publish_says_what_resuming_does(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    a_checkpoint(run.checkpoint(3))
    error = refusal(run.path)
    assert error.exit_code == 2
    assert error.remedy == f"`vox-host train --resume {run.path}` publishes that of its checkpoints."


def test_a_file_that_is_gone_or_can_not_be_read_is_named(run: RunDirectory) -> None:
    template = run.chat_template.rename(run.path / "elsewhere")
    assert dict(refusal(run.path).facts)["missing"] == ["chat_template.jinja"]
    run.chat_template.mkdir()
    error = refusal(run.path)
    assert error.code == "run-unreadable"
    assert str(run.chat_template) in error.message
    run.chat_template.rmdir()
    template.rename(run.chat_template)
    assert open_adapter(run.path).name == "tools"


def test_a_template_that_is_no_text(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.chat_template.write_bytes(b"\xff")
    checkpoint, _ = a_checkpoint(run.checkpoint(3))
    publish_adapter(run, checkpoint, some_facts())
    assert refusal(run.path).code == "chat-template-encoding"


def test_the_current_folder_has_a_name(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.checkpoints)
    assert open_adapter(Path("..")).name == "tools"


def test_what_is_no_run_at_all(tmp_path: Path) -> None:
    assert isinstance(refusal(tmp_path / "nowhere"), UsageError)
    assert refusal(tmp_path).code == "run-incomplete"
    assert not is_adapter_folder(tmp_path)


def test_a_run_and_a_bare_adapter_look_like_one(run: RunDirectory, tmp_path: Path) -> None:
    assert is_adapter_folder(run.path)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "adapter_config.json").write_text("{}")
    assert is_adapter_folder(bare)


def test_the_manifest_is_strict() -> None:
    files = {"adapter_model.safetensors": FileRecord(sha256="0" * 64, size_bytes=1)}
    whole = json.loads(manifest_text(AdapterManifest(**some_facts().model_dump(), files=files)))
    assert AdapterManifest.model_validate(whole).layer_order == LAYERS
    for change in (
        {"rank": "4"},
        {"rank": 0},
        {"alpha": float("nan")},
        {"extra": 1},
        {"seed": -1},
        {"base_key_map": {"lm_head": "x"}},
        {"layer_order": ["lm_head", "lm_head"]},
        {"numerics": {"mode": "roughly", "version": 13}},
        {"adapter_digest": "AB" * 32},
        {"files": {"../elsewhere": {"sha256": "0" * 64, "size_bytes": 1}}},
    ):
        with pytest.raises(ValidationError):
            AdapterManifest.model_validate({**whole, **change})
    for field in some_facts().model_dump():
        with pytest.raises(ValidationError):
            AdapterManifest.model_validate({k: v for k, v in whole.items() if k != field})


@pytest.mark.parametrize(
    "name",
    ["adapter_model.safetensors", "adapter_manifest.json", "run.json", ".published/adapter_config.json"],
)
def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(run: RunDirectory, name: str) -> None:
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(run.path / name)
    error = refusal(run.path)
    assert error.code == "run-special-file" and name in error.message
