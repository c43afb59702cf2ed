"""Requests that are begun together, and one side that is recorded for a comparison elsewhere."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from fixtures.installed_lane import install_lane
from fixtures.tiny_home import add_tiny_model
from lanes.every_lane import make_lane
from vox_host.cli.parity import _check_record
from vox_host.errors import UsageError, WorkerFailedError
from vox_host.parity import run
from vox_host.parity.requests import Asked
from vox_host.parity.sides import parse_sides
from vox_plugin_api.messages import SamplingParams


class ToldWorker:
    """Answers when every request of the kind has been begun, and tells the order of what happened."""

    def __init__(self, company: int, fails: int | None = None) -> None:
        self.told: list[str] = []
        self._company = company
        self._fails = fails
        self._begun = {"evaluate": 0, "generate": 0}
        self._all = {kind: asyncio.Event() for kind in self._begun}

    async def call(self, method, params):
        (ids,) = params.sequences
        await self._wait(method, ids[0])
        return SimpleNamespace(result={"index": 0, "tokens": [], "logits_digest": f"{ids[0]:064x}"})

    async def stream(self, method, params):
        number = params.token_ids[0]
        await self._wait(method, number)
        if number == self._fails:
            raise WorkerFailedError("told", f"request {number} fails")
        for token in (number, number + 100):
            yield SimpleNamespace(result={"tokens": [{"token_id": token, "bytes": ""}]}, final=token > 99)
            await asyncio.sleep(0)
            if self._fails is not None:
                await asyncio.sleep(3600)

    async def _wait(self, method, number):
        self.told.append(f"{method} {number} begun")
        self._begun[method] += 1
        if self._begun[method] == self._company:
            self._all[method].set()
            self._begun[method] = 0
        try:
            await asyncio.wait_for(self._all[method].wait(), timeout=5)
        except asyncio.CancelledError:
            self.told.append(f"{method} {number} cancelled")
            raise


def asked(count):
    return [Asked(n, (n,), 2, SamplingParams(), ()) for n in range(1, count + 1)]


def test_a_group_is_scored_and_then_continued_all_of_it_together_and_in_order():
    worker = ToldWorker(company=3)
    answers = asyncio.run(run._ask(worker, asked(3)))
    assert worker.told == [f"{kind} {n} begun" for kind in ("evaluate", "generate") for n in (1, 2, 3)]
    assert [answer.number for answer in answers] == [1, 2, 3]
    assert [answer.token_ids for answer in answers] == [(1, 101), (2, 102), (3, 103)]
    assert [answer.logits_digest for answer in answers] == [f"{n:064x}" for n in (1, 2, 3)]
    assert len({answer.answer_sha256 for answer in answers}) == 3


def test_one_that_fails_ends_the_others_of_its_group_and_is_what_is_told():
    worker = ToldWorker(company=3, fails=2)
    with pytest.raises(WorkerFailedError, match="request 2 fails"):
        asyncio.run(asyncio.wait_for(run._ask(worker, asked(3)), timeout=5))


@pytest.mark.parametrize(("count", "at_once", "expected"), [(5, 2, [2, 2, 1]), (3, 64, [3]), (2, 1, [1, 1])])
def test_groups_hold_every_request_once(count, at_once, expected):
    job = run.Job(settings=None, model=None, asked=asked(count), at_once=at_once)
    groups = list(run._groups(job))
    assert [len(group) for group in groups] == expected
    assert [one.number for group in groups for one in group] == list(range(1, count + 1))


@pytest.fixture(scope="module")
def lane(request, tmp_path_factory):
    make_lane("mens-cpu-ref", request.config)
    home = tmp_path_factory.mktemp("company") / "home"
    add_tiny_model(home)
    return install_lane(
        home,
        "mens-cpu-ref",
        "from mens_cpu_ref.plugin import backend\n",
        capabilities='"generate", "evaluate", "trace", "train", "adapters"',
    )


def test_answers_made_in_company_are_those_of_a_record_made_alone(lane, tmp_path):
    record, both = tmp_path / "record.json", tmp_path / "both.json"
    ask = ["parity", "--model", "gemma3", "--plugin", "mens-cpu-ref", "--max-tokens", "4"]
    ask += ["--temperature", "0.8"]
    done = lane.run(*ask, "--record", "--out", record)
    assert done.returncode == 0, done.stderr
    facts = json.loads(record.read_text())
    assert (facts["verdict"], facts["at_once"], len(facts["sides"])) == ("recorded", 1, 1)
    assert "recorded: 1 side (lane cpu), 3 requests" in done.stdout

    against = ("--against", record, "--at-once", "3", "--kv-cache-mib", "4", "--out", both)
    done = lane.run(*ask, *against)
    assert done.returncode == 0, done.stderr
    facts = json.loads(both.read_text())
    assert (facts["verdict"], facts["at_once"]) == ("bitwise", 3)
    assert [side["label"] for side in facts["sides"]] == ["mens-cpu-ref", "mens-cpu-ref (record.json)"]
    load = facts["observation"]["sides"]["mens-cpu-ref"]["load"]
    assert load["kv_cache"]["budget_bytes"] == 4 << 20


def test_a_record_compares_nothing(lane, tmp_path):
    done = lane.run("parity", "--model", "gemma3", "--plugin", "mens-cpu-ref", "--record")
    assert done.returncode == 2
    assert "--record takes one --plugin and --out, and no --against" in " ".join(done.stderr.split())
    assert "nothing was started" in done.stderr and "Traceback" not in done.stderr
    side, file = parse_sides(["a"]), Path("x.json")
    for sides, against in ((parse_sides(["a", "b"]), None), (side, [file])):
        with pytest.raises(UsageError, match="--record takes one"):
            _check_record(sides, against, file)
    _check_record(side, None, file)
