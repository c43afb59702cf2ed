import os
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vox_plugin_api import messages as m
from vox_plugin_api.framing import (
    MAX_BINARY_BYTES,
    MAX_JSON_BYTES,
    Frame,
    FrameChannel,
    FrameDecoder,
    ProtocolError,
    decode_to_host,
    decode_to_worker,
    decode_token,
    encode_frame,
    encode_message,
    encode_token,
)

reproducible = settings(deadline=None, derandomize=True)
FRAMES = st.lists(st.builds(Frame, st.sampled_from(["J", "B"]), st.binary(max_size=300)), max_size=8)


def stream_of(frames: list[Frame]) -> bytes:
    return b"".join(encode_frame(frame.kind, frame.payload) for frame in frames)


@reproducible
@given(frames=FRAMES, cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_frames_survive_any_cutting_of_the_stream(frames: list[Frame], cuts: list[int]) -> None:
    stream = stream_of(frames)
    decoder = FrameDecoder()
    received: list[Frame] = []
    ends = [*sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    start = 0
    for end in ends:
        received += decoder.feed(stream[start:end])
        start = end
    decoder.finish()
    assert received == frames


@reproducible
@given(frames=FRAMES.filter(bool), missing=st.integers(1, 10_000))
def test_a_stream_that_ends_inside_a_frame_is_an_error(frames: list[Frame], missing: int) -> None:
    stream = stream_of(frames)
    last_start = len(stream_of(frames[:-1]))
    cut = max(last_start + 1, len(stream) - missing)
    decoder = FrameDecoder()
    assert decoder.feed(stream[:cut]) == frames[:-1]
    with pytest.raises(ProtocolError) as caught:
        decoder.finish()
    assert caught.value.code == "frame-truncated"
    assert caught.value.facts["first_bytes"].startswith(stream[last_start : last_start + 1].hex())


@reproducible
@given(garbage=st.binary(min_size=1, max_size=200).filter(lambda data: data[:1] not in (b"J", b"B")))
def test_garbage_is_refused_at_its_first_byte_and_shown(garbage: bytes) -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError) as caught:
        decoder.feed(stream_of([Frame("B", b"fine")]) + garbage)
    assert caught.value.code == "bad-frame"
    assert caught.value.facts["first_bytes"] == garbage[:64].hex(" ")


def test_printed_text_on_the_stream_can_be_read_in_the_error() -> None:
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().feed(b"Loading weights: 10%\n")
    assert "Loading weights" in caught.value.message
    assert caught.value.facts["as_text"] == "Loading weights: 10%\n"


@pytest.mark.parametrize(("kind", "limit"), [("J", MAX_JSON_BYTES), ("B", MAX_BINARY_BYTES)])
def test_a_frame_over_its_limit_is_refused_from_its_header_alone(kind: str, limit: int) -> None:
    at_limit = kind.encode() + limit.to_bytes(4, "big")
    assert FrameDecoder().feed(at_limit) == []
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder().feed(kind.encode() + (limit + 1).to_bytes(4, "big"))
    assert caught.value.code == "frame-too-large"
    assert caught.value.facts["found"] == limit + 1
    assert caught.value.facts["limit"] == limit


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(ProtocolError) as caught:
        encode_frame("J", bytes(MAX_JSON_BYTES + 1))
    assert caught.value.facts == {"kind": "J", "limit": MAX_JSON_BYTES, "found": MAX_JSON_BYTES + 1}


@pytest.mark.parametrize(
    ("payload", "mentions"),
    [
        (b"", "JSON"),
        (b"[]", "object"),
        (b"{}", "type"),
        (b'{"type":"nonsense"}', "nonsense"),
        (b'{"type":"event","id":"x","final":true}', "event.id"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_a_payload_that_is_no_message_is_an_error_that_names_the_place(payload: bytes, mentions: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_to_host(Frame("J", payload))
    assert caught.value.code == "bad-message"
    assert mentions in caught.value.message


def test_binary_where_a_message_must_be_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="expected a message"):
        decode_to_worker(Frame("B", b"{}"))


def test_each_side_refuses_what_only_it_may_say() -> None:
    frame = Frame("J", m.canonical_json(m.Shutdown()))
    assert decode_to_worker(frame) == m.Shutdown()
    with pytest.raises(ProtocolError, match="shutdown"):
        decode_to_host(frame)


def test_a_message_with_keys_of_a_newer_peer_is_still_read() -> None:
    frame = Frame("J", b'{"type":"cancel","id":3,"reason":"tired"}')
    assert decode_to_worker(frame) == m.Cancel(id=3)


def test_the_bytes_of_a_frame_are_these() -> None:
    assert encode_message(m.Cancel(id=7)) == b'J\0\0\0\x18{"id":7,"type":"cancel"}'
    assert encode_frame("B", b"\x01\x02") == b"B\0\0\0\x02\x01\x02"


@settings(reproducible, max_examples=10)
@given(sizes=st.lists(st.integers(0, 400_000), min_size=1, max_size=4))
def test_frames_of_several_threads_never_mix(sizes: list[int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = FrameChannel(ours.fileno())
        reader = FrameChannel(theirs.fileno())
        writers = [
            threading.Thread(
                target=channel.send,
                args=(m.Event(id=number, final=True, slices=1), (bytes([number]) * size,)),
            )
            for number, size in enumerate(sizes)
        ]
        for writer in writers:
            writer.start()
        found = {}
        for _ in sizes:
            event, piece = decode_to_host(reader.read()), reader.read()
            found[event.id] = piece.payload
        for writer in writers:
            writer.join()
        assert found == {number: bytes([number]) * size for number, size in enumerate(sizes)}


def test_the_end_of_the_stream_inside_a_frame_is_an_error_for_a_reader_too() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, encode_message(m.Shutdown())[:-1])
    os.close(write_end)
    with pytest.raises(ProtocolError, match="ended inside a frame"):
        FrameChannel(read_end).read()
    os.close(read_end)


def test_the_end_of_the_stream_is_none_and_not_an_error() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, encode_message(m.Shutdown()))
    os.close(write_end)
    channel = FrameChannel(read_end)
    assert decode_to_worker(channel.read()) == m.Shutdown()
    assert channel.read() is None
    os.close(read_end)


@reproducible
@given(request_id=st.integers(1, 2**53), token_id=st.integers(0, 2**31 - 1))
def test_a_token_is_written_as_its_event_would_be(request_id: int, token_id: int) -> None:
    result = m.GenerateResult(tokens=[m.GeneratedToken(token_id=token_id)])
    event = m.Event(id=request_id, final=False, result=result.model_dump(mode="json"))
    assert encode_token(request_id, token_id) == encode_message(event)


@reproducible
@given(request_id=st.integers(1, 10**15), token_id=st.integers(0, 2**31 - 1))
def test_a_token_is_read_as_its_event_would_be(request_id: int, token_id: int) -> None:
    [frame] = FrameDecoder().feed(encode_token(request_id, token_id))
    assert decode_token(frame) == (request_id, token_id)
    event = decode_to_host(frame)
    assert isinstance(event, m.Event) and event.id == request_id and event.result is not None
    assert event.result["tokens"] == [{"token_id": token_id, "logprob": None, "top": []}]


PLAIN = m.GenerateResult(tokens=[m.GeneratedToken(token_id=7)])


@pytest.mark.parametrize(
    "other",
    [
        m.Event(id=3, final=True, result=PLAIN.model_dump(mode="json")),
        m.Event(id=3, final=False, result=PLAIN.model_dump(mode="json"), observation={"cached_tokens": 0}),
        m.Event(id=3, final=False, result=PLAIN.model_dump(mode="json"), slices=1),
        m.Event(id=3, final=False, result={**PLAIN.model_dump(mode="json"), "stop_token_id": 7}),
        m.Event(id=3, final=False, result={**PLAIN.model_dump(mode="json"), "tokens": []}),
        m.Event(id=-3, final=False, result=PLAIN.model_dump(mode="json")),
        m.Heartbeat(state="busy", progress=3),
    ],
)
def test_what_is_no_plain_token_is_left_to_the_whole_reading(other: m.Message) -> None:
    assert decode_token(Frame("J", m.canonical_json(other))) is None


@pytest.mark.parametrize(("number", "wrong"), [(b"7", b"07"), (b"7", b"7.0"), (b"7", b""), (b"7", b"7 ")])
def test_what_json_reads_otherwise_is_no_plain_token(number: bytes, wrong: bytes) -> None:
    [frame] = FrameDecoder().feed(encode_token(3, 7))
    payload = frame.payload.replace(b'"token_id":' + number, b'"token_id":' + wrong)
    assert payload != frame.payload and decode_token(Frame("J", payload)) is None
    assert decode_token(Frame("B", frame.payload)) is None
