"""From a home to a service that answers, with a real worker process behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from dataclasses import replace

import pytest

from fixtures.scripted_home import MACHINE, scripted_candidate, scripted_home
from vox_host.app.compose import ModelOptions, open_model
from vox_host.app.service import AnswerPiece
from vox_host.errors import (
    IntegrityError,
    ModelError,
    NoCandidateError,
    UsageError,
    VoxError,
    WorkerFailedError,
)
from vox_host.models.tokenizer import Tokenizer
from vox_host.server.api_error import api_error_of
from vox_host.settings import Settings
from vox_host.workers import Limits
from vox_plugin_api import messages as m

HELLO = list(b"Hello, wonderful world")
LIMITS = Limits(backoff_s=0.05, shutdown_grace_s=2.0)


def options(**changes) -> ModelOptions:
    return ModelOptions(**{"model": "tiny", "limits": LIMITS, **changes})


def params(tokens: int = 22) -> m.GenerateParams:
    return m.GenerateParams(token_ids=[256], max_tokens=tokens, sampling=m.SamplingParams(temperature=0))


async def test_an_open_model_answers_and_says_what_it_is(tmp_path):
    settings = Settings(
        home=scripted_home(tmp_path, {"tokens": HELLO, "warnings": ["a warning of the load"]})
    )
    said, warned = [], []
    async with open_model(
        settings,
        options(),
        MACHINE,
        candidates=[scripted_candidate(tmp_path)],
        progress=said.append,
        warn=warned.append,
    ) as opened:
        answer = await opened.service.collect(params())
        assert answer.text == "Hello, wonderful world"
        info = opened.service.info
        assert (info.name, info.plugin_id, info.lane) == (
            "tiny",
            "vox-scripted",
            opened.resolution.chosen.lane,
        )
        assert (info.context_length, info.vocab_size, info.numerics) == (512, 260, "canonical")
        assert info.created == 1767323045
        assert opened.service.health().is_ready
        stages = {r["stage"]: r["status"] for r in info.backends}
        assert stages["start"] == stages["self-test"] == stages["health"] == "passed"
    assert "a warning of the load" in warned
    assert any("no receipt covers its files" in w for w in warned)
    assert any("vox-scripted" in line for line in said)
    assert opened.supervisor.state.phase == "stopped"


async def test_the_transcripts_of_two_greedy_runs_are_the_same_bytes(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}))
    candidate = scripted_candidate(tmp_path)
    for name in ("one", "two"):
        async with open_model(
            settings, options(record=tmp_path / name), MACHINE, candidates=[candidate]
        ) as opened:
            await opened.service.collect(params())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert b'"generate"' in (tmp_path / "one").read_bytes()


async def test_a_model_that_is_not_there_starts_nothing(tmp_path):
    settings = Settings(home=scripted_home(tmp_path))
    with pytest.raises(UsageError, match="'absent'"):
        async with open_model(settings, options(model="absent"), MACHINE, candidates=[]):
            pass


async def test_weights_that_are_not_those_imported_start_nothing(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}))
    weights = settings.models_dir / "tiny" / "model.safetensors"
    candidate = scripted_candidate(tmp_path)
    said = []
    for _ in range(2):
        async with open_model(settings, options(), MACHINE, candidates=[candidate], progress=said.append):
            pass
    assert said.count("checking the files of tiny") == 1
    weights.write_bytes(weights.read_bytes().replace(b"{}", b"[]"))
    said.clear()
    with pytest.raises(IntegrityError) as caught:
        async with open_model(settings, options(), MACHINE, candidates=[candidate], progress=said.append):
            pass
    assert (caught.value.code, caught.value.exit_code) == ("model-digest", 4)
    facts = dict(caught.value.facts)
    assert facts["file"] == str(weights)
    assert facts["expected"] != facts["found"]
    assert not any("starting" in line for line in said)


async def test_a_broken_tokenizer_ends_the_start_whatever_other_plugin_there_is(tmp_path, monkeypatch):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}))
    one = scripted_candidate(tmp_path)
    assert one.manifest is not None
    section = one.manifest.backend.model_copy(update={"priority": 500})
    other = replace(one, plugin_id="other")
    one = replace(one, manifest=one.manifest.model_copy(update={"backend": section}))
    said = []

    def broken(path, only_text):
        raise ModelError("tokenizer-invalid", f"{path} holds no tokenizer")

    monkeypatch.setattr(Tokenizer, "load", broken)
    with pytest.raises(ModelError) as caught:
        async with open_model(settings, options(), MACHINE, candidates=[one, other], progress=said.append):
            pass
    assert caught.value.code == "tokenizer-invalid"
    assert ["other" in line for line in said if "starting" in line] == [False]


async def test_no_plugin_is_an_error_of_its_own(tmp_path):
    settings = Settings(home=scripted_home(tmp_path))
    with pytest.raises(NoCandidateError) as caught:
        async with open_model(settings, options(), MACHINE, candidates=[]):
            pass
    assert caught.value.exit_code == 3


async def test_what_costs_least_is_refused_first_the_model_s_name_then_the_plugin_then_its_bytes(
    tmp_path, monkeypatch
):
    """As in training and in parity: a model of many gigabytes is not read for a plugin that isn't there."""
    home, candidates = scripted_home(tmp_path, {"tokens": HELLO}), [scripted_candidate(tmp_path)]
    read = []
    monkeypatch.setattr(
        "vox_host.app.compose.verify_files", lambda model, *rest, **named: read.append(model.name)
    )
    wrong = options(model="nobody", plugin="vox-nope")
    for asked, code in ((wrong, "model-not-found"), (replace(wrong, model="tiny"), "plugin-not-found")):
        with pytest.raises(VoxError) as caught:
            async with open_model(Settings(home=home), asked, MACHINE, candidates=candidates):
                pass
        assert (caught.value.code, read) == (code, [])


