"""Keep-alives are no answer: they pass at once, whoever sends them, and a request stays retryable behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.sse import EventDecoder
from kvxfer.router.answer import ClientAnswer
from kvxfer.router.apis.messages_style import MESSAGES
from kvxfer.router.apis.openai_style import OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.keepalive import keeping_alive
from kvxfer.router.stream_relay import HELD_EVENTS_MAX, StreamRelay
from tests.support.fake_workers import MODEL, FakeWorker, Running, eventually, failing, router_over

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}
ENDS = {"/v1/messages": b"message_stop", "/v1/responses": b"event: error"}


def asking(router: Running, path: str = "/v1/completions", **more: Any) -> Any:
    return router.client.stream("POST", path, json={"model": MODEL, "stream": True, **BODIES[path], **more})


async def taken(answer: httpx.Response) -> bytes:
    return b"".join([piece async for piece in answer.aiter_raw()])


@pytest.mark.parametrize(("path", "sign"), [(path, COMMENT) for path in BODIES] + [("/v1/messages", PING)])
async def test_keepalives_pass_before_the_answer_begins(path: str, sign: bytes) -> None:
    d = FakeWorker("d0")
    d.signs, d.after_signs = [sign] * 3, asyncio.Event()
    async with router_over(d) as router, asking(router, path) as answer:
        assert answer.status_code == 200
        pieces: AsyncIterator[bytes] = answer.aiter_raw()
        begun = b""
        while len(begun) < 3 * len(sign):
            begun += await anext(pieces)
        assert begun == sign * 3
        d.after_signs.set()
        rest = b"".join([piece async for piece in pieces])
        assert b"one" in rest


@pytest.mark.parametrize("signs", [10, HELD_EVENTS_MAX + 36])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_worker_that_dies_behind_keepalives_is_replaced(path: str, signs: int) -> None:
    d = FakeWorker("d0")
    d.signs, d.cuts_after_signs = [COMMENT] * signs, 1
    async with router_over(d) as router, asking(router, path) as answer:
        content = await taken(answer)
        assert answer.headers["x-kvxfer-attempt"] == "1"  # the head had gone out
    assert len(d.received) == 2
    assert content.count(COMMENT) == 2 * signs
    assert [content.count(word) for word in (b"one", b" two", b" three", b"[DONE]", b'"error"')] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("path", list(BODIES))
@pytest.mark.parametrize("answers", [failing(500, "broken", retryable=False), failing(400, "bad", retryable=False)])
async def test_a_stream_whose_tries_all_fail_behind_its_head_ends_well(path: str, answers: tuple[int, Any]) -> None:
    d = FakeWorker("d0")
    d.signs, d.cuts_after_signs = [COMMENT], 1
    async with router_over(d, attempts_max=2) as router, asking(router, path) as answer:
        d.after_signs = asyncio.Event()
        await d.arrived.wait()
        d.always_fails = answers
        d.after_signs.set()
        content = await taken(answer)
        assert answer.status_code == 200
    events = EventDecoder().feed(content)
    assert events[0].raw == COMMENT
    assert ENDS.get(path, b"[DONE]") in events[-1].raw
    said = [json.loads(event.data) for event in events if b'"error"' in event.data]
    assert len(said) == 1
    assert said[0]["error"]["code"] == answers[1]["error"]["code"]


async def test_a_silent_worker_is_spoken_for_where_that_is_asked() -> None:
    d = FakeWorker("d0")
    d.hold = asyncio.Event()
    async with router_over(d, keepalive_s=0.1) as router:
        async with asking(router) as answer:
            assert answer.status_code == 200
            assert answer.headers["x-kvxfer-prefill"] == "local"
            pieces = answer.aiter_raw()
            begun = b""
            while begun.count(COMMENT) < 3:
                begun += await anext(pieces)
            assert begun == COMMENT * begun.count(COMMENT)
            d.failures = [failing(500, "broken", retryable=True)]  # still another try
            d.hold.set()
            rest = b"".join([piece async for piece in pieces])
        assert len(d.received) == 2
        assert [rest.count(word) for word in (b"one", b"[DONE]", b'"error"')] == [1, 1, 0]


async def test_without_the_option_and_without_a_stream_the_router_says_nothing() -> None:
    d = FakeWorker("d0")
    for options, stream in (({}, True), ({"keepalive_s": 0.05}, False)):
        d.hold = asyncio.Event()
        async with router_over(d, **options) as router:  # type: ignore[arg-type]
            asked = asyncio.create_task(router.complete(stream=stream))
            await eventually(lambda: router.workers.statistics().inflight == 1)
            await asyncio.sleep(0.2)
            d.hold.set()
            answer = await asked
            assert answer.status_code == 200
            assert COMMENT not in answer.content


async def test_a_sign_is_sent_in_silence_only() -> None:
    progress, sent = 0, []
    loop = asyncio.get_running_loop()
    with keeping_alive(0.2, lambda: progress, lambda: sent.append(loop.time())):
        for _ in range(20):
            progress += 1
            await asyncio.sleep(0.02)
        assert sent == []
        await eventually(lambda: len(sent) == 2)
    count = len(sent)
    await asyncio.sleep(0.25)
    assert len(sent) == count


class PausedClient:
    is_started = is_ended = False
    is_paused = True
    written: list[bytes]

    def __init__(self) -> None:
        self.written = []
        self.chunk_writer = None

    def start(self, status: int, headers: object) -> None:
        self.is_started = True

    def write(self, chunk: bytes) -> None:
        self.written.append(chunk)


def test_a_client_that_does_not_read_is_sent_no_signs() -> None:
    client = PausedClient()
    answer = ClientAnswer(client, "r", OPENAI)  # type: ignore[arg-type]
    answer.keep_alive()
    assert (client.written, client.is_started, answer.is_begun) == ([], False, False)
    client.is_paused = False
    answer.keep_alive()
    assert (client.written, client.is_started, answer.is_begun) == ([COMMENT], True, False)


FRAME = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PARTS = st.lists(st.sampled_from([COMMENT, FRAME, TEXT, b": x\r\n\r\n", b"retry: 3\n\n"]), max_size=90)


@given(parts=PARTS, cuts=st.lists(st.integers(0, 4000), max_size=8))
def test_signs_change_no_other_event(parts: list[bytes], cuts: list[int]) -> None:
    stream, out = b"".join([*parts, DONE]), bytearray()
    opened: list[str] = []
    relay = StreamRelay(
        OPENAI,
        open=lambda: opened.append("open"),
        begin=lambda: opened.append("begin"),
        write=out.extend,
        edit=lambda event: event.raw,
        edit_marks=(),
    )
    ends = sorted({min(cut, len(stream)) for cut in cuts} | {len(stream)})
    for begin, end in zip([0, *ends], ends, strict=False):
        if begin != end:
            relay.feed(stream[begin:end])
    relay.end()
    kept = [part for part in [*parts, DONE] if part.startswith(b"data")]
    assert [event.raw for event in EventDecoder().feed(bytes(out)) if event.data] == kept
    assert sorted(bytes(out)) == sorted(stream)
    assert opened.count("begin") == 1
    assert opened[-1] == "begin"


@pytest.mark.parametrize("style", [OPENAI, MESSAGES, RESPONSES])
def test_a_keepalive_is_no_content(style: Any) -> None:
    events = EventDecoder().feed(COMMENT + b"id: 7\n\n" + (PING if style is MESSAGES else b""))
    assert all(style.is_keepalive(event) and not style.has_content(event.data) for event in events)
    late = EventDecoder()
    late.feed(b"data: x\r\r")
    [end] = late.feed(b"\n")
    assert not style.is_keepalive(end)
    [other] = EventDecoder().feed(b'data: {"type":"message_start","text":"\\"ping\\""}\n\n')
    assert not style.is_keepalive(other)
