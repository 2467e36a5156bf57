"""What clients, the router, workers and engines tell each other."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Coroutine
from typing import Any

import httpx

from kvxfer.connectors.vllm import params as vllm_params
from kvxfer.connectors.vllm import wire
from kvxfer.engine import schemas as engine_schemas
from kvxfer.engine.unsupported import IgnoredFields
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.openai import schemas
from kvxfer.openai.errors import RequestError, error_body
from kvxfer.openai.sse import CONTENT_TYPE, DONE, EventDecoder, encode_event, encode_object
from kvxfer.openai.transfer_params import LEG_BYTES_MAX, PARAM, Part, TransferEnd, TransferParams, parse_transfer_params
from kvxfer.router import dialects, failure, headers, legs, merge
from kvxfer.router.auth import ApiKeys
from kvxfer.router.inbound import Inbound
from tests.fuzz.python_targets.samples import REF, TRANSFER, Target


def transfer_params(data: bytes) -> object:
    found = parse_transfer_params(schemas.load_object(data))
    assert parse_transfer_params(found.to_json()) == found
    return found


CHANGED = {PARAM, "max_tokens", "max_completion_tokens", "stream", "stream_options"}
CHANGED |= {"min_tokens", "prompt_logprobs", "return_token_ids"}
PARAMS = TransferParams(TRANSFER, 2, Part.DECODE, TransferEnd("p", 1, "a"), TransferEnd("d", 1, "b"))


def passed_on(path: str, parsed: schemas.AnyRequest, body: bytes, values: dict[str, Any]) -> object:
    """As the router reads a request, and writes it for engines of each dialect: no member changes that need not, and
    the body grows by no more than the router may add.
    """
    trace = {"traceparent": headers.next_traceparent(None)}
    inbound = Inbound(path, body, frozenset(values), parsed, trace, "id", 0.0)
    tokens, _ = inbound.prompt_tokens()
    assert tokens >= 0
    for dialect in sorted(dialects.DIALECTS):
        for params in (None, PARAMS, dataclasses.replace(PARAMS, role=Part.PREFILL)):
            content = inbound.content(dialect, params)
            assert len(content) <= len(body) + LEG_BYTES_MAX
            passed = json.loads(content)
            assert all(name not in values or values[name] == passed[name] for name in passed.keys() - CHANGED)
            assert values.keys() - passed.keys() <= CHANGED
    return parsed


def completion(data: bytes) -> object:
    values = schemas.load_object(data)
    passed_on("/v1/completions", schemas.parse_completion(values), data, values)
    parsed = engine_schemas.parse_completion(values)
    if parsed.kv_transfer_params is not None:
        parse_transfer_params(parsed.kv_transfer_params)
    return IgnoredFields().note(parsed.model_extra or {})


def chat(data: bytes) -> object:
    values = schemas.load_object(data)
    passed_on("/v1/chat/completions", schemas.parse_chat(values), data, values)
    parsed = engine_schemas.parse_chat(values)
    assert [message.model_dump() for message in parsed.messages]
    return IgnoredFields().note(parsed.model_extra or {})


KEYS = ApiKeys(("secret-key",))


def request_headers(data: bytes) -> object:
    """Those that the router looks at, one a line."""
    lines = [*data.decode("latin-1").split("\n"), "", "", "", ""]
    received = dict(zip(("traceparent", "tracestate", "authorization", headers.REQUEST_ID), lines, strict=False))
    KEYS.check(received["authorization"])
    request_id = headers.request_id(received[headers.REQUEST_ID])
    passed = headers.leg_headers(received, request_id=request_id, forwards_authorization=True)
    httpx.Request("POST", "http://127.0.0.1:1", headers=passed)
    return passed


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """What comes of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits")


LEG = legs.Leg("decode", "http://127.0.0.1:1/v1/completions", {}, b"{}")
STATUSES_OF_A_WORKER = (200, 200, 200, 400, 404, 429, 500, 503, 302, 599)


