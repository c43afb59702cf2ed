"""One training on several processes: the bytes of one, and what is said when a process is lost or differs."""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.local_ranks import a_backend
from fixtures.processes import still_alive
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import a_config, some_examples
from mens_core.example_tree import ExampleTree
from mens_core.ops import Fault
from mens_core.peers import meeting, team
from mens_core.peers.member import Member
from mens_core.peers.messages import Alive, Broke, Done, End, Joined, Load, Work
from mens_core.peers.ranks import facts_of_rank
from mens_core.peers.sharing import shares
from mens_core.peers.wire import PeerSetup, Place
from mens_core.step_gradients import Gradients
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.backend import BackendError, Reply
from vox_plugin_api.framing import encode_message

pytest.importorskip("torch.distributed")
CONFIG = a_config(("embed_tokens", "q_proj", "down_proj", "lm_head"), dropout=0.25)
NEW = t.TrainBeginParams(
    adapter=CONFIG.adapter,
    optimizer=t.OptimizerConfig(learning_rate=1e-2, max_gradient_norm=0.5),
    seed=7,
)
LENGTHS = (5, 12, 3, 140, 2, 9, 4)
SIZES = (LENGTHS, (4,), (3, 5), (9,) * 7, (30, 4, 4, 4, 4))
"""Of each step's examples: one long, fewer than ranks, shares that begin no large node."""
STEP = t.TrainStepParams(examples=some_examples(LENGTHS))
SMALL = BY_FAMILY["qwen3"] | {"num_hidden_layers": 1}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "other", SMALL, seed=4)
    return write_model(folder / "model", SMALL, seed=3)


def loaded(model_dir, *args, memory_bytes=None, **named):
    backend = a_backend(*args, **named)
    params = m.LoadModelParams(model_dir=str(model_dir), model_digest="cd" * 32, memory_bytes=memory_bytes)
    for _ in backend.load_model(params):
        pass
    return backend


def answers(stream):
    return [reply.result for reply in stream if reply is not None]


def begun(model_dir, devices, params=NEW, **named):
    backend = loaded(model_dir, **named)
    list(backend.train_begin(params.model_copy(update={"devices": devices})))
    return backend


def failure(stream) -> m.WorkerError:
    with pytest.raises(BackendError) as caught:
        list(stream)
    return caught.value.error


def ranks() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def run(backend, folder):
    """Take steps of different sizes, an evaluation among them, and save; return all that is compared."""
    told = []
    for at, lengths in enumerate(SIZES):
        told += answers(backend.train_step(t.TrainStepParams(examples=some_examples(lengths, seed=at))))
    told += answers(backend.train_evaluate(t.TrainEvaluateParams(examples=STEP.examples, logits_digest=True)))
    told += answers(backend.train_save(t.TrainSaveParams(folder=str(folder))))
    backend.unload(m.UnloadParams())
    return told, {path.name: path.read_bytes() for path in folder.iterdir()}


# --- what changes no bit ---------------------------------------------------------------------


def spelled(a: str, b: str) -> str:
    return f"({a}+{b})"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=70), st.integers(1, 9))
def test_the_nodes_of_any_shares_make_the_tree_of_one(rows, count):
    alone, together = ExampleTree(spelled), ExampleTree(spelled)
    for i in range(len(rows)):
        alone.push(str(i))
    parts = shares(rows, count)
    assert [i for part in parts for i in part] == list(range(len(rows)))
    assert len(parts) == count and parts[0]
    for part in parts:
        tree = ExampleTree(spelled, first=part.start)
        for i in part:
            tree.push(str(i))
        for level, node in tree.nodes():
            together.push(node, level)
    assert together.total() == alone.total()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=70), st.integers(1, 9))
def test_no_share_is_longer_than_its_part_by_more_than_an_example(rows, count):
    for part in shares(rows, count):
        assert sum(rows[i] for i in part) * count < sum(rows) + count * max(rows)


def test_a_node_is_pushed_only_where_one_begins():
    tree = ExampleTree(spelled)
    tree.push("0")
    with pytest.raises(ValueError, match="begins no node of level 1"):
        tree.push("12", 1)