async def test_require_verified_refuses_a_plugin_without_receipt(tmp_path):
    settings = Settings(home=scripted_home(tmp_path))
    with pytest.raises(VoxError) as caught:
        async with open_model(
            settings, options(require_verified=True), MACHINE, candidates=[scripted_candidate(tmp_path)]
        ):
            pass
    facts = " ".join(str(value) for _, value in caught.value.facts)
    assert "verified plugins are required" in facts


async def test_auto_goes_on_to_the_next_plugin_and_says_so_but_a_named_one_is_not_replaced(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}))
    good = scripted_candidate(tmp_path)
    assert good.manifest is not None
    section = good.manifest.backend.model_copy(update={"priority": 500, "lane": "cuda"})
    broken = replace(
        good,
        plugin_id="broken",
        python=tmp_path / "no-such-python",
        manifest=good.manifest.model_copy(update={"backend": section}),
    )
    said, warned = [], []
    async with open_model(
        settings,
        options(),
        MACHINE,
        candidates=[good, broken],
        progress=said.append,
        warn=warned.append,
    ) as opened:
        assert opened.service.info.plugin_id == "vox-scripted"
        degraded = opened.service.info.degraded
        assert degraded is not None and 'plugin "broken" was not used: ' in degraded
        # Also where progress is not shown, as with --json.
        assert degraded in warned
        failed = [r for r in opened.service.info.backends if r["status"] == "failed"]
        assert [(r["plugin_id"], r["stage"]) for r in failed] == [("broken", "start")]
    assert any("broken could not be used" in line for line in said)
    with pytest.raises(VoxError):
        async with open_model(settings, options(plugin="broken"), MACHINE, candidates=[good, broken]):
            pass


def with_another(candidate, **backend):
    """Return the candidate to be preferred, and another one after it whose start would be told."""
    first = candidate.manifest.backend.model_copy(update={"priority": 500})
    second = candidate.manifest.backend.model_copy(update=backend)
    return [
        replace(candidate, manifest=candidate.manifest.model_copy(update={"backend": first})),
        replace(
            candidate, plugin_id="other", manifest=candidate.manifest.model_copy(update={"backend": second})
        ),
    ]


@pytest.mark.parametrize(
    ("at_load", "backend", "code"),
    [
        # A model that one plugin refuses is not given to another one, which may not look.
        ("bad-weights", {}, "weights-not-finite"),
        # Canonical bits were meant: fast ones are not given in their place, whatever went wrong.
        ("error", {"numerics": ["fast"]}, "scripted-error"),
    ],
)
async def test_auto_does_not_go_on_after_the_model_s_fault_nor_from_canonical_to_fast(
    tmp_path, at_load, backend, code
):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO, "at_load": at_load}))
    candidates = with_another(scripted_candidate(tmp_path), **backend)
    said = []
    with pytest.raises(VoxError) as caught:
        async with open_model(settings, options(), MACHINE, candidates=candidates, progress=said.append):
            pass
    assert caught.value.code == code
    assert [line for line in said if "starting" in line] == ["starting vox-scripted 1.0.0"]


async def test_the_real_reason_is_shown_when_nothing_is_left_to_try(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"at_load": "error"}))
    with pytest.raises(WorkerFailedError) as caught:
        async with open_model(settings, options(), MACHINE, candidates=[scripted_candidate(tmp_path)]):
            pass
    assert caught.value.code != "no-candidate"


