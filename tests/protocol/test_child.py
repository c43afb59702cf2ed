"""The worker process, spoken to in frames; nothing of the host takes part."""

import hashlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fixtures.raw_worker import RawWorker
from fixtures.scripted_plugin import PLUGIN_DIR, worker_python
from vox_plugin_api import messages as m
from vox_plugin_api.framing import encode_frame

CASES = Path(__file__).parent.parent / "cases"
PLUGIN_CASES = {
    (case["id"], case["file"]): case
    for case in json.loads((CASES / "INDEX.json").read_text())
    if case["id"] in ("P1", "P2")
}
DIGEST = hashlib.sha256((PLUGIN_DIR / "src/vox_scripted/Plugin.toml").read_bytes()).hexdigest()
MODEL = m.LoadModelParams(model_dir="/nowhere", model_digest="cd" * 32)
Start = Callable[..., RawWorker]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return worker_python(tmp_path_factory.mktemp("scripted"), sources=(PLUGIN_DIR / "src",))[0]


@pytest.fixture
def start(python: Path) -> Iterator[Start]:
    """Start workers with a script; all are gone afterwards."""
    with ExitStack() as stack:

        def start_one(**script: Any) -> RawWorker:
            environment = {"VOX_SCRIPTED": json.dumps(script)}
            return stack.enter_context(RawWorker(python, "vox-scripted", environment=environment))

        yield start_one


def ready(worker: RawWorker) -> RawWorker:
    """Greet the worker and load its model, as request 1."""
    assert isinstance(worker.greet("vox-scripted", DIGEST), m.WorkerHello)
    worker.send(m.Request(id=1, method="load_model", params=MODEL.model_dump(mode="json")))
    while not worker.receive().final:
        pass
    return worker


def generate(request_id: int, first: int, max_tokens: int, **more: Any) -> m.Request:
    params = m.GenerateParams(
        token_ids=[first], max_tokens=max_tokens, sampling=m.SamplingParams(temperature=0.0), **more
    )
    return m.Request(id=request_id, method="generate", params=params.model_dump(mode="json"))


def collect(worker: RawWorker, count: int) -> dict[int, list[int]]:
    """Receive until `count` requests have ended; return their token ids."""
    answers: dict[int, list[int]] = {}
    while count:
        message = worker.receive()
        assert isinstance(message, m.Event), message
        result = m.GenerateResult.model_validate(message.result)
        answers.setdefault(message.id, []).extend(token.token_id for token in result.tokens)
        count -= message.final
    return answers


def test_the_handshake_says_who_the_worker_is(start: Start) -> None:
    worker = start()
    assert worker.greet("vox-scripted", DIGEST) == m.WorkerHello(
        protocol=m.ProtocolRange(min=1, max=1),
        plugin_id="vox-scripted",
        plugin_version="1.0.0",
        manifest_digest=DIGEST,
        lane="scripted",
        numerics=["canonical"],
        capabilities=["generate", "evaluate", "trace", "adapters"],
        pid=worker.process.pid,
        nonce="a-nonce",
    )


@pytest.mark.parametrize(
    ("hello", "code", "mentions"),
    [
        ({"protocol": (2, 4)}, "protocol-mismatch", ["2 to 4", "protocol 1 ", "vox-scripted", "Plugin.toml"]),
        ({"digest": "00" * 32}, "manifest-mismatch", ["Plugin.toml", "vox-scripted"]),
        ({"plugin_id": "vox-other"}, "wrong-plugin", ["vox-other", "vox-scripted"]),
    ],
)
def test_a_host_it_does_not_fit_is_refused_before_any_plugin_code_runs(
    start: Start, hello: dict[str, Any], code: str, mentions: list[str]
) -> None:
    worker = start(at_start="crash")
    refused = worker.greet(**{"plugin_id": "vox-scripted", "digest": DIGEST, **hello})
    assert isinstance(refused, m.Refused)
    assert refused.error.code == code
    for mention in mentions:
        assert mention in refused.error.message
    assert worker.finish()[0] == 3


def test_a_changed_manifest_is_refused_with_both_digests(start: Start) -> None:
    refused = start().greet("vox-scripted", "00" * 32)
    assert refused.error.facts["expected"] == "sha256:" + "00" * 32
    assert refused.error.facts["found"] == f"sha256:{DIGEST}"


@pytest.mark.parametrize("key", list(PLUGIN_CASES), ids=[f"{i}-{Path(f).name}" for i, f in PLUGIN_CASES])
def test_a_plugin_that_cannot_serve_here_is_refused_as_the_cases_say(
    tmp_path: Path, key: tuple[str, str]
) -> None:
    case, mark = PLUGIN_CASES[key], tmp_path / "mark"
    source = CASES / case["file"]
    python, site_packages = worker_python(tmp_path / "env", sources=(source,))
    digest = hashlib.sha256((site_packages / "vox_toy_data" / "Plugin.toml").read_bytes()).hexdigest()
    with RawWorker(python, "vox-toy", environment={"VOX_MARK": str(mark)}) as worker:
        refused = worker.greet("vox-toy", digest)
    assert isinstance(refused, m.Refused)
    for mention in case["expect"]["must_mention"]:
        assert mention in refused.error.message, refused.error.message
    assert "vox-toy" in refused.error.message
    assert not mark.exists()


