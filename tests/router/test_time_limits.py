"""How long a request may take, over real sockets."""

from __future__ import annotations

import asyncio

from tests.support.fake_workers import FakeWorker, broken, events, eventually, router_over, texts


async def test_a_request_ends_at_its_time_limit() -> None:
    d = FakeWorker("d0")
    d.hold = asyncio.Event()
    async with router_over(d, request_timeout_s=0.5) as router:
        answer = await router.complete()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline"
        assert "request_timeout_s 0.5 passed before" in answer.json()["error"]["message"]
        d.hold.set()
        d.tokens = [str(number) for number in range(60)]
        d.delay_s = 0.02
        chunks = events((await router.complete(stream=True)).text)  # takes 1.2 s, and makes progress
        assert texts(chunks) == "".join(d.tokens)
        d.delay_s = 5.0
        error = broken(events((await router.complete(stream=True)).text))
        assert error["code"] == "deadline"
        assert "without progress" in error["message"]
        await asyncio.wait_for(d.received[2].left.wait(), 5.0)


async def test_a_request_ends_at_the_limit_of_the_whole_where_there_is_one() -> None:
    d = FakeWorker("d0")
    d.tokens = [str(number) for number in range(1000)]
    d.delay_s = 0.02
    async with router_over(d, total_timeout_s=0.5) as router:
        chunks = events((await router.complete(stream=True)).text)
        assert broken(chunks)["code"] == "deadline"
        assert "total_timeout_s 0.5" in broken(chunks)["message"]
        await asyncio.wait_for(d.received[0].left.wait(), 5.0)


async def test_a_client_that_does_not_read_gives_its_place_back() -> None:
    d = FakeWorker("d0")
    d.tokens = ["x" * 100_000] * 500
    async with router_over(d, max_inflight=1, request_timeout_s=1.5) as router:
        host, _, port = router.url.removeprefix("http://").partition(":")
        body = b'{"model": "tiny", "prompt": "hi", "stream": true}'
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.wait_for(d.arrived.wait(), 5.0)
        assert (await router.complete()).status_code == 503

        async def is_idle() -> bool:
            return (await router.client.get("/health")).json()["inflight"] == 0

        await eventually(is_idle)
        assert d.received[0].left.is_set()
        writer.transport.abort()
