import asyncio
import gzip

import pytest

from fixtures.scripted_service import ScriptedEngine, make_service, text
from vox_host.server.heap import LARGE_BYTES, HeapKeeper

LARGE = b'{"prompt": "' + b"x" * (LARGE_BYTES + 1) + b'"}'
SMALL = b'{"prompt": "x"}'


async def post(client, data, **headers):
    headers = {"Content-Type": "application/json", **headers}
    async with client.post("/v1/completions", data=data, headers=headers) as response:
        await response.read()
        return response.status


async def test_large_requests_are_followed_by_one_trim_and_the_next_ones_by_another(serving):
    trims: list[int] = []
    heap = HeapKeeper(lambda: trims.append(1), pause_s=0.3)
    client = await serving(make_service(ScriptedEngine(text("ok"))), heap=heap)
    for round_ in range(1, 3):
        assert await asyncio.gather(*(post(client, LARGE) for _ in range(4))) == [400] * 4
        assert len(trims) == round_ - 1, "not before the pause"
        async with asyncio.timeout(10):
            while len(trims) < round_:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.4)
        assert len(trims) == round_


@pytest.mark.parametrize(
    ("data", "headers", "expected"),
    [
        (SMALL, {}, 0),
        (gzip.compress(SMALL, mtime=0), {"Content-Encoding": "gzip"}, 1),
    ],
)
async def test_small_requests_cost_no_trim_and_encoded_ones_count_as_large(serving, data, headers, expected):
    trims: list[int] = []
    client = await serving(
        make_service(ScriptedEngine(text("ok"))), heap=HeapKeeper(lambda: trims.append(1), pause_s=0.01)
    )
    assert await post(client, data, **headers) == 200
    await asyncio.sleep(0.2)
    assert len(trims) == expected


async def test_closing_ends_a_pending_trim():
    trims: list[int] = []
    heap = HeapKeeper(lambda: trims.append(1), pause_s=0.05)
    heap.after_request(LARGE_BYTES + 1, is_encoded=False)
    await heap.close()
    await asyncio.sleep(0.15)
    assert trims == []
