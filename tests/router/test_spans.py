"""Spans made of what was noted of a request, without a clock, a socket or a thread."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.openai.transfer_params import Part
from kvxfer.router import failure
from kvxfer.router.dialects import Pair, Prefilled
from kvxfer.router.record import RequestRecord
from kvxfer.router.spans import spans_of
from kvxfer.router.tracing import AttemptTrace, EndedRequest, Tracer
from tests.support.collector import attributes
from tests.support.router_bodies import COMPLETIONS, PAIR, TRACE, inbound

UNIX_S = 1_700_000_000.0
ARRIVED_S = 100.0


def begun(received: bytes | None = None, **more: Any) -> RequestRecord:
    tracer = Tracer(lambda ended: None, unix=lambda: UNIX_S, **more)
    record = RequestRecord("/v1/completions", "req-1", ARRIVED_S, model="m")
    record.trace = tracer.begin(received, ARRIVED_S)
    return record


def with_attempt(record: RequestRecord, pair: Pair = PAIR) -> AttemptTrace:
    assert record.trace is not None
    record.attempts += 1
    return record.trace.attempt(pair, "vllm-kvxfer", "remote")


def made(record: RequestRecord, outcome: str = "ok", status: int = 200) -> dict[str, dict[str, Any]]:
    assert record.trace is not None
    spans = spans_of(EndedRequest(record.trace, record, outcome, status, 50, ARRIVED_S + 2.0))
    assert len({span["spanId"] for span in spans}) == len(spans)
    assert len({span["traceId"] for span in spans}) == 1
    return {span["name"]: span for span in spans}


def times(span: dict[str, Any]) -> tuple[float, float]:
    """Seconds after the request's arrival."""
    begin, end = (round(int(span[name]) / 1e9 - UNIX_S, 3) for name in ("startTimeUnixNano", "endTimeUnixNano"))
    return begin, end


def test_the_clients_trace_is_joined() -> None:
    record = begun(TRACE.encode())
    with_attempt(record)
    root = made(record)["route"]
    assert (root["traceId"], root["parentSpanId"], root["kind"]) == ("a" * 32, "b" * 16, 2)
    assert root["flags"] & 0xFF == 1
    assert times(root) == (0.0, 2.0)


@pytest.mark.parametrize("received", [None, b"nonsense", b"\xff", b"00-" + b"0" * 32 + b"-" + b"1" * 16 + b"-01"])
def test_a_trace_begins_here_where_the_client_sent_none(received: bytes | None) -> None:
    root = made(begun(received))["route"]
    assert "parentSpanId" not in root
    assert int(root["traceId"], 16)
    assert len(root["traceId"]) == 32


def test_what_decides_whether_a_request_is_recorded() -> None:
    """The client, where it says something; else the share."""
    tracers = [Tracer(lambda ended: None, share=share, draw=lambda: 0.5) for share in (0.0, 0.5, 0.6, 1.0)]
    assert [tracer.begin(None, 0.0).is_sampled for tracer in tracers] == [False, False, True, True]
    for flags, is_sampled in (("00", False), ("01", True), ("02", False), ("03", True)):
        for tracer in tracers:
            trace = tracer.begin(f"{TRACE[:-2]}{flags}".encode(), 0.0)
            assert trace.is_sampled is is_sampled
            assert trace.traceparent().endswith(f"-{flags}")


def test_each_leg_names_its_own_span() -> None:
    record = begun(TRACE.encode())
    attempt = with_attempt(record)
    assert record.trace is not None
    request = inbound(COMPLETIONS)
    carried = [request.traced(record.trace.traceparent(name)) for name in (attempt.prefill_id, attempt.decode_id)]
    attempt.prefill_sent_s = attempt.decode_sent_s = ARRIVED_S
    attempt.heard(None, {}, {})
    attempt.end(ARRIVED_S + 1)
    spans = made(record)
    for leg, name in zip(carried, ("prefill", "decode"), strict=True):
        assert leg.traceparent == f"00-{'a' * 32}-{spans[name]['spanId']}-01"
        assert spans[name]["parentSpanId"] == spans["route"]["spanId"]
        assert spans[name]["kind"] == 3
        assert len(leg.leg_headers) == len(request.leg_headers)
    assert request.traceparent == TRACE