def answering(data: bytes, kind: str) -> httpx.AsyncClient:
    """What a worker answers: the first byte chooses the status, and the body comes in two pieces."""
    status, body = STATUSES_OF_A_WORKER[(data or b"\0")[0] % len(STATUSES_OF_A_WORKER)], data[1:]

    async def pieces() -> Any:
        yield body[: len(body) // 2]
        yield body[len(body) // 2 :]

    answer = httpx.MockTransport(lambda _: httpx.Response(status, headers={"content-type": kind}, content=pieces()))
    return httpx.AsyncClient(transport=answer)


def was_added_to(values: Any) -> bool:
    """Whether the router wrote into the account, or into the usage no more cached tokens than the prompt has."""
    account, usage = values.get("kvxfer"), values.get("usage")
    if isinstance(account, dict) and account.get("attempt") == 2:
        return True
    return bool(0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"])


def worker_answer(data: bytes) -> object:
    """The answer of a prefill worker, then the same of a decode worker without a stream."""
    prefilled = finished(legs.prefill(answering(data, "application/json"), LEG))
    leg = legs.DecodeLeg(answering(data, "application/json"), LEG, streams=False, answer_bytes_max=1 << 20)
    answered = finished(leg.begin())
    if isinstance(prefilled, failure.Failure):
        assert isinstance(answered, failure.Failure)
        assert encode_object(answered.body)
        return prefilled
    extra = {"attempt": 2, **prefilled.account()}
    for dialect in sorted(dialects.DIALECTS):
        merged = merge.Merger(dialect, has_source=True).body(answered.content, extra, prefilled)
        assert merged == answered.content or was_added_to(json.loads(merged))
    return prefilled


def worker_stream(data: bytes) -> object:
    """The client gets whole events: the worker's own bytes, or JSON."""
    leg = legs.DecodeLeg(answering(data, CONTENT_TYPE), LEG, streams=True, answer_bytes_max=1 << 20)

    async def follow() -> Any:
        failed = await leg.begin()
        return [failed] if failed is not None else [item async for item in leg.events()]

    items = finished(follow())
    for item in items:
        if isinstance(item, failure.Failure):
            assert encode_event(item.body)
            continue
        for event in item:
            for dialect in sorted(dialects.DIALECTS):
                merger = merge.Merger(dialect, has_source=True)
                passed = merger.event(event, {"attempt": 2}, legs.Prefilled({"usage": {"cached_tokens": 7}}))
                assert passed == event.raw or was_added_to(EventDecoder().feed(passed)[0].json())
    return items


def vllm_notification(data: bytes) -> object:
    found = wire.decode(data)
    assert wire.decode(wire.encode(found)) == found
    return found


def vllm_transfer_params(data: bytes) -> object:
    """vLLM reads the JSON, in another process, where the stack has more room than here."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 100)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        values = None
    finally:
        sys.setrecursionlimit(limit)
    if not isinstance(values, dict):
        raise InvalidArgumentError("vLLM takes no such body")
    vllm_params.trace_of(None, values)
    return vllm_params.parse(values)


CHUNK = {"choices": [{"text": "a", "delta": {"content": "b"}, "finish_reason": None}], "kvxfer": {"lane": "cma"}}
TIMED = {"timings": {"queue_s": 0.1, "prefill_s": 1, "ended_unix_s": 2.5}, "usage": {"prompt_tokens": 3}, **CHUNK}
SAMPLING = {"max_tokens": 3, "temperature": 0.5, "top_p": 1, "n": 1, "stop": ["a"], "seed": -1, "user": "u"}
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": 0, "kv_transfer_params": None}
TEXT = {"model": "m", "prompt": "hi", "ignore_eos": False, "echo": False, "best_of": 1, "suffix": "", **SAMPLING}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SAID = [{"role": "user", "content": PARTS}, {"role": "assistant", "content": None}, {"role": "user", "content": "c"}]
CHAT = {"model": "m", "messages": SAID, "max_completion_tokens": 4, "tools": [], "response_format": {"type": "text"}}
TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
HANDED_OVER = vllm_params.handed_over(TRANSFER, ("p", "p.1"), "r", 9, TRACE, (REF.incarnation,) * 2, ("metadata",) * 2)
VLLM_PARAMS = [
    HANDED_OVER,
    {"do_remote_prefill": True, **PARAMS.to_json()},
    {"do_remote_decode": True, **PARAMS.to_json()},
    {"do_remote_decode": True, "transfer_id": None},
]
NOTIFICATIONS = [
    wire.Ask(TRANSFER, 1, 0, 2, 3, True),
    wire.PartReady(TRANSFER, 1, 2, 3, 4),
    wire.Refuse(TRANSFER, 1, "busy", "why"),
    wire.Keep((TRANSFER, TRANSFER)),
    wire.Release(TRANSFER, 0, 1),
    wire.Await((TRANSFER, TRANSFER)),
    wire.Queued((TRANSFER, TRANSFER), (3, 0), 250, True),
    wire.Begun(TRANSFER, "grant_unknown", "why"),
]
BUSY = encode_object(error_body("busy", code="overloaded", retryable=True))

TARGETS = {
    "transfer_params": Target(transfer_params, [encode_object(PARAMS.to_json())], (RequestError,)),
    "completion": Target(
        completion,
        [
            encode_object(TEXT),
            encode_object({"model": "m", "prompt": [1, 2], **STREAM}),
            encode_object({"model": "m", "prompt": "a", "kv_transfer_params": PARAMS.to_json()}),
        ],
        (RequestError,),
    ),
    "chat": Target(chat, [encode_object(CHAT), encode_object({**CHAT, **SAMPLING, **STREAM})], (RequestError,)),
    "request_headers": Target(
        request_headers, [f"{TRACE}\na=b\nBearer secret-key\nid".encode(), b"\n\nBearer secret-key"], (RequestError,)
    ),
    "worker_answer": Target(worker_answer, [b"\0" + encode_object(TIMED), b"\0" + encode_object(CHUNK), b"\7" + BUSY]),
    "worker_stream": Target(
        worker_stream,
        [b"\0: kept alive\n\n" + encode_event(CHUNK) * 2 + DONE, b"\0data: " + BUSY + b"\n\n", b"\7" + BUSY],
    ),
    "vllm_notification": Target(vllm_notification, [wire.encode(one) for one in NOTIFICATIONS], (ProtocolError,)),
    "vllm_transfer_params": Target(
        vllm_transfer_params, [encode_object(values) for values in VLLM_PARAMS], (InvalidArgumentError,)
    ),
}
