"""The account that a client asks for: in every API's stream and head, of requests that went well and of those that
failed, and nothing of it where no one asks."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.openai.transfer_params import Part
from kvxfer.router import failure
from kvxfer.router.account import BYTES_MAX, COMMENT, RequestAccount
from kvxfer.router.apis import StreamStyle
from kvxfer.router.apis.messages_style import MESSAGES
from kvxfer.router.apis.openai_style import OPENAI
from kvxfer.router.apis.responses_style import RESPONSES
from kvxfer.router.dialects import Prefilled
from kvxfer.router.record import RequestRecord
from kvxfer.router.stream_relay import StreamRelay
from kvxfer.router.tracing import RequestTrace
from kvxfer.types import Role
from tests.support.collector import collecting
from tests.support.fake_workers import FakeWorker, Running, eventually, failing, router_over
from tests.support.one_process import MODEL, OneProcess, one_process, request
from tests.support.router_bodies import PAIR, TRACE

ASKS = {"x-kvxfer-account": "1"}
STEPS = ("placed_s", "decode_sent_s", "first_s", "ended_s")


def in_stream(text: str) -> dict[str, Any]:
    """The account of a stream, which has one, before its last event."""
    parts = text.removesuffix("\n\n").split("\n\n")
    told = [number for number, part in enumerate(parts) if part.startswith(": ")]
    assert len(told) == 1, parts
    assert parts[told[0]].startswith(COMMENT.decode())
    assert "\n" not in parts[told[0]]
    made: dict[str, Any] = json.loads(parts[told[0]].removeprefix(COMMENT.decode()))
    return made


def in_head(fields: Any) -> dict[str, Any]:
    line = fields["x-kvxfer-account"]
    assert line.isascii()
    assert line.isprintable()
    assert len(line) <= BYTES_MAX
    made: dict[str, Any] = json.loads(line)
    return made


def times(account: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in account.items() if name.endswith("_s")}


def pair() -> tuple[FakeWorker, FakeWorker]:
    prefiller, decoder = FakeWorker("p", Role.PREFILL), FakeWorker("d")
    decoder.needs_prefill = True
    decoder.account = {"bytes_moved": 7, "lane": "unix", "prefill": "remote", "seconds": {"plan": 0.1, "wire": 0.2}}
    return prefiller, decoder


async def test_a_stream_tells_it_before_its_last_event() -> None:
    async with router_over(*pair()) as running:
        answer = await running.complete(stream=True, headers={**ASKS, "x-request-id": "mine"})
    assert "x-kvxfer-account" not in answer.headers
    assert answer.text.endswith("}\n\ndata: [DONE]\n\n")
    assert answer.text.split("\n\n")[-3].startswith(COMMENT.decode())
    account = in_stream(answer.text)
    assert account["request_id"] == "mine"
    assert (account["prefill_agent"], account["decode_agent"], account["attempts"]) == ("p", "d", 1)
    assert (account["reason"], account["dialect"]) == ("remote", "kvxfer")
    assert account["prefill"] == {"queue_s": 0.0, "prefill_s": 0.25, "cached_tokens": 0}
    assert account["decode"]["seconds"] == {"plan": 0.1, "wire": 0.2}
    assert (account["decode"]["lane"], account["decode"]["bytes_moved"]) == ("unix", 7)
    at = times(account)
    order = [at[name] for name in ("placed_s", "prefill_sent_s", "prefill_ended_s", "first_s", "ended_s")]
    assert order == sorted(order)
    assert 0 <= at["placed_s"] <= at["decode_sent_s"] <= at["first_s"]


async def test_a_whole_answer_tells_it_in_its_head() -> None:
    async with router_over(*pair()) as running:
        answer = await running.complete(headers=ASKS)
        account = in_head(answer.headers)
        assert "first_s" not in account
        assert account["decode"]["prefill"] == "remote"
        assert account["ended_s"] >= account["prefill_ended_s"] >= account["prefill_sent_s"]
        page = await running.complete(headers={**ASKS, "x-kvxfer-account": "yes"})
        assert "x-kvxfer-account" not in page.headers


async def test_who_does_not_ask_gets_the_bytes_of_before() -> None:
    async with router_over(*pair()) as running:
        streamed, whole = await running.complete(stream=True), await running.complete()
        assert COMMENT.decode() not in streamed.text
        assert "x-kvxfer-account" not in {**streamed.headers, **whole.headers}
    async with router_over(*pair(), accounts=False) as running:
        off = await running.complete(stream=True, headers=ASKS)
        assert COMMENT.decode() not in off.text
        assert "x-kvxfer-account" not in (await running.complete(headers=ASKS)).headers


async def test_no_leg_carries_another_trace_for_it() -> None:
    prefiller, decoder = pair()
    async with router_over(prefiller, decoder) as running:
        await running.complete(headers={**ASKS, "traceparent": TRACE})
    for fake in (prefiller, decoder):
        assert fake.received[0].headers["traceparent"] == TRACE
        assert "x-kvxfer-account" not in fake.received[0].headers


async def test_a_request_that_is_traced_too_is_exported_once_and_one_that_is_not_is_not() -> None:
    with collecting() as collector:
        async with router_over(*pair(), otlp_endpoint=collector.url, otlp_share=0.0) as running:
            assert in_head((await running.complete(headers=ASKS)).headers)["attempts"] == 1
            traced = await running.complete(stream=True, headers={**ASKS, "traceparent": TRACE})
            assert in_stream(traced.text)["attempts"] == 1
            await eventually(lambda: len(collector.spans) >= 5)
        assert {span["traceId"] for span in collector.spans} == {"a" * 32}
        assert len(collector.spans) == 5


async def test_the_log_line_has_it_where_the_client_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvxfer.router.request"):
        async with router_over(*pair()) as running:
            told = in_stream((await running.complete(stream=True, headers=ASKS)).text)
            await running.complete(stream=True)
            await running.wait_metric('kvxfer_router_requests_total{outcome="ok",route="/v1/completions"}', 2)
    asked, other = (vars(record) for record in caplog.records if record.getMessage() == "request")
    assert "account" not in other
    assert asked["account"]["request_id"] == told["request_id"]
    assert asked["account"]["ended_s"] >= told["ended_s"]
    assert {**asked["account"], "ended_s": 0} == {**told, "ended_s": 0}


async def test_a_retry_is_counted_and_the_last_attempt_told() -> None:
    one, two = FakeWorker("d1", Role.BOTH), FakeWorker("d2", Role.BOTH)
    for fake in (one, two):
        fake.failures = [failing(500, "internal", retryable=True)]
    async with router_over(one, two, min_remote_prefill_tokens=100) as running:
        answer = await running.complete(headers=ASKS)
    account = in_head(answer.headers)
    assert account["attempts"] == int(answer.headers["x-kvxfer-attempt"]) > 1
    assert account["prefill_agent"] is None
    assert account["placed_s"] > 0


async def failed(running: Running, **more: Any) -> dict[str, Any]:
    answer = await running.complete(headers=ASKS, **more)
    assert answer.status_code >= 400
    return in_head(answer.headers)


async def test_errors_tell_it_in_their_head() -> None:
    prefiller, decoder = pair()
    decoder.needs_prefill = False
    async with router_over(prefiller, decoder) as running:
        assert (await failed(running, model="none"))["attempts"] == 0
        assert (await failed(running, stream="x"))["ended_s"] >= 0
        decoder.always_fails = failing(500, "internal", retryable=False)
        account = await failed(running, stream=True)
        assert (account["decode_agent"], account["code"]) == ("d", "internal")
        assert account["decode_failure"]
        running.publish()
        assert (await failed(running))["code"]


async def test_a_stream_that_breaks_tells_it_and_ends_as_it_must() -> None:
    prefiller, decoder = pair()
    decoder.cut_after = 2
    async with router_over(prefiller, decoder) as running:
        text = (await running.complete(stream=True, headers=ASKS)).text
    account = in_stream(text)
    assert account["decode_failure"] == "lost"
    parts = text.split("\n\n")
    assert parts[-2] == "data: [DONE]"
    assert "error" in json.loads(parts[-3].removeprefix("data: "))


async def test_a_deadline_that_passes_tells_it_too() -> None:
    prefiller, decoder = pair()
    decoder.hold = asyncio.Event()
    async with router_over(prefiller, decoder, request_timeout_s=0.2) as running:
        answer = await running.complete(headers=ASKS)
        assert (answer.status_code, in_head(answer.headers)["decode_agent"]) == (504, "d")


async def test_a_stream_that_the_router_ends_as_it_stops_tells_it_too() -> None:
    prefiller, decoder = pair()
    decoder.tokens, decoder.delay_s = [" x"] * 2000, 0.02
    body = {"model": "tiny", "prompt": "hello", "stream": True}
    async with (
        router_over(prefiller, decoder) as running,
        running.client.stream("POST", "/v1/completions", json=body, headers=ASKS) as answer,
    ):
        pieces = answer.aiter_text()
        text = await anext(pieces)
        running.stop.set()
        text += "".join([piece async for piece in pieces])
    account = in_stream(text)
    assert account["first_s"] < account["ended_s"]
    assert text.endswith("data: [DONE]\n\n")


async def test_the_end_waits_for_the_words_of_p_that_came_late() -> None:
    prefiller, decoder = pair()
    decoder.needs_prefill = False
    decoder.account = {}
    prefiller.hold = asyncio.Event()
    async with router_over(prefiller, decoder) as running:
        asked = asyncio.create_task(running.complete(stream=True, headers=ASKS))
        await eventually(lambda: any(leg.answered for leg in decoder.received))
        prefiller.hold.set()
        account = in_stream((await asked).text)
    assert account["prefill"]["prefill_s"] == 0.25
    assert account["prefill_ended_s"] > account["first_s"]


async def test_what_passes_through_is_passed_as_it_is() -> None:
    fake = FakeWorker("d", Role.BOTH)
    async with router_over(fake, pass_through=("/v1/x=decode",)) as running:
        answer = await running.client.post("/v1/x", json={"model": "tiny", "stream": True}, headers=ASKS)
        assert answer.status_code == 200
        assert COMMENT.decode() not in answer.text


async def test_a_stream_without_an_end_of_its_own() -> None:
    prefiller, decoder = pair()
    decoder.first_event = {"error": {"message": "no", "code": "internal", "type": "server_error"}}
    async with router_over(prefiller, decoder, attempts_max=1) as running:
        answer = await running.complete(stream=True, headers=ASKS)
        assert in_head(answer.headers)["decode_failure"]


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    "/v1/responses": {"input": "hello", "max_output_tokens": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 5}},
}
LAST = {"/v1/responses": "event: response.incomplete", "/v1/messages": "event: message_stop"}


def ask(there: OneProcess, path: str, *, stream: bool, account: bool = True) -> Any:
    body = json.dumps({"model": MODEL, "stream": stream, **BODIES[path]}).encode()
    more = [b"content-type: application/json", *([b"x-kvxfer-account: 1"] if account else [])]
    answer = there.send(request("POST", path.encode(), body, *more))
    assert answer.status == 200, answer.body
    return answer


def dechunked(body: bytes) -> str:
    made = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        made, body = made + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return made.decode()


@pytest.mark.parametrize(
    ("dialect", "kind", "roles"),
    [
        ("kvxfer", "kvxfer", ("prefill", "decode")),
        ("vllm", "vllm", ("prefill", "decode")),
        ("sglang", "sglang", ("prefill", "decode")),
        ("vllm", "any", ("both",)),
    ],
)
def test_every_api_of_every_dialect(dialect: str, kind: str, roles: tuple[str, ...]) -> None:
    with one_process(*roles, kind=kind, dialect=dialect) as there:
        for path in BODIES:
            if path == "/generate" and kind in ("kvxfer", "vllm"):
                continue
            if kind == "kvxfer" and path not in ("/v1/completions", "/v1/chat/completions"):
                continue
            text = dechunked(ask(there, path, stream=True).body)
            account = in_stream(text)
            assert text.rstrip().split("\n\n")[-1].startswith(LAST.get(path, "data: [DONE]"))
            assert text.rstrip().split("\n\n")[-2].startswith(COMMENT.decode())
            whole = in_head(ask(there, path, stream=False).headers)
            for told, is_stream in ((account, True), (whole, False)):
                assert ("first_s" in told) is is_stream
                assert told["decode_agent"]
                assert told["ended_s"] >= told["decode_sent_s"] >= told["placed_s"] >= 0
                if roles != ("both",):
                    assert told["prefill_agent"]
                    assert told["prefill_ended_s"] >= told["prefill_sent_s"]
                    assert ("prefill" in told) is True


STREAMS: dict[str, tuple[StreamStyle, list[bytes]]] = {
    "openai": (OPENAI, [b'data: {"choices":[{"text":"a"}]}\n\n', b"data: [DONE]\n\n"]),
    "crlf": (OPENAI, [b'data: {"choices":[{"text":"[DONE]"}]}\r\n\r\n', b": ping\n\n", b"data: [DONE]\r\n\r\n"]),
    "responses": (
        RESPONSES,
        [
            b'data: {"type":"response.output_text.delta"}\n\n',
            b'data: {"type":"response.completed"}\n\n',
            b"data: [DONE]\n\n",
        ],
    ),
    "messages": (
        MESSAGES,
        [
            b'event: x\ndata: {"type":"content_block_delta"}\n\n',
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        ],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
@given(cuts=st.lists(st.integers(0, 200), max_size=8), late=st.booleans())
def test_it_stands_before_the_end_however_the_stream_was_cut(name: str, cuts: list[int], late: bool) -> None:
    """``late``: P is waited for, and the end with it."""
    style, events = STREAMS[name]
    content, passed = b"".join(events), bytearray()
    told = iter([None, b": told\n\n"] if late else [b": told\n\n"])
    relay = StreamRelay(
        style,
        begin=lambda: None,
        write=passed.extend,
        edit=lambda event: event.raw,
        edit_marks=(),
        before_end=lambda: next(told),
    )
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    for begin, end in itertools.pairwise(edges):
        relay.feed(content[begin:end])
    if late:
        assert relay.is_waiting
        assert b"told" not in passed
        relay.go_on(at_last=True)
    relay.end()
    last = 1 + (name == "crlf")
    assert passed == b"".join([*events[:last], b": told\n\n", *events[last:]])
    assert relay.bytes_passed == len(passed)


def made(record: RequestRecord, trace: RequestTrace) -> RequestAccount:
    return RequestAccount(record, trace, lambda: 12.0)


def test_what_an_engine_wrote_makes_it_neither_long_nor_wrong() -> None:
    record, trace = RequestRecord("/v1/completions", "r" * 128, 10.0), RequestTrace.for_account(10.0)
    attempt = trace.attempt(PAIR, "kvxfer", "remote", 10.5)
    big, text = 10**400, "\x00\r\né" * 5000
    said: dict[str, Any] = {"queue_s": big, "prefill_s": float("nan"), "lane": text, "code": text, "failure": text}
    account = {**said, "seconds": {"plan": big, "wire": -1.0, "confirm": float("inf"), "queue": True}, "prefill": text}
    attempt.heard(Prefilled(big, {**said, "queue_s": 0.5}), account, {})
    attempt.failed(Part.DECODE, failure.lost("decode"), 11.0)
    record.code = text
    line = made(record, trace).header()
    assert len(line) <= BYTES_MAX
    assert line.isascii()
    assert all(32 <= byte < 127 for byte in line)
    told = json.loads(line)
    assert (told["placed_s"], told["ended_s"]) == (0.5, 2.0)
    assert told.get("prefill", {"queue_s": 0.5}) == {"queue_s": 0.5}
    assert told.get("decode", {}).get("seconds", {}) == {}


def test_a_prefill_that_was_handed_on_is_that_of_the_attempt_before() -> None:
    record, trace = RequestRecord("/v1/completions", "r", 10.0), RequestTrace.for_account(10.0)
    first = trace.attempt(PAIR, "vllm", "remote", 10.1)
    first.prefill_sent_s, first.prefill_ended_s, first.decode_sent_s = 10.2, 10.5, 10.6
    second = trace.attempt(PAIR, "vllm", "remote", 11.0)
    second.was_handed_over, second.decode_sent_s = True, 11.1
    assert times(made(record, trace).values()) == {
        "placed_s": 1.0,
        "prefill_sent_s": 0.2,
        "prefill_ended_s": 0.5,
        "decode_sent_s": 1.1,
        "ended_s": 2.0,
    }


def test_a_stream_tells_it_once() -> None:
    account = made(RequestRecord("/v1/completions", "r", 10.0), RequestTrace.for_account(10.0))
    assert account.comment().startswith(COMMENT)
    assert account.comment() == b""


async def test_pages_may_read_it() -> None:
    async with router_over(*pair(), cors_origin=("*",)) as running:
        answer = await running.complete(headers={**ASKS, "origin": "https://app.example.com"})
        assert "x-kvxfer-account" in answer.headers["access-control-expose-headers"]