async def test_a_worker_killed_in_mid_stream_is_a_typed_error_at_once_and_the_next_request_works(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO, "token_s": 0.02}))
    async with open_model(settings, options(), MACHINE, candidates=[scripted_candidate(tmp_path)]) as opened:
        service = opened.service
        with pytest.raises(WorkerFailedError) as caught:
            async with contextlib.aclosing(service.answer(params(400))) as items, asyncio.timeout(5):
                async for item in items:
                    assert isinstance(item, AnswerPiece)
                    pid = opened.supervisor.state.pid
                    if pid is not None:
                        os.kill(pid, signal.SIGKILL)
        assert "SIGKILL" in caught.value.message + str(caught.value.facts)
        async with asyncio.timeout(2):
            while service.health().is_ready:
                await asyncio.sleep(0.001)
        assert service.health().state == "restarting"
        assert (await service.collect(params())).text == "Hello, wonderful world"
        assert service.health().is_ready


async def test_closing_an_answer_cancels_it_in_the_worker(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO, "token_s": 0.01}))
    async with open_model(settings, options(), MACHINE, candidates=[scripted_candidate(tmp_path)]) as opened:
        async with contextlib.aclosing(opened.service.answer(params(400))) as items:
            async for _ in items:
                break
        async with asyncio.timeout(2):
            assert (await opened.service.collect(params(5))).text == "Hello"
        logs = "".join(path.read_text() for path in (tmp_path / "home/log").rglob("*") if path.is_file())
        ended = [int(line.split()[-2]) for line in logs.splitlines() if "generation ended after" in line]
        assert ended[0] < 10


async def test_a_template_that_does_not_compile_is_reported_at_load_with_its_line_and_completions_work(
    tmp_path,
):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}, template="\n{% for m in messages %}"))
    warned: list[str] = []
    async with open_model(
        settings, options(), MACHINE, candidates=[scripted_candidate(tmp_path)], warn=warned.append
    ) as opened:
        [warning] = [w for w in warned if "chat template" in w]
        assert "(line 2)" in warning
        assert (await opened.service.collect(params(5))).text == "Hello"
        with pytest.raises(UsageError, match="template"):
            await opened.service.encode_chat([{"role": "user", "content": "x"}])


async def test_a_log_that_cannot_be_written_is_warned_of_once_and_the_model_answers(tmp_path):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO, "at_token": {"2": "crash"}}))
    settings.log_dir.write_text("not a folder")
    warned: list[str] = []
    async with open_model(
        settings, options(), MACHINE, candidates=[scripted_candidate(tmp_path)], warn=warned.append
    ) as opened:
        assert (await opened.service.collect(params(2))).text == "He"
        with pytest.raises(WorkerFailedError) as caught:
            await opened.service.collect(params(5))
        assert dict(caught.value.facts)["log"] == "the stderr of vox-host"
        # The worker that takes its place says nothing new.
        assert (await opened.service.collect(params(2))).text == "He"
    assert [str(settings.log_dir) in text for text in warned if "worker's log" in text] == [True]


async def test_a_changed_tokenizer_is_a_digest_that_differs_and_is_never_parsed(tmp_path):
    home = scripted_home(tmp_path, {"tokens": HELLO})
    file = next(home.glob("models/tiny/tokenizer.json"))
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(IntegrityError) as caught:
        async with open_model(
            Settings(home=home), options(), MACHINE, candidates=[scripted_candidate(tmp_path)]
        ):
            pass
    assert caught.value.code == "model-digest"
    assert "tokenizer.json" in str(caught.value.facts) + caught.value.message


@pytest.mark.parametrize("removed", ["model", "plugin"])
async def test_a_worker_whose_model_or_plugin_was_removed_is_not_restarted_and_says_so(
    tmp_path, caplog, removed
):
    settings = Settings(home=scripted_home(tmp_path, {"tokens": HELLO}))
    candidate = scripted_candidate(tmp_path)
    assert candidate.python is not None
    python = tmp_path / "python-of-the-plugin"
    python.write_text(f'#!/bin/sh\nexec "{candidate.python}" "$@"\n')
    python.chmod(0o755)
    candidate = replace(candidate, python=python)
    async with open_model(settings, options(), MACHINE, candidates=[candidate]) as opened:
        gone = settings.models_dir / "tiny" if removed == "model" else python
        if removed == "model":
            shutil.rmtree(gone)
        else:
            gone.unlink()
        os.kill(opened.supervisor.state.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while opened.service.health().state != "failed":
                await asyncio.sleep(0.005)
        detail = opened.service.health().detail
        with pytest.raises(WorkerFailedError) as caught:
            await opened.service.collect(params())
        shown = api_error_of(caught.value).message
        for text in (detail, shown):
            assert ("no longer in the store" if removed == "model" else "no longer installed") in text
            assert "restart `vox-host serve`" in text
            assert str(tmp_path) not in text
        assert opened.supervisor.state.restarts == 1
    [logged] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert str(gone) in logged
    assert "no longer" in logged
