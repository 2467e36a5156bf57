"""What a worker's error answer or error event says, in the forms in which engines write it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.router.failure import FailureKind, from_answer, from_event

FLAT = {
    "object": "error",
    "message": "temperature must be 0 or more",
    "type": "BadRequestError",
    "param": "temperature",
}
LONG = "The input (9000 tokens) is longer than the model's context length (8192 tokens)."
MANY = "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 9000"


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": {**FLAT, "code": 400}}, FailureKind.REFUSED, FLAT["message"]),
        (400, {**FLAT, "code": 400}, FailureKind.REFUSED, FLAT["message"]),
        (400, {**FLAT, "code": 400, "message": LONG}, FailureKind.DOES_NOT_FIT, LONG),
        (400, {"error": {"message": MANY, "code": 400}}, FailureKind.DOES_NOT_FIT, MANY),
        (400, {**FLAT, "code": 400, "message": f"text: {LONG}"}, FailureKind.REFUSED, f"text: {LONG}"),
        (503, {"detail": "the queue is full"}, FailureKind.OVERLOADED, "the queue is full"),
        (503, {**FLAT, "code": 503, "message": "busy"}, FailureKind.OVERLOADED, "busy"),
        (503, {"error": {"message": "stops", "code": "closed", "retryable": False}}, FailureKind.ERROR, "stops"),
        (404, {"detail": "Not Found"}, FailureKind.REFUSED, "Not Found"),
        (422, {"detail": [{"msg": "x"}]}, FailureKind.REFUSED, "the decode worker refused the request (422)"),
        (429, {"detail": "slow down"}, FailureKind.OVERLOADED, "slow down"),
        (503, None, FailureKind.OVERLOADED, "the decode worker takes no more requests"),
        (500, {"object": "error"}, FailureKind.ERROR, "the decode worker answered 500"),
    ],
)
def test_an_error_answer_keeps_its_message(status: int, body: Any, kind: FailureKind, message: str) -> None:
    failed = from_answer("decode", status, json.dumps(body).encode())
    assert (failed.kind, failed.body["error"]["message"]) == (kind, message)
    assert set(failed.body["error"]) >= {"message", "type", "param", "code", "retryable"}


def test_a_refusal_without_a_type_is_the_clients() -> None:
    refused = from_answer("decode", 404, b'{"detail": "Not Found"}').body["error"]
    assert (refused["type"], refused["code"], refused["retryable"]) == ("invalid_request_error", "refused", False)
    busy = from_answer("decode", 429, b'{"detail": "slow down"}')
    assert (busy.status, busy.body["error"]["type"]) == (503, "server_error")


def test_a_chunk_that_quotes_an_error_is_none() -> None:
    for data in (b'{"choices":[{"delta":{"content":"\\"error\\""}}]}', b'{"error":null,"choices":[]}', b'"error"'):
        assert from_event("decode", data) is None
