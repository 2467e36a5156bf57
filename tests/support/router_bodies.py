"""For pure tests of the router: a client's body as an Inbound, and pairs of workers that are nothing but values."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvxfer.router.apis import api_of
from kvxfer.router.dialects import Leg, Pair
from kvxfer.router.inbound import Inbound
from kvxfer.types import TransferId

TRACE = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
HEADERS = ((b"x-request-id", b"req-1"), (b"traceparent", TRACE.encode()))
TRANSFER_ID = TransferId(bytes(range(16)))

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, GENERATE = "/v1/messages", "/generate"
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "m", "prompt": "hi"},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    GENERATE: {"text": "hi"},
}
"""The least that each route takes."""


@dataclasses.dataclass(frozen=True)
class BareWorker:
    """A worker as a dialect sees it."""

    agent_id: str = "p"
    url: str = "http://10.0.0.1:8000"
    bootstrap_port: int | None = None
    dp_rank: int | None = None
    ranks: int = 1
    stages: str = ""


P = BareWorker()
D = BareWorker("d", "http://10.0.0.2:8000")
PAIR = Pair(P, D, TRANSFER_ID, attempt=2, room=1 << 40, timeout_s=30.0, prefill_engine_id="engine-1")


def inbound(path: str, body: bytes | None = None, **fields: Any) -> Inbound:
    """The least body of that route with ``fields``, or ``body``."""
    api = api_of(path)
    assert api is not None
    content = json.dumps({**LEAST[path], **fields}).encode() if body is None else body
    return Inbound.read(api, content, leg_headers=HEADERS, request_id="req-1", arrived_s=1.0)


def sent(leg: Leg) -> dict[str, Any]:
    """A leg's body as the engine reads it."""
    values = json.loads(leg.content())
    assert isinstance(values, dict)
    return values
