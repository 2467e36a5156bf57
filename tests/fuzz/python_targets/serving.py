"""What clients, the router, workers and engines tell each other."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from kvxfer.connectors.vllm import params as vllm_params
from kvxfer.connectors.vllm import wire
from kvxfer.engine import schemas as engine_schemas
from kvxfer.engine.unsupported import IgnoredFields
from kvxfer.errors import InvalidArgumentError, ProtocolError
from kvxfer.openai import schemas
from kvxfer.openai.errors import RequestError, error_body
from kvxfer.openai.sse import DONE, EventDecoder, encode_event, encode_object
from kvxfer.openai.transfer_params import LEG_BYTES_MAX, Part, TransferEnd, TransferParams, parse_transfer_params
from kvxfer.router import dialects, failure, headers, legs, merge
from kvxfer.router.apis import api_of
from kvxfer.router.apis.api import Api
from kvxfer.router.apis.routes import CHAT as CHAT_COMPLETIONS
from kvxfer.router.apis.routes import COMPLETIONS, GENERATE_API, MESSAGES_API, RESPONSES_API
from kvxfer.router.auth import ApiKeys
from kvxfer.router.dialects import HandoverError, Prefilled, vllm_prefill
from kvxfer.router.inbound import Inbound
from kvxfer.router.stream_relay import StreamRelay
from kvxfer.router.upstream.head import encode_head
from tests.fuzz.python_targets.samples import REF, TRANSFER, Target
from tests.support.router_bodies import PAIR, D


def transfer_params(data: bytes) -> object:
    found = parse_transfer_params(schemas.load_object(data))
    assert parse_transfer_params(found.to_json()) == found
    return found


CHANGED = {"max_tokens", "max_completion_tokens", "stream", "ignore_eos", "stop_token_ids", "vllm_xargs"}
CHANGED |= {*dialects.CLIENT_FIELDS, *vllm_prefill.DROPPED}
PARAMS = TransferParams(TRANSFER, 2, Part.DECODE, TransferEnd("p", 1, "a"), TransferEnd("d", 1, "b"))
HANDED = dialects.Handover(b'{"remote_request_id":"r"}')


def passed_on(path: str, body: bytes) -> object:
    """As the router reads a request, and writes it for engines of each dialect: no member changes that need not, and
    the body grows by no more than the router may add.
    """
    api = api_of(path)
    assert api is not None
    inbound = Inbound.read(api, body, leg_headers=((b"traceparent", headers.next_traceparent(None).encode()),))
    values = json.loads(body)
    tokens, _ = inbound.prompt_tokens()
    assert tokens >= 0
    for name in sorted(dialects.DIALECTS):
        spoken = dialects.dialect(name)
        legs_made = [spoken.alone_leg(inbound, D), spoken.decode_leg(inbound, PAIR, HANDED)]
        if spoken.order is not dialects.Order.ALONE:
            legs_made.append(spoken.prefill_leg(inbound, PAIR))
        for leg in legs_made:
            content = leg.content()
            assert len(content) <= len(body) + LEG_BYTES_MAX
            passed = json.loads(content)
            assert all(field not in values or values[field] == passed[field] for field in passed.keys() - CHANGED)
            assert values.keys() - passed.keys() <= CHANGED
    return inbound


def completion(data: bytes) -> object:
    passed_on("/v1/completions", data)
    parsed = engine_schemas.parse_completion(schemas.load_object(data))
    if parsed.kv_transfer_params is not None:
        parse_transfer_params(parsed.kv_transfer_params)
    return IgnoredFields().note(parsed.model_extra or {})


def chat(data: bytes) -> object:
    passed_on("/v1/chat/completions", data)
    parsed = engine_schemas.parse_chat(schemas.load_object(data))
    assert [message.model_dump() for message in parsed.messages]
    return IgnoredFields().note(parsed.model_extra or {})


KEYS = ApiKeys(("secret-key",))


def request_headers(data: bytes) -> object:
    """Those that the router looks at, one a line."""
    lines = [*data.decode("latin-1").split("\n"), "", "", "", "", ""]
    names = ("traceparent", "tracestate", "authorization", headers.REQUEST_ID, "x-kept")
    received = dict(zip(names, lines, strict=False))
    KEYS.check(received["authorization"])
    request_id = headers.request_id(received[headers.REQUEST_ID])
    passed = headers.leg_header_pairs(
        [(name.encode(), value.encode("latin-1")) for name, value in received.items()],
        request_id=request_id,
        forwards_authorization=True,
        passed=headers.check_passed(["X-Kept"]),
    )
    assert encode_head("POST", "/v1/completions", b"h", passed, 2).count(b"\r\n\r\n") == 1
    return passed


STATUSES_OF_A_WORKER = (200, 200, 200, 400, 404, 429, 500, 503, 302, 599)


def answered(data: bytes) -> tuple[int, bytes]:
    """What a worker answers: the first byte chooses the status."""
    return STATUSES_OF_A_WORKER[(data or b"\0")[0] % len(STATUSES_OF_A_WORKER)], data[1:]


def was_added_to(values: Any) -> bool:
    """Whether the router wrote into the account, or into the usage no more cached tokens than the prompt has."""
    account, usage = values.get("kvxfer"), values.get("usage")
    if isinstance(account, dict) and account.get("attempt") == 2:
        return True
    return bool(0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"])


def worker_answer(data: bytes) -> object:
    """The answer of a prefill worker, and the same of a decode worker without a stream."""
    status, content = answered(data)
    if status != 200:
        failed = failure.from_answer("decode", status, content)
        assert encode_object(failed.body)
        return failed
    for name in sorted(dialects.DIALECTS):
        spoken = dialects.dialect(name)
        with contextlib.suppress(HandoverError):
            spoken.handover(content)
        prefilled = spoken.prefilled(content)
        if legs.is_object(content):
            merged = merge.Merger(name, has_source=True).body(content, {"attempt": 2, **prefilled.account()}, prefilled)
            assert merged == content or was_added_to(json.loads(merged))
    return content


def worker_stream(data: bytes) -> object:
    """The client gets whole events: the worker's own bytes, or JSON."""
    _, content = answered(data)
    for api in (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES_API, MESSAGES_API, GENERATE_API):
        for name in ("kvxfer", "vllm"):
            _relayed(api, name, content)
    return content


def _relayed(api: Api, name: str, content: bytes) -> None:
    merger = merge.Merger(name, has_source=True)
    written: list[bytes] = []
    relay = StreamRelay(
        api.style,
        begin=lambda: written.append(b""),
        write=written.append,
        edit=lambda event: merger.event(event, {"attempt": 2}, Prefilled(cached_tokens=7)),
        edit_marks=merge.MARKS,
    )
    half = len(content) // 2
    failed: failure.Failure | None = None
    try:
        for piece in (content[:half], content[half:]):
            relay.feed(piece)
        relay.end()
    except failure.LegFailed as error:
        failed = error.failure
    if failed is not None:
        assert encode_object(failed.body)
        if relay.has_begun:
            written.append(api.style.end_with_error(failed.body))
    decoder = EventDecoder()
    decoder.feed(b"".join(written))
    assert not decoder.has_partial_event


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
    wire.Ask(TRANSFER, 1, 0, 2, 3, 0, 32, True),
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