def test_steps_of_an_attempt_lie_where_they_were() -> None:
    record = begun()
    attempt = with_attempt(record)
    attempt.prefill_sent_s = attempt.decode_sent_s = ARRIVED_S + 0.1
    attempt.prefill_ended_s = ARRIVED_S + 1.0
    record.first_byte_s = ARRIVED_S + 1.2
    said = Prefilled(3, {"queue_s": 0.2, "prefill_s": 0.5})
    account = {"seconds": {"queue": 9.0, "plan": 0.01, "wire": 0.07, "confirm": 0.02}, "bytes_moved": 7, "lane": "unix"}
    attempt.heard(said, account, {"prompt_tokens": 4, "completion_tokens": 3})
    attempt.end(ARRIVED_S + 1.9)
    spans = made(record)
    assert set(spans) == {"route", "prefill", "queue", "decode", "transfer"}
    assert times(spans["prefill"]) == (0.1, 1.0)
    assert times(spans["queue"]) == (0.3, 0.5)
    assert times(spans["transfer"]) == (1.1, 1.2)
    assert times(spans["decode"]) == (0.1, 1.9)
    assert spans["queue"]["parentSpanId"] == spans["prefill"]["spanId"]
    assert spans["transfer"]["parentSpanId"] == spans["decode"]["spanId"]
    transfer, decode, root = (attributes(spans[name]) for name in ("transfer", "decode", "route"))
    assert transfer["kvxfer.transfer.is_upper_bound"] is False
    assert (transfer["kvxfer.transfer.bytes"], transfer["kvxfer.transfer.lane"]) == (7, "unix")
    assert (decode["server.address"], decode["server.port"], decode["kvxfer.agent_id"]) == ("10.0.0.2", 8000, "d")
    assert (root["gen_ai.operation.name"], root["gen_ai.request.model"]) == ("text_completion", "m")
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (4, 3)
    assert root["kvxfer.ttft_s"] == 1.2
    assert attributes(spans["prefill"])["kvxfer.prefill.cached_tokens"] == 3


def test_what_an_engine_wrote_makes_no_span_fail_and_nothing_grow() -> None:
    record = begun()
    attempt = with_attempt(record)
    attempt.prefill_sent_s = attempt.decode_sent_s = ARRIVED_S
    attempt.prefill_ended_s, record.first_byte_s = ARRIVED_S + 0.5, ARRIVED_S + 0.6
    record.code = failure.from_answer("decode", 500, b'{"error":{"message":"x","code":"%b"}}' % (b"c" * 9999)).code
    many = {str(number): "x" * 1000 for number in range(1000)}
    big = 10**400
    account = {"seconds": {"plan": big, "wire": [many], **many}, "bytes": big, "lane": "l" * 9999, "code": {}, **many}
    attempt.heard(Prefilled(big, {"queue_s": big, "prefill_s": float("inf"), **many}), account, {**many})
    attempt.end(ARRIVED_S + 1)
    assert len(repr((attempt.account, attempt.usage, attempt.prefilled, record.code))) < 3000
    assert {"route", "prefill", "decode", "transfer"} == set(made(record, "failed", 500))


def test_a_transfer_that_no_account_tells_of_is_bounded_by_what_is_known() -> None:
    record = begun()
    attempt = with_attempt(record)
    attempt.prefill_sent_s, attempt.prefill_ended_s = ARRIVED_S, ARRIVED_S + 0.5
    attempt.decode_sent_s = ARRIVED_S + 0.6
    record.first_byte_s = ARRIVED_S + 0.9
    attempt.heard(Prefilled(), {}, {})
    attempt.end(ARRIVED_S + 1.0)
    spans = made(record)
    assert times(spans["transfer"]) == (0.6, 0.9)
    assert attributes(spans["transfer"])["kvxfer.transfer.is_upper_bound"] is True
    assert "queue" not in spans


