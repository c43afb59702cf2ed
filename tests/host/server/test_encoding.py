import gzip
import json
import tracemalloc
import zlib

import pytest

from fixtures.scripted_service import ScriptedEngine, make_service, text
from vox_host.server.body import MAX_BODY_BYTES
from vox_host.server.encoding import BodyTooLargeError, decoded

COMPLETIONS = "/v1/completions"
PLAIN = json.dumps({"prompt": "x"}).encode()


def raw_deflate(data: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(data) + deflater.flush()


async def answer(serving, data, encoding, path=COMPLETIONS):
    client = await serving(make_service(ScriptedEngine(text("ok"))))
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with client.post(path, data=data, headers=headers) as response:
        status, body = response.status, await response.json()
    async with client.get("/health") as response:
        assert response.status == 200
    return status, body


@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", gzip.compress(PLAIN)),
        ("X-GZIP", gzip.compress(PLAIN[:5]) + gzip.compress(PLAIN[5:])),
        ("deflate", zlib.compress(PLAIN)),
        ("deflate", raw_deflate(PLAIN)),
        ("identity", PLAIN),
    ],
    ids=["gzip", "members", "zlib", "raw", "identity"],
)
async def test_encoded_bodies_are_read(serving, encoding, data):
    status, _ = await answer(serving, data, encoding)
    assert status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("gzip", PLAIN),
        ("gzip", gzip.compress(PLAIN)[:-3]),
        ("gzip", gzip.compress(PLAIN) + b"more"),
        ("deflate", b"\0" * 40),
        ("deflate", PLAIN),
        ("deflate", zlib.compress(PLAIN) + b"more"),
    ],
    ids=["plain", "cut", "gzip-more", "nuls", "json", "zlib-more"],
)
async def test_a_body_that_is_not_of_its_encoding_is_400_and_no_traceback(
    serving, encoding, data, path, caplog
):
    status, body = await answer(serving, data, encoding, path)
    assert (status, body["error"]["code"]) == (400, "undecodable_body")
    assert encoding in body["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("encoding", ["zz", "br", "gzip, gzip"])
async def test_an_unknown_encoding_is_415_and_says_which_are_known(serving, encoding, caplog):
    status, body = await answer(serving, PLAIN, encoding)
    assert (status, body["error"]["type"]) == (415, "invalid_request_error")
    assert "gzip, deflate" in body["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_body_that_inflates_past_the_limit_is_413(serving):
    status, body = await answer(serving, gzip.compress(b" " * 200 * 2**20, 1), "gzip")
    assert (status, body["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_no_more_than_the_limit_is_inflated(encoding):
    bomb = (gzip.compress if encoding == "gzip" else zlib.compress)(b" " * 200 * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError):
            decoded(bomb, encoding, MAX_BODY_BYTES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The inflated piece, the growing whole, and the tail of the compressed bytes.
    assert peak < 4 * MAX_BODY_BYTES


def test_the_limit_itself_is_allowed():
    assert decoded(gzip.compress(b"a" * 1000), "gzip", 1000) == b"a" * 1000
    with pytest.raises(BodyTooLargeError):
        decoded(gzip.compress(b"a" * 1001), "gzip", 1000)
