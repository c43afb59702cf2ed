"""A run or an adapter folder as `--model`: its base is found, it is loaded, and what is served is said."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.runs import LAYERS, a_checkpoint, a_run, adapter_bytes, some_facts
from fixtures.scripted_home import MACHINE, scripted_candidate, scripted_home
from vox_host.app.compose import ModelOptions, OpenModel, open_model
from vox_host.app.held_adapter import HeldAdapter
from vox_host.app.named_model import find_named_model
from vox_host.errors import IntegrityError, ModelError, UsageError, VoxError, WorkerFailedError
from vox_host.models.catalogue import Catalogue
from vox_host.resolution import Candidate
from vox_host.runs import open as opening
from vox_host.runs.layout import RunDirectory
from vox_host.runs.manifest import BaseModelRecord
from vox_host.runs.open import open_adapter
from vox_host.runs.publish import publish_adapter
from vox_host.runs.source import AdapterSource
from vox_host.settings import Settings
from vox_host.workers import Limits
from vox_plugin_api import messages as m

SAID = list(b"adapted")
TENSORS = "cd" * 32
"""The adapter digest of `some_facts`, which the scripted worker says that it loaded."""
Opened = AbstractAsyncContextManager[OpenModel]


def params(tokens: int = 7) -> m.GenerateParams:
    return m.GenerateParams(token_ids=[256], max_tokens=tokens, sampling=m.SamplingParams(temperature=0))


def a_home(tmp_path: Path, **script: object) -> Catalogue:
    return Catalogue(
        scripted_home(tmp_path, {"tokens": SAID, "adapter_digest": TENSORS, **script}) / "models"
    )


def publish(run: RunDirectory, step: int, digest: str, **facts: object) -> None:
    checkpoint, _ = a_checkpoint(run.checkpoint(step), adapter_bytes(float(step)))
    base = BaseModelRecord(name="tiny", digest=digest, path="/elsewhere")
    publish_adapter(run, checkpoint, some_facts(**{"base_model": base, "step": step, **facts}))


@pytest.fixture
def store(tmp_path: Path) -> Catalogue:
    return a_home(tmp_path)


@pytest.fixture
def run(store: Catalogue, tmp_path: Path) -> RunDirectory:
    run = a_run(tmp_path / "runs" / "tools")
    publish(run, 1, store.find("tiny").digest)
    return run


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    return scripted_candidate(tmp_path)


def opened(
    store: Catalogue, model: Path | str, candidate: Candidate, said: list[str] | None = None, **more: object
) -> Opened:
    options = ModelOptions(model=str(model), limits=Limits(backoff_s=0.05, shutdown_grace_s=2.0), **more)
    settings = Settings(home=store.models_dir.parent)
    said = [] if said is None else said
    return open_model(settings, options, MACHINE, candidates=[candidate], progress=said.append)


async def refusal(context: Opened) -> VoxError:
    with pytest.raises(VoxError) as caught:
        async with context:
            pass
    return caught.value


async def test_a_run_is_served_and_says_what_it_is(store, run, candidate):
    said: list[str] = []
    async with opened(store, run.path, candidate, said) as model:
        info = model.service.info
        assert (await model.service.collect(params())).text == "adapted"
        assert (info.name, info.digest) == ("tools", store.find("tiny").digest)
        assert info.adapter.as_dict() == {
            "digest": TENSORS,
            "file_digest": open_adapter(run.path).sha256,
            "base": "tiny",
            "origin": "run",
            "rank": 4,
            "layers": 2,
            "applied": "unmerged",
        }
        ids = await model.service.encode_chat([{"role": "user", "content": "x"}])
        # The run's own template, not the base model's.
        assert bytes(i for i in ids if i < 256) == b"[{'role': 'user', 'content': 'x'}]"
    (line,) = [line for line in said if line.startswith("adapter tools")]
    for word in (TENSORS, "rank 4", "2 of 2 layers of tiny", "unmerged"):
        assert word in line


async def test_a_worker_that_died_comes_back_with_the_very_adapter(store, run, candidate):
    """Although the run has published another one meanwhile."""
    async with opened(store, run.path, candidate) as model:
        first = model.service.info.adapter
        publish(run, 2, store.find("tiny").digest)
        assert open_adapter(run.path).sha256 != first.file_digest
        os.kill(model.supervisor.state.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while model.supervisor.state.restarts == 0 or not model.service.health().is_ready:
                await asyncio.sleep(0.005)
        assert (await model.service.collect(params())).text == "adapted"
    log = "".join(p.read_text() for p in (store.models_dir.parent / "log").rglob("*") if p.is_file())
    loaded = [line.split()[-1] for line in log.splitlines() if "vox-scripted: adapter" in line]
    (copy,) = [path for path in loaded if path != str(run.adapter_model)]
    assert len(loaded) == 2
    assert not Path(copy).exists(), "the copy lasts as long as the load"


async def test_a_file_that_is_replaced_during_the_load_is_loaded_from_what_is_held(run, store):
    with HeldAdapter(open_adapter(run.path)) as held:
        seen = []

        async def load(adapter: m.AdapterParams) -> bytes:
            seen.append(adapter.file)
            if len(seen) == 1:
                publish(run, 2, store.find("tiny").digest)
                raise IntegrityError("adapter-digest", "another file")
            return Path(adapter.file).read_bytes()

        assert await held.load(load) == adapter_bytes(1.0)
        assert seen[0] == str(run.adapter_model) != seen[1]


async def test_an_error_of_the_worker_about_the_file_in_place_is_the_users(run):
    with HeldAdapter(open_adapter(run.path)) as held:

        async def load(adapter: m.AdapterParams) -> None:
            raise WorkerFailedError("adapter-digest", "a disk that lies")

        with pytest.raises(WorkerFailedError, match="a disk that lies"):
            await held.load(load)


@pytest.mark.parametrize("is_replaced_before", [False, True])
def test_what_is_held_apart_is_touched_by_no_publish_and_gone_afterwards(run, store, is_replaced_before):
    digest = store.find("tiny").digest
    first = open_adapter(run.path)
    with HeldAdapter(first) as held:
        if is_replaced_before:
            publish(run, 2, digest)
        with held.apart() as source:
            publish(run, 3, digest)
            assert source.file.read_bytes() == adapter_bytes(1.0)
            assert (source.folder, source.sha256) == (first.folder, first.sha256)
            assert (source.file.parent / "adapter_config.json").is_file()
        assert not source.file.parent.exists()
    other = replace(open_adapter(run.path), origin="peft")
    with HeldAdapter(other) as held, held.apart() as source:
        assert source is held.source


def test_a_publish_while_the_base_is_looked_for_is_followed(run, store, monkeypatch):
    seen = []

    def check(source, model):
        seen.append(source.sha256)
        if len(seen) == 1:
            publish(run, 2, model.digest)
            raise ModelError("checkpoint-unreadable", "the file of then has gone")

    monkeypatch.setattr("vox_host.app.named_model.check_fit", check)
    found = find_named_model(store, str(run.path))
    assert seen == [seen[0], found.adapter.sha256] and seen[0] != seen[1]

    def refuse(source, model):
        raise ModelError("adapter-base", "it does not fit")

    monkeypatch.setattr("vox_host.app.named_model.check_fit", refuse)
    with pytest.raises(ModelError, match="it does not fit"):
        find_named_model(store, str(run.path))


async def test_a_publish_between_reading_and_holding_is_followed(run, store):
    source = open_adapter(run.path)
    publish(run, 2, store.find("tiny").digest)
    with HeldAdapter(source) as held:
        assert held.source.sha256 == open_adapter(run.path).sha256 != source.sha256


async def test_a_changed_byte_starts_nothing(store, run, candidate):
    content = bytearray(run.adapter_model.read_bytes())
    content[-1] ^= 1
    run.adapter_model.write_bytes(content)
    said: list[str] = []
    error = await refusal(opened(store, run.path, candidate, said))
    assert (error.code, error.exit_code) == ("adapter-changed", 4)
    assert not any("starting" in line for line in said)


async def test_a_plugin_without_the_capability_is_refused_before_it_starts(store, run, candidate):
    section = candidate.manifest.backend.model_copy(update={"capabilities": ("generate",)})
    unable = replace(candidate, manifest=candidate.manifest.model_copy(update={"backend": section}))
    for plugin in ("auto", "vox-scripted"):
        said: list[str] = []
        error = await refusal(opened(store, run.path, unable, said, plugin=plugin))
        assert error.exit_code == 3
        assert 'no capability "adapters"' in str(error.facts)
        assert not any("starting" in line for line in said)
    async with opened(store, "tiny", unable) as model:
        assert model.service.info.adapter is None


async def test_a_plugin_that_loads_no_adapter_or_another_is_not_served(tmp_path, candidate):
    for digest, code, status in ((None, "adapter-ignored", 5), ("ee" * 32, "adapter-digest", 4)):
        store = a_home(tmp_path / str(status), adapter_digest=digest)
        run = a_run(tmp_path / str(status) / "tools")
        publish(run, 1, store.find("tiny").digest)
        error = await refusal(opened(store, run.path, candidate))
        assert (error.code, error.exit_code) == (code, status)
        assert {"expected", "found"} <= dict(error.facts).keys()


# --- the base model -----------------------------------------------------------------------------


def as_from_elsewhere(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, base_name: str | None) -> None:
    """Have the run read as a folder of another layout, which knows no digest of ours."""
    source: AdapterSource = replace(
        open_adapter(run.path), origin="peft", base_name=base_name, base_digest=None, adapter_digest=None
    )
    monkeypatch.setattr(opening, "_is_ours", lambda path: False)
    monkeypatch.setattr(opening, "READERS", (lambda path: None, lambda path: source))


def found(store: Catalogue, run: RunDirectory, base: str | None = None) -> str:
    return find_named_model(store, str(run.path), base=base).base.name


def problem(store: Catalogue, text: str, base: str | None = None) -> VoxError:
    with pytest.raises(VoxError) as caught:
        find_named_model(store, text, base=base)
    return caught.value


def test_the_base_is_found_by_its_digest_whatever_it_is_called(store, tmp_path):
    run = a_run(tmp_path / "run")
    publish(run, 1, store.find("tiny").digest, base_model=BaseModelRecord(
        name="called-otherwise", digest=store.find("tiny").digest, path="/x"))  # fmt: skip
    assert found(store, run) == "tiny"
    assert found(store, run, "tiny") == "tiny"


def test_a_model_of_the_right_name_and_another_digest_is_refused_with_both(store, tmp_path):
    run = a_run(tmp_path / "run")
    publish(run, 1, "ab" * 32)
    for base in (None, "tiny"):
        error = problem(store, str(run.path), base)
        assert (error.code, error.exit_code) == ("adapter-base", 4)
        facts = dict(error.facts)
        assert facts["expected"] == "sha256:" + "ab" * 32
        assert facts["found"] == f"sha256:{store.find('tiny').digest}"


def test_a_base_that_is_not_in_the_store_is_named(store, tmp_path):
    run = a_run(tmp_path / "run")
    base = BaseModelRecord(name="gone", digest="ab" * 32, path="/x")
    publish(run, 1, base.digest, base_model=base)
    error = problem(store, str(run.path))
    assert (error.code, error.exit_code) == ("adapter-base-missing", 2)
    assert dict(error.facts)["expected"] == f"gone, sha256:{base.digest}"


@pytest.mark.parametrize("name", ["tiny", "someone/Tiny", "/models/tiny/"])
def test_an_adapter_from_elsewhere_finds_its_base_by_name(store, run, monkeypatch, name):
    as_from_elsewhere(monkeypatch, run, name)
    assert found(store, run) == "tiny"


@pytest.mark.parametrize("name", [None, "google/another"])
def test_an_adapter_that_does_not_say_needs_a_base(store, run, monkeypatch, name):
    as_from_elsewhere(monkeypatch, run, name)
    error = problem(store, str(run.path))
    assert error.code == "adapter-base-unknown"
    assert "--base" in str(error.remedy)
    assert dict(error.facts)["models"] == ["tiny"]
    assert found(store, run, "tiny") == "tiny"


def test_what_else_a_path_may_be(store, run, tmp_path, monkeypatch):
    assert find_named_model(store, "tiny").adapter is None
    assert problem(store, "absent").code == "model-not-found"
    assert problem(store, "./absent").code == "run-not-found"
    assert problem(store, "tiny", base="tiny").code == "usage"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert isinstance(problem(store, str(empty)), ModelError)
    error = problem(store, str(store.models_dir / "tiny"))
    assert isinstance(error, UsageError)
    assert "model import" in str(error.remedy)
    # A folder is found by its bare name too, unless the store has the name.
    monkeypatch.chdir(run.path.parent)
    assert find_named_model(store, "tools").name == "tools"
    run.path.rename("tiny")
    assert find_named_model(store, "tiny").adapter is None
    assert find_named_model(store, "./tiny").name == "tiny"
    assert find_named_model(store, "./tiny").adapter is not None


def test_the_layers_of_the_fixture_are_those_of_its_file(run):
    assert set(open_adapter(run.path).config.targets) == set(LAYERS)
