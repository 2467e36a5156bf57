"""A silent stream, and what else is known of its worker: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.router.fleet.facts import read_generated
from kvxfer.router.upstream import UpstreamDeadlines, UpstreamTimeoutError
from tests.support.fake_workers import FakeWorker, Received, Running, broken, events, eventually, router_over, texts
from tests.support.scripted_engine import Script, ScriptedEngine
from tests.support.upstream import CHUNKED, chunk, pool_over

LIMIT_S = 0.4
SILENT = "be silent"


class Buffering(FakeWorker):
    """A stream of the prompt SILENT stops after one token until ``speaks``; others go on."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.speaks = asyncio.Event()
        self.silent = 0

    async def _stream(self, request: Received, send: Any) -> None:
        if request.body.get("prompt") != SILENT:
            await super()._stream(request, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, event in enumerate(self._events(request)):
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if not number:
                self.silent += 1
                await self.speaks.wait()
        await send({"type": "http.response.body", "body": b""})


def silent_streams(router: Running, d: Buffering, count: int) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(router.complete(prompt=SILENT, stream=True)) for _ in range(count)]


@contextlib.asynccontextmanager
async def silences(count: int, **options: Any) -> AsyncIterator[tuple[Running, Buffering, list[asyncio.Task[Any]]]]:
    d = Buffering("d0")
    async with router_over(d, token_timeout_s=LIMIT_S, **options) as router:
        asked = silent_streams(router, d, count)
        await eventually(lambda: d.silent == count)
        try:
            yield router, d, asked
        finally:
            d.speaks.set()
            await asyncio.wait(asked)


async def test_silent_streams_are_whole_while_their_worker_answers_others() -> None:
    async with silences(3) as (router, d, asked):
        for _ in range(15):  # well over the limit
            assert (await router.complete(stream=True)).status_code == 200
            await asyncio.sleep(LIMIT_S / 5)
        d.speaks.set()
        for answer in await asyncio.gather(*asked):
            assert texts(events(answer.text)) == "one two three"
        assert router.workers.counters.ejections == {}
        assert router.workers.entries()[0].health.failures_in_a_row == 0


async def test_where_all_streams_of_a_worker_are_silent_they_are_given_up() -> None:
    async with silences(2) as (_, _, asked):
        for answer in await asyncio.gather(*asked):
            assert broken(events(answer.text))["code"] == "deadline"


async def test_one_silent_stream_alone_is_no_evidence_and_ends_at_the_requests_limit() -> None:
    async with silences(1, request_timeout_s=4 * LIMIT_S) as (router, _, asked):
        await asyncio.sleep(2 * LIMIT_S)
        [entry] = router.workers.entries()
        assert entry.health.probe_due_s is not None  # it is asked how it is
        assert not asked[0].done()
        error = broken(events((await asked[0]).text))
        assert "without progress" in error["message"]
        assert entry.health.failures_in_a_row == 0


async def test_a_count_of_tokens_that_grows_keeps_a_stream_and_one_that_stands_ends_it() -> None:
    async with silences(1) as (router, _, asked):
        [entry] = router.workers.entries()
        loop = asyncio.get_running_loop()
        for count in range(8):
            entry.count(float(count), loop.time())
            await asyncio.sleep(LIMIT_S / 2)
        assert not asked[0].done()
        for _ in range(8):
            entry.count(7.0, loop.time())
            await asyncio.sleep(LIMIT_S / 2)
        assert asked[0].done()
        assert broken(events(asked[0].result().text))["code"] == "deadline"


async def test_the_silent_streams_of_a_worker_that_is_out_end_at_the_limit() -> None:
    async with silences(1) as (router, d, asked):
        router.workers.failed(d.member.ref, "unreachable", "another")
        assert broken(events((await asked[0]).text))["code"] == "deadline"


class Signing(FakeWorker):
    """Each stream has one token, and then ``sign`` for ever unless its prompt is SILENT: the engine behind has hung."""

    first = b'data: {"choices":[{"index":0,"text":"hi"}]}\n\n'
    sign = b": still here\n\n"

    async def _stream(self, request: Received, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        while True:
            if request.body.get("prompt") != SILENT:
                await send({"type": "http.response.body", "body": self.sign, "more_body": True})
            await asyncio.sleep(LIMIT_S / 10)


async def test_comments_of_a_stream_say_nothing_for_it_nor_for_the_others() -> None:
    d = Signing("d0")
    async with router_over(d, token_timeout_s=LIMIT_S) as router, asyncio.timeout(20):
        asked = [asyncio.create_task(router.complete(prompt=prompt, stream=True)) for prompt in (SILENT, "chatty")]
        for answer in await asyncio.gather(*asked):
            chunks = [line for line in answer.text.split("\n\n") if line.startswith("data: {")]
            assert "hi" in chunks[0]
            assert '"code":"deadline"' in chunks[1]
            assert len(chunks) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
async def test_keepalives_after_the_first_token_are_no_progress_of_a_request(path: str) -> None:
    d = Signing("d0")
    body: dict[str, Any] = {"model": "tiny", "prompt": "hi", "stream": True}
    if path == "/v1/messages":
        d.first = b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "hi"}}\n\n'
        d.sign = b'event: ping\ndata: {"type": "ping"}\n\n'
        body = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True}
    async with router_over(d, request_timeout_s=2 * LIMIT_S, token_timeout_s=60.0) as router, asyncio.timeout(20):
        answer = await router.client.post(path, json=body)
        assert 2 < answer.text.count(d.sign.decode()) < 100  # 20 in that time
        assert "request_timeout_s 0.8 passed without progress" in answer.text


async def test_patience_is_asked_from_half_of_the_limit_on_and_its_word_counts() -> None:
    def make(engine: ScriptedEngine) -> Script:
        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await engine.read(reader)
            writer.write(CHUNKED + chunk(b"a"))
            await engine.until_hung_up(reader)

        return script

    asked: list[float] = []

    def patience(silent_s: float) -> float:
        asked.append(silent_s)
        return 0.1 if len(asked) < 4 else 0.0

    async with pool_over(make) as (_, pool):
        deadlines = UpstreamDeadlines(between_chunks_s=0.4)
        with pytest.raises(UpstreamTimeoutError):
            async with await pool.request("POST", "/", (), [b"{}"], deadlines, patience=patience) as response:
                await response.read(100)
        assert 0.2 <= asked[0] < 0.4
        assert asked == sorted(asked)
        assert len(asked) == 4
        assert pool.counters.heard_s > 0


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (b'vllm:generation_tokens_total{engine="0",model_name="m"} 7.0\n', 7.0),
        (b'vllm:generation_tokens_total{engine="0"} 7.0\nvllm:generation_tokens_total{engine="1"} 5.0\n', 12.0),
        (b'kvxfer_engine_tokens_total{kind="prefill"} 9.0\nkvxfer_engine_tokens_total{kind="decode"} 3.0\n', 3.0),
        (b'sglang:generation_tokens_total{model_name="m"} 4.0\n', None),
        (b"", None),
    ],
)
def test_an_engines_own_count_of_tokens_is_read(page: bytes, count: float | None) -> None:
    assert read_generated(page) == count


def test_of_several_engines_behind_an_address_one_is_counted() -> None:
    page = b'vllm:generation_tokens_total{engine="0"} 7.0\nvllm:generation_tokens_total{engine="1"} 5.0\n'
    assert read_generated(page, 1) == 5.0
