"""What a worker writes when: the tokens of a round together, and nothing kept from the host meanwhile."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vox_plugin_api import messages as m
from vox_plugin_api.backend import Backend, BackendError, BackendInfo, Reply, Stream
from vox_plugin_api.framing import Frame, FrameDecoder, decode_to_host
from vox_plugin_api.request_loop import RequestLoop


@dataclass
class Host:
    """A channel that asks what it is told to and keeps each write apart."""

    asked: list[m.Message]
    writes: list[list[m.Message]] = field(default_factory=list)
    _more: queue.SimpleQueue[Frame] = field(default_factory=queue.SimpleQueue)

    def read(self) -> Frame | None:
        if self.asked:
            return Frame("J", m.canonical_json(self.asked.pop(0)))
        return self._more.get()  # never: the thread that reads is left waiting

    def send(self, message: m.Message) -> None:
        assert isinstance(message, m.Heartbeat)

    def write(self, data: bytes) -> None:
        self.writes.append([decode_to_host(frame) for frame in FrameDecoder().feed(data)])

    def shut_down(self) -> None:
        self._more.put(Frame("J", m.canonical_json(m.Shutdown())))

    @property
    def told(self) -> list[list[tuple[int, object]]]:
        """By write, the requests that were answered and with what: a token, the end, or an error's code."""
        return [[(message.id, _gist(message)) for message in write] for write in self.writes]


def _gist(message: m.Message) -> object:
    if isinstance(message, m.Failed):
        return message.error.code
    assert isinstance(message, m.Event) and message.result is not None
    tokens = message.result.get("tokens") or []
    return tokens[0]["token_id"] if tokens and not message.final else "end"


class Scripted(Backend):
    """Answers `generate` with as many tokens as are asked for, and `evaluate` after a long look."""

    info = BackendInfo("scripted", "0", "cpu", ("canonical",), ("generate", "evaluate"))

    def __init__(self, when_evaluating: Callable[[], None] = lambda: None, wrong: int | None = None) -> None:
        self._look = when_evaluating
        self._wrong = wrong

    def self_test(self, params: m.SelfTestParams) -> Reply:
        raise NotImplementedError

    def load_model(self, params: m.LoadModelParams) -> Stream:
        raise NotImplementedError

    def generate(self, params: m.GenerateParams) -> Iterator[Reply | None]:
        for number in range(params.max_tokens):
            token = 10 * params.token_ids[0] + number
            if token == self._wrong:
                raise BackendError("non-finite", "planted")
            yield Reply(m.GenerateResult(tokens=[m.GeneratedToken(token_id=token)]))
        yield Reply(m.GenerateResult(finish_reason="length"))

    def evaluate(self, params: m.EvaluateParams) -> Iterator[Reply | None]:
        yield None
        self._look()
        yield Reply(m.EvaluateResult(index=0, tokens=[]))


def generation(number: int, tokens: int) -> m.Request:
    params = m.GenerateParams(token_ids=[number], max_tokens=tokens)
    return m.Request(id=number, method="generate", params=params.model_dump(mode="json"))


def run(host: Host, backend: Scripted, answers: int) -> None:
    """Serve until that many answers are complete; all requests are there before the first round."""
    loop = RequestLoop(host, backend)  # type: ignore[arg-type]
    for request in host.asked:
        loop._inbox.put(request)  # type: ignore[arg-type]
    host.asked.clear()
    write = host.write

    def count(data: bytes) -> None:
        nonlocal answers
        write(data)
        answers -= sum(isinstance(one, m.Failed) or one.final for one in host.writes[-1])  # type: ignore[attr-defined]
        if not answers:
            host.shut_down()

    host.write = count  # type: ignore[method-assign]
    assert loop.run() == 0


def test_tokens_of_a_round_leave_in_one_write():
    host = Host([generation(1, 2), generation(2, 2), generation(3, 2)])
    run(host, Scripted(), 3)
    assert host.told[:2] == [[(1, 10), (2, 20), (3, 30)], [(1, 11), (2, 21), (3, 31)]]
    assert host.told[2:] == [[(1, "end")], [(2, "end")], [(3, "end")]]


def test_an_end_and_an_error_take_what_was_held_with_them():
    host = Host([generation(1, 3), generation(2, 1), generation(3, 3)])
    run(host, Scripted(wrong=31), 3)
    assert host.told[1:3] == [[(1, 11), (2, "end")], [(3, "non-finite")]]


def test_nothing_is_held_while_another_kind_of_request_works():
    seen: list[list[tuple[int, object]]] = []
    evaluation = m.Request(id=2, method="evaluate", params={"sequences": [[1]]})
    host = Host([generation(1, 2), evaluation, generation(3, 2)])
    run(host, Scripted(when_evaluating=lambda: seen.extend(host.told)), 3)
    assert seen == [[(1, 10)], [(3, 30)], [(1, 11)]]


def test_what_is_more_than_a_token_is_written_whole():
    class Wordy(Scripted):
        def generate(self, params: m.GenerateParams) -> Iterator[Reply | None]:
            token = m.GeneratedToken(token_id=7, logprob=-0.5, top=[m.TokenLogprob(token_id=7, logprob=-0.5)])
            yield Reply(m.GenerateResult(tokens=[token]))
            yield Reply(m.GenerateResult(tokens=[m.GeneratedToken(token_id=8)]), {"cached_tokens": 3})
            yield Reply(m.GenerateResult(tokens=[], prompt=[m.GeneratedToken(token_id=9)]))
            yield Reply(m.GenerateResult(tokens=[m.GeneratedToken(token_id=5), m.GeneratedToken(token_id=6)]))
            yield Reply(m.GenerateResult(tokens=[m.GeneratedToken(token_id=4)], finish_reason="length"))

    host = Host([generation(1, 1)])
    run(host, Wordy(), 1)
    [scored], [observed], [prompt], [two], [last] = host.writes
    results = [m.GenerateResult.model_validate(one.result) for one in (scored, observed, prompt, two, last)]  # type: ignore[attr-defined]
    assert results[0].tokens[0].logprob == -0.5 and results[0].tokens[0].top[0].token_id == 7
    assert observed.observation == {"cached_tokens": 3}  # type: ignore[attr-defined]
    assert results[2].prompt is not None and results[2].prompt[0].token_id == 9
    assert [token.token_id for token in results[3].tokens] == [5, 6]
    assert last.final and results[4].finish_reason == "length"  # type: ignore[attr-defined]