def test_a_skewed_protocol_names_both_ranges(tmp_path: Path) -> None:
    source = CASES / "hand/plugin/P2_protocol_99"
    python, site_packages = worker_python(tmp_path / "env", sources=(source,))
    with RawWorker(python, "vox-toy") as worker:
        error = worker.greet("vox-toy", "00" * 32).error
    assert error.code == "protocol-mismatch"
    assert error.facts["manifest_protocol"] == "99"
    assert error.facts["host_protocol"] == "1"
    assert error.facts["manifest"] == str(site_packages / "vox_toy_data" / "Plugin.toml")


@pytest.mark.parametrize(
    ("script", "code", "mentions"),
    [
        ({"at_start": "import-error"}, "plugin-load-failed", "No module named 'vox_scripted_native'"),
        ({"at_start": "error"}, "scripted-error", "the script asked for an error"),
        ({"plugin_version": "9.9"}, "manifest-disagrees", "'9.9'"),
        ({"self_test_failed": ["linear"]}, "self-test-failed", "failed 1 of the 3"),
        ({"self_test_cases": 0}, "self-test-failed", "0 cases"),
    ],
)
def test_a_plugin_that_does_not_start_right_is_refused_with_the_reason(
    start: Start, script: dict[str, Any], code: str, mentions: str
) -> None:
    refused = start(**script).greet("vox-scripted", DIGEST)
    assert isinstance(refused, m.Refused)
    assert refused.error.code == code
    assert mentions in refused.error.message


def test_a_hello_that_is_none_is_refused_and_shown(start: Start) -> None:
    worker = start()
    worker.socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
    refused = worker.receive()
    assert refused.error.code == "protocol-error"
    assert refused.error.facts["as_text"].startswith("GET / HTTP")
    assert worker.finish()[0] == 3


def test_all_that_is_printed_lands_on_stderr_and_harms_nothing(start: Start) -> None:
    worker = ready(start(at_start="print", at_load="print", at_token={"1": "print"}))
    worker.send(generate(2, 10, 3))
    assert collect(worker, 1) == {2: [11, 12, 13]}
    worker.send(m.Shutdown())
    status, out, err = worker.finish()
    assert (status, out) == (0, "")
    for noise in ("from Python", "from C on stdout", "on descriptor 1", "from a child process"):
        assert err.count(f"noise {noise}") == 3


def test_what_the_plugin_starts_does_not_get_the_private_descriptor(start: Start) -> None:
    worker = start(at_start="list-inherited")
    assert isinstance(worker.greet("vox-scripted", DIGEST), m.WorkerHello)
    worker.send(m.Shutdown())
    said = [line for line in worker.finish()[2].splitlines() if not line.startswith("vox-plugin-api: ")]
    assert said == ["not inherited"]


def test_requests_in_flight_take_turns_and_each_gets_its_own_answer(start: Start) -> None:
    worker = ready(start(token_s=0.01))
    for number in range(4):
        worker.send(generate(number + 2, 100 * number, 10))
    order, answers, ended = [], {}, 0
    while ended < 4:
        event = worker.receive()
        order.append(event.id)
        answers.setdefault(event.id, []).extend(token["token_id"] for token in event.result["tokens"])
        ended += event.final
    assert answers == {n + 2: list(range(100 * n + 1, 100 * n + 11)) for n in range(4)}
    assert set(order[-8:]) == {2, 3, 4, 5}, f"they did not end together: {order}"


def test_a_cancelled_request_stops_within_a_token_and_the_next_is_served(start: Start) -> None:
    worker = ready(start(token_s=0.05))
    worker.send(generate(2, 0, 400))
    assert worker.receive().id == 2
    worker.send(m.Cancel(id=2))
    after = 0
    while isinstance(message := worker.receive(), m.Event):
        after += 1
    assert message == m.Failed(
        id=2, error=m.WorkerError(code="cancelled", message="the request was cancelled")
    )
    assert after <= 2
    worker.send(m.Cancel(id=2))  # it has ended: nothing happens
    worker.send(generate(3, 0, 2))
    assert collect(worker, 1) == {3: [1, 2]}
    worker.send(m.Shutdown())
    assert "generation ended after" in worker.finish()[2]


def test_a_generation_ends_at_a_stop_token_that_is_counted_and_not_shown(start: Start) -> None:
    worker = ready(start())
    worker.send(generate(2, 10, 20, stop_token_ids=[13]))
    events = [worker.receive() for _ in range(3)]
    assert [event.final for event in events] == [False, False, True]
    last = m.GenerateResult.model_validate(events[-1].result)
    assert (last.finish_reason, last.stop_token_id, last.generated_tokens) == ("stop", 13, 3)
    assert last.tokens == []