def test_part_of_a_step_has_no_total():
    tree = ExampleTree(spelled, first=2)
    tree.push("2")
    with pytest.raises(ValueError, match="begins with its first example"):
        tree.total()


@pytest.mark.parametrize(
    ("lane", "wire", "counts"), [("rows", "socket", (2,)), ("mens-cpu-ref", "gloo", (3,))]
)
def test_the_bytes_are_those_of_one_process(model_dir, tmp_path, lane, wire, counts):
    if lane == "mens-cpu-ref":
        pytest.importorskip("mens_cpu_ref.library").load_library()
    alone = run(begun(model_dir, 1, lane=lane), tmp_path / "1")
    for count in counts:
        # Each rank remembers what it likes, too.
        size = NEW.model_copy(update={"micro_batch_size": count, "remember_bytes": 1 << 30})
        backend = begun(model_dir, count, size, lane=lane, wire=wire)
        assert len(ranks()) == count - 1
        assert run(backend, tmp_path / str(count)) == alone
        assert still_alive(ranks(), 5) == []


def test_a_run_goes_on_on_another_number_of_devices(model_dir, tmp_path):
    def steps(backend, seeds):
        for seed in seeds:
            (found,) = answers(
                backend.train_step(t.TrainStepParams(examples=some_examples(LENGTHS, seed=seed)))
            )
        return found

    expected = steps(begun(model_dir, 1), range(3))
    first = begun(model_dir, 2)
    steps(first, range(1))
    list(first.train_save(t.TrainSaveParams(folder=str(tmp_path / "run"))))
    first.unload(m.UnloadParams())
    resumed = t.TrainBeginParams(resume_dir=str(tmp_path / "run"))
    assert steps(begun(model_dir, 1, resumed), range(1, 3)) == expected


class Line:
    """Stands in for the line to a rank that says these things, one at a look."""

    rank, pid, heard_s = 1, 1, 0.0

    def __init__(self, *said):
        self._said, self._heard = list(said), []
        self._ends = socket.socketpair()
        self._ends[1].send(b"something to read")

    def look(self):
        self._heard += self._said[:1]
        del self._said[:1]

    def take(self):
        return self._heard.pop() if self._heard else None

    def fileno(self):
        return self._ends[0].fileno()

    def end(self, within_s):
        for end in self._ends:
            end.close()


def test_an_answer_to_what_was_dropped_is_not_one(tmp_path):
    late, own = Done(number=1, losses=[1.0], levels=[0]), Done(number=2, losses=[2.0], levels=[0])
    ours = team.Team(Place(tmp_path / "place", 0, 2), [Line(late, Alive(), own)])
    asked = ours._answers(Done, 2)
    assert [next(asked) for _ in range(3)] == [None] * 3, "a sign of life for each thing that the rank said"
    with pytest.raises(StopIteration) as ended:
        next(asked)
    assert ended.value.value == {1: own}
    ours.end(is_whole=False)


def test_a_rank_s_last_words_are_its_own_and_it_takes_no_further_part(tmp_path, monkeypatch):
    """In the midst of a step too: what it ended with says more than that it is gone."""
    monkeypatch.setattr(team, "SILENCE_S", 1.0)
    words = m.WorkerError(code="out-of-device-memory", message="there is no room", facts={"bytes": 5})
    ours = team.Team(Place(tmp_path / "place", 0, 2), [Line(Alive(), Broke(number=None, error=words))])
    with pytest.raises(BackendError) as caught:
        list(ours._answers(Done, 2))
    found = caught.value.error
    assert (found.code, found.message) == ("out-of-device-memory", "rank 1: there is no room")
    assert found.facts == {"bytes": 5, "rank": 1}
    with pytest.raises(BackendError) as again:
        ours.look()
    assert again.value.error == found