def test_nothing_was_transferred_where_d_computed_the_prompt() -> None:
    alone, recomputed = begun(), begun()
    attempt = with_attempt(alone, dataclasses.replace(PAIR, prefill=None))
    attempt.decode_sent_s, alone.first_byte_s = ARRIVED_S, ARRIVED_S + 0.2
    attempt.heard(None, {}, {})
    attempt.end(ARRIVED_S + 1)
    assert set(made(alone)) == {"route", "decode"}
    attempt = with_attempt(recomputed)
    attempt.prefill_sent_s = attempt.decode_sent_s = ARRIVED_S
    recomputed.first_byte_s = ARRIVED_S + 0.2
    attempt.heard(None, {"prefill": "local", "failure": "peer_gone"}, {})
    attempt.end(ARRIVED_S + 1)
    spans = made(recomputed)
    assert set(spans) == {"route", "prefill", "decode"}
    assert attributes(spans["decode"])["kvxfer.transfer.failure"] == "peer_gone"
    assert attributes(spans["prefill"])["kvxfer.cancelled"] is True


def test_errors_are_the_status_of_the_span_that_had_them() -> None:
    record = begun()
    first, second = with_attempt(record), with_attempt(record)
    first.decode_sent_s = first.prefill_sent_s = ARRIVED_S
    first.failed(Part.DECODE, failure.lost("decode"), ARRIVED_S + 0.3)
    first.failed(Part.DECODE, failure.gone("decode"), ARRIVED_S + 0.4)
    first.heard(None, {}, {})
    first.end(ARRIVED_S + 0.5)
    second.decode_sent_s = ARRIVED_S + 0.6
    second.heard(None, {}, {})
    second.end(ARRIVED_S + 1)
    assert record.trace is not None
    ended = EndedRequest(record.trace, record, "ok", 200, 1, ARRIVED_S + 1)
    spans = spans_of(ended)
    failed, well = (span for span in spans if span["name"] == "decode")
    assert failed["status"] == {"code": 2, "message": "lost"}
    assert attributes(failed)["error.type"] == "lost"
    assert times(failed) == (0.0, 0.3)
    assert "status" not in well
    assert "status" not in spans[0]
    assert [attributes(span)["kvxfer.attempt"] for span in (failed, well)] == [1, 2]


@pytest.mark.parametrize(("outcome", "is_error"), [("client_error", False), ("disconnected", False), ("failed", True)])
def test_the_clients_errors_are_not_the_servers(outcome: str, is_error: bool) -> None:
    record = begun()
    record.code = "peer_gone" if is_error else "invalid_argument"
    root = made(record, outcome, 502 if is_error else 400)["route"]
    assert root.get("status") == ({"code": 2, "message": "peer_gone"} if is_error else None)
    assert attributes(root)["kvxfer.code"] == record.code


@pytest.mark.parametrize(
    "account",
    [
        {"seconds": {"wire": "x", "plan": True}, "lane": {"a": 1}, "bytes_moved": -1, "prefill": 3},
        {"seconds": float("nan"), "wire_seconds": float("inf"), "lane": "l" * 9999, "failure": ["x"]},
        {"wire_seconds": 1e300, "bytes": 1 << 70},
    ],
)
def test_what_a_worker_says_is_not_believed(account: dict[str, Any]) -> None:
    record = begun()
    attempt = with_attempt(record)
    attempt.prefill_sent_s = attempt.decode_sent_s = ARRIVED_S
    attempt.prefill_ended_s, record.first_byte_s = ARRIVED_S + 0.1, ARRIVED_S + 0.5
    said = Prefilled(None, {"queue_s": -1, "prefill_s": [], "ended_unix_s": "x"})
    attempt.heard(said, account, {"prompt_tokens": "x", "completion_tokens": True})
    attempt.end(ARRIVED_S + 1)
    for span in made(record).values():
        begin, end = times(span)
        assert 0.0 <= begin <= end <= 2.0
        for value in attributes(span).values():
            assert value is not None
            assert len(str(value)) <= 256