@pytest.mark.parametrize(
    ("request_", "code", "mentions"),
    [
        (generate(2, 0, 600), "context-overflow", "exceed 512"),
        (m.Request(id=2, method="generate", params={"token_ids": []}), "invalid-params", "max_tokens"),
        (m.Request(id=2, method="unload", params={}), None, ""),
    ],
)
def test_an_error_crosses_as_data_and_the_worker_serves_on(
    start: Start, request_: m.Request, code: str | None, mentions: str
) -> None:
    worker = ready(start())
    worker.send(request_)
    answer = worker.receive()
    if code is None:
        assert answer.final
        worker.send(generate(2, 0, 1))
        answer, code = worker.receive(), "no-model"
    assert isinstance(answer, m.Failed)
    assert answer.error.code == code
    assert mentions in answer.error.message
    assert "Traceback" not in answer.error.message


def test_a_method_of_a_newer_host_is_an_error_of_that_request_alone(start: Start) -> None:
    worker = ready(start())
    dream = {"id": 2, "method": "dream", "params": {}, "type": "request"}
    worker.socket.sendall(encode_frame("J", m.canonical_json(dream)))
    failed = worker.receive()
    assert (failed.id, failed.error.code) == (2, "invalid-request")
    assert "dream" in failed.error.message
    worker.send(generate(3, 0, 1))
    assert collect(worker, 1) == {3: [1]}


def test_an_unexpected_exception_is_internal_and_its_traceback_stays_in_the_log(start: Start) -> None:
    worker = ready(start(at_token={"1": "raise"}))
    worker.send(generate(2, 0, 5))
    assert worker.receive().id == 2
    error = worker.receive().error
    assert (error.code, error.facts) == ("internal", {"exception": "ZeroDivisionError"})
    assert "a mistake in the plugin" in error.message
    worker.send(m.Shutdown())
    status, _, err = worker.finish()
    assert status == 0
    assert "Traceback" in err


def test_binary_frames_follow_their_event(start: Start) -> None:
    worker = ready(start())
    params = m.TraceParams(token_ids=[1, 2], slices=["embed", "logits"])
    worker.send(m.Request(id=2, method="trace", params=params.model_dump(mode="json")))
    event = worker.receive()
    assert (event.final, event.slices) == (True, 2)
    for _ in range(2):
        frame = worker.channel.read()
        assert (frame.kind, frame.payload) == ("B", b"\0\0\x80\x3f\0\0\0\x40")


def test_an_answer_with_several_results_ends_with_the_last(start: Start) -> None:
    worker = ready(start())
    params = m.EvaluateParams(sequences=[[1, 2], [3], [4, 5, 6]])
    worker.send(m.Request(id=2, method="evaluate", params=params.model_dump(mode="json")))
    events = [worker.receive() for _ in range(3)]
    assert [(event.result["index"], event.final) for event in events] == [(0, False), (1, False), (2, True)]


def test_heartbeats_tell_busy_from_idle_and_count_progress(start: Start) -> None:
    worker = ready(start(token_s=0.02))

    def next_beat() -> m.Heartbeat:
        while not isinstance(message := worker.receive(heartbeats=True), m.Heartbeat):
            pass
        return message

    idle = next_beat()
    assert idle.state == "idle"
    assert idle.resident_bytes is None or idle.resident_bytes > 2**20
    worker.send(generate(2, 0, 200))
    while (busy := next_beat()).state == "idle":
        pass
    assert next_beat().progress > busy.progress > 0


def test_a_worker_whose_host_has_gone_ends_by_itself_even_while_busy(start: Start) -> None:
    worker = ready(start(at_token={"1": "hang"}))
    worker.send(generate(2, 0, 5))
    worker.receive()
    worker.socket.close()
    began = time.monotonic()
    assert worker.process.wait(timeout=10) == 10
    assert time.monotonic() - began < 2


def test_a_breach_by_the_host_ends_the_worker_with_the_reason(start: Start) -> None:
    worker = ready(start())
    worker.socket.sendall(b"nonsense")
    refused = worker.receive()
    assert isinstance(refused, m.Refused)
    assert refused.error.facts["as_text"] == "nonsense"
    assert worker.finish()[0] == 11


def test_typed_by_a_person_it_explains_itself(python: Path) -> None:
    done = subprocess.run(
        [python, "-I", "-B", "-m", "vox_plugin_api.child", "vox-scripted"],
        capture_output=True,
        text=True,
        env={},
        check=False,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plugin_that_dies_leaves_its_stack_in_the_log(start: Start) -> None:
    worker = ready(start(at_token={"0": "segfault"}))
    worker.send(generate(2, 0, 5))
    assert worker.receive() is None
    status, _, err = worker.finish()
    assert status == -signal.SIGSEGV
    assert "vox_scripted/actions.py" in err