def test_strangers_and_second_ones_of_a_rank_are_not_counted_in(tmp_path):
    place = Place(tmp_path, 0, 3)
    setup = PeerSetup(entry="", devices=lambda: 3, environment=dict, open_wire=dict, launched=lambda _: True)
    coming, lines = meeting.gather(place, setup, {}), []
    with pytest.raises(StopIteration) as ended:
        next(coming)
        for number, rank in enumerate((7, 0, 1, 1, 2)):
            lines.append(socket.socket(socket.AF_UNIX))
            lines[-1].settimeout(5)
            lines[-1].connect(str(tmp_path / meeting.CONTROL))
            lines[-1].sendall(encode_message(Joined(rank=rank, pid=100 + number)))
            next(coming)
    links = ended.value.value
    assert [(link.rank, link.pid) for link in links] == [(1, 102), (2, 104)]
    for link in links:
        link.end(0)
    for line in lines:
        line.close()


@pytest.mark.parametrize("is_whole", [False, True])
def test_where_ranks_met_goes_with_the_training(tmp_path, is_whole):
    (tmp_path / "place").mkdir()
    line = Line()
    line.send = lambda message: None
    team.Team(Place(tmp_path / "place", 0, 2), [line]).end(is_whole=is_whole)
    assert list(tmp_path.iterdir()) == []


def test_a_sum_of_gradients_that_is_not_finite_is_the_rank_s_error(model_dir, tmp_path, monkeypatch):
    """Behind the last example nothing else looks at it."""
    backend = a_backend()
    load = Load(
        model=m.LoadModelParams(model_dir=str(model_dir), model_digest="cd" * 32),
        adapter=CONFIG.adapter, seed=7, micro_batch_size=None,
    )  # fmt: skip
    work = Work(number=3, kind="step", step=0, first=0, examples=STEP.examples, adapter_digest="ab" * 32)

    def summed(model, ops, keys, examples, **options):
        yield from ()
        ops.take_faults = lambda: [Fault("embed_tokens.lora_A.sum", (0,))]
        return Gradients([np.float32(1)], {key: ExampleTree(np.add) for key in keys})

    monkeypatch.setattr("mens_core.peers.member.sum_gradients", summed)
    said = said_by_a_rank(tmp_path, backend, load, work, holds="ab" * 32)
    (broke,) = (message for message in said if isinstance(message, Broke))
    assert (broke.number, broke.error.code) == (3, "non-finite")


def test_a_step_that_was_cancelled_leaves_no_trace(model_dir):
    backend, alone = begun(model_dir, 2), begun(model_dir, 1)
    (link,) = backend._training._team._links
    for has_answered in (False, True):
        running = backend.train_step(t.TrainStepParams(examples=some_examples(LENGTHS, seed=9)))
        next(running)
        while has_answered and not any(isinstance(said, Done) for said in link._inbox):
            link.look()
        running.close()
    assert answers(backend.train_step(STEP)) == answers(alone.train_step(STEP))
    backend.unload(m.UnloadParams())


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plant", "code", "says"),
    [
        ("digest", "peer-differs", "another model_digest"),
        ("weights", "peer-differs", "another logits_digest"),
        ("bits", "peer-differs", "another adapter_digest"),
        ("self-test", "self-test-failed", "rank 1: the device of rank 1 failed 1 cases"),
        ("refuses", "device-too-old", "rank 1: the GPU is too old"),
        ("ends", "peer-lost", "rank 1 of the training"),
    ],
)
def test_a_rank_that_is_not_right_is_refused_at_the_start(model_dir, plant, code, says):
    backend = loaded(model_dir, plant=f"{plant}:1")
    # One of two, or of three: the other is ended too.
    devices = 3 if plant == "weights" else 2
    error = failure(backend.train_begin(NEW.model_copy(update={"devices": devices})))
    assert error.code == code
    assert says in error.message
    assert error.facts["rank"] == 1
    assert still_alive(ranks(), 5) == []
    # Nothing was begun: one device does.
    list(backend.train_begin(NEW))
    assert answers(backend.train_step(STEP))[0].step == 1


def said_by_a_rank(tmp_path, backend, *asked, holds="") -> list:
    """What a rank other than 0 answers, without a process."""
    said, questions = [], queue.SimpleQueue()
    for ask in (*asked, End()):
        questions.put(ask)
    member = Member(backend, Place(tmp_path, 1, 2), questions, said.append)
    member._digest = holds
    member.run()
    return said


def test_a_rank_computes_nothing_with_values_that_rank_0_does_not_hold(tmp_path):
    work = Work(number=3, kind="step", step=0, first=0, examples=STEP.examples, adapter_digest="ab" * 32)
    (broke,) = said_by_a_rank(tmp_path, None, work)
    assert (broke.number, broke.error.code) == (3, "peer-differs")
    assert broke.error.facts == {"expected": "ab" * 32, "found": ""}


def test_what_must_be_the_same_on_every_rank_is_named(model_dir):
    backend = loaded(model_dir)
    model = backend._served.loaded.model
    facts = facts_of_rank(backend.info, model, model.ops, "cd" * 32)
    assert list(facts) == ["plugin", "lane", "numerics", "model_digest", "logits_digest"]
    assert facts["plugin"] == "mens-test 1.0.0" and facts["model_digest"] == "cd" * 32
    other = facts_of_rank(replace(backend.info, plugin_version="1.0.1"), model, model.ops, "cd" * 32)
    assert {name for name in facts if facts[name] != other[name]} == {"plugin"}


def test_the_ranks_load_the_base_alone_whatever_adapter_is_served(model_dir, monkeypatch):
    backend, asked = loaded(model_dir), []

    def start(peers, devices, load, *_):
        asked.append(load)
        raise BackendError("peer-lost", "stopped here")
        yield

    monkeypatch.setattr(team.Team, "start", start)
    backend._loaded_with = backend._loaded_with.model_copy(update={"adapter": "in service"})
    assert failure(backend.train_begin(NEW.model_copy(update={"devices": 2}))).code == "peer-lost"
    assert asked[0].model.model_digest == "cd" * 32 and asked[0].model.adapter is None


def test_a_rank_that_ends_before_it_joins_is_lost_and_one_that_joined_speaks_for_itself():
    ended = SimpleNamespace(poll=lambda: -9)
    with pytest.raises(BackendError, match="rank 2 of the training ended with signal 9 before it had joined"):
        meeting._refuse_the_dead({2: ended}, {}, time.monotonic() + 60, 3)
    meeting._refuse_the_dead({2: ended}, {2: None}, time.monotonic() + 60, 3)
    with pytest.raises(BackendError, match=r"of 3 ranks of the training, 1 did not join"):
        meeting._refuse_the_dead({}, {2: None}, time.monotonic() - 1, 3)


def test_a_self_test_without_a_case_is_no_self_test(model_dir, tmp_path, monkeypatch):
    backend = a_backend()
    none = m.SelfTestResult(numerics_version=1, cases=0, failed=[], vectors_digest="ab" * 32)
    monkeypatch.setattr(backend, "self_test", lambda params: Reply(none))
    model = m.LoadModelParams(model_dir=str(model_dir), model_digest="cd" * 32)
    load = Load(model=model, adapter=CONFIG.adapter, seed=7, micro_batch_size=None)
    (broke,) = said_by_a_rank(tmp_path, backend, load)
    assert (broke.number, broke.error.code) == (None, "self-test-failed")


def test_a_rank_that_is_killed_ends_the_step_and_nothing_hangs(model_dir, tmp_path):
    backend = begun(model_dir, 3, plant="killed:2")
    before = answers(backend.train_save(t.TrainSaveParams(folder=str(tmp_path / "before"))))
    error = failure(backend.train_step(STEP))
    assert (error.code, error.facts["rank"], error.facts["signal"]) == ("peer-lost", 2, signal.SIGKILL)
    assert error.message.startswith("step 1 was not taken and the adapter is unchanged: rank 2 ")
    assert still_alive(ranks(), 5) == []
    assert failure(backend.train_step(STEP)).code == "peer-lost"
    after = answers(backend.train_save(t.TrainSaveParams(folder=str(tmp_path / "after"))))
    assert after == before
    backend.unload(m.UnloadParams())
    list(backend.load_model(m.LoadModelParams(model_dir=str(model_dir), model_digest="cd" * 32)))
    list(backend.train_begin(t.TrainBeginParams(resume_dir=str(tmp_path / "after"))))
    assert answers(backend.train_step(STEP)) == answers(begun(model_dir, 1).train_step(STEP))


@pytest.mark.parametrize("when", ["between steps", "in the midst of one"])
def test_a_rank_may_be_killed_at_any_time(model_dir, when):
    backend = begun(model_dir, 2)
    running = backend.train_step(STEP)
    if when != "between steps":
        next(running)
    (rank,) = ranks()
    rank.kill()
    assert still_alive([rank], 5) == []
    # Told at once, whatever rank 0 has left to do itself.
    with pytest.raises(BackendError) as caught:
        next(running)
    assert caught.value.error.code == "peer-lost"
    assert still_alive(ranks(), 5) == []


@pytest.mark.parametrize("way", ["receive", "send"])
def test_a_rank_may_be_killed_while_tensors_cross(model_dir, way):
    """Its sums never come, or the new values reach nobody: the wire breaks before the line is looked at."""
    backend = begun(model_dir, 2, wire="gloo" if way == "receive" else "socket")
    wire = backend._training._team._wire
    plain = getattr(wire, way)

    def kill_first(*arguments):
        for rank in ranks():
            rank.kill()
        return plain(*arguments)

    setattr(wire, way, kill_first)
    error = failure(backend.train_step(STEP))
    assert (error.code, error.facts["rank"], error.facts["signal"]) == ("peer-lost", 1, signal.SIGKILL)
    assert error.facts["step"] == 1
    assert still_alive(ranks(), 5) == []


def test_a_rank_that_says_nothing_is_given_up(model_dir, monkeypatch):
    monkeypatch.setattr(team, "SILENCE_S", 1.5)
    backend = begun(model_dir, 2, plant="stopped:1")
    error = failure(backend.train_step(STEP))
    assert error.code == "peer-lost"
    assert "has said nothing for" in error.message
    assert still_alive(ranks(), 5) == []


def test_an_error_of_a_rank_s_own_is_told_as_its_and_the_training_goes_on(model_dir):
    backend = begun(model_dir, 2, plant="wrong:1")
    error = failure(backend.train_step(STEP))
    assert (error.code, error.facts["rank"], error.facts["step"]) == ("non-finite", 1, 1)
    assert answers(backend.train_step(STEP)) == answers(begun(model_dir, 1).train_step(STEP))
    backend.unload(m.UnloadParams())


def test_a_rank_takes_what_rank_0_takes_whatever_its_kv_cache_has_room_for(model_dir):
    """A rank measures memory of its own, so its cache may be the smaller one: here it is one block."""
    alone, together = (loaded(model_dir, memory_bytes=40_000) for _ in range(2))
    assert alone._served.result.context_length == 128
    step = t.TrainStepParams(examples=some_examples([150, 140], seed=2))
    list(alone.train_begin(NEW))
    list(together.train_begin(NEW.model_copy(update={"devices": 2})))
    assert answers(together.train_step(step)) == answers(alone.train_step(step))
    together.unload(m.UnloadParams())


def test_ranks_end_with_the_process_that_started_them(model_dir, tmp_path):
    """SIGKILL: no handler of rank 0 runs."""
    parent = os.fork()
    if parent == 0:
        begun(model_dir, 2)
        (tmp_path / "pid").write_text(str(ranks()[0].pid))
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    number = int(Path(tmp_path / "pid").read_text())
    found = [psutil.Process(number)] if psutil.pid_exists(number) else []
    assert still_alive(found, 5) == []


def test_more_devices_than_there_are_is_refused(model_dir):
    backend = loaded(model_dir, devices=2)
    for stream in (
        backend.train_begin(NEW.model_copy(update={"devices": 3})),
        backend.train_plan(
            t.TrainPlanParams(adapter=CONFIG.adapter, longest_example=9, examples=4, devices=3)
        ),
    ):
        error = failure(stream)
        assert (error.code, error.facts) == ("devices-missing", {"requested": 3, "found": 2})
    assert ranks() == []


def test_a_lane_of_one_device_says_so(model_dir):
    backend = loaded(model_dir)
    backend.peers = None
    assert failure(backend.train_begin(NEW.model_copy(update={"devices": 2}))).code == "not-supported"
