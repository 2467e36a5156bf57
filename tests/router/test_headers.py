"""Which headers of a client a worker gets, in the bytes of the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ConfigError
from kvxfer.router.headers import check_passed, leg_header_pairs
from kvxfer.router.options import RouterOptions
from kvxfer.router.upstream.head import encode_head

TRACE = b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-00"
ROUTING = [
    *("x-data-parallel-rank", "X-Data-Parallel-Rank", "x-dp-rank", "x-prefill-dp-rank", "x-prefiller-host-port"),
    *("x-override-bootstrap-host", "x-dynamo-worker-instance-id", "x-smg-routing-key", "x-kvxfer-attempt"),
]


def test_what_always_goes_on_and_nothing_else() -> None:
    received = [
        (b"traceparent", TRACE),
        (b"tracestate", b"k=v"),
        (b"authorization", b"Bearer secret"),
        (b"user-agent", b"client"),
        (b"cookie", b"a=b"),
        (b"x-data-parallel-rank", b"3"),
        (b"x-request-id", b"theirs"),
    ]
    common = [
        (b"content-type", b"application/json"),
        (b"accept", b"text/event-stream, application/json"),
        (b"accept-encoding", b"identity"),
        (b"x-request-id", b"req-1"),
        (b"traceparent", TRACE),
        (b"tracestate", b"k=v"),
    ]
    made = leg_header_pairs(received, request_id="req-1", forwards_authorization=False)
    assert list(made) == common
    made = leg_header_pairs(received, request_id="req-1", forwards_authorization=True)
    assert list(made) == [*common, (b"authorization", b"Bearer secret")]


def test_a_trace_is_made_where_none_came() -> None:
    made = dict(leg_header_pairs([(b"traceparent", b"nonsense")], request_id="r", forwards_authorization=False))
    assert made[b"traceparent"].startswith(b"00-")
    assert b"tracestate" not in made


def test_named_headers_go_on_once_and_within_a_bound() -> None:
    passed = check_passed(["X-Tenant", "x-long"])
    received = [(b"x-tenant", b"a"), (b"x-tenant", b"b"), (b"x-long", b"y" * 5000), (b"x-other", b"c")]
    made = leg_header_pairs(received, request_id="r", forwards_authorization=False, passed=passed)
    assert [pair for pair in made if pair[0].startswith((b"x-t", b"x-l", b"x-o"))] == [(b"x-tenant", b"a")]


@pytest.mark.parametrize(
    "name", [*ROUTING, "host", "content-length", "cookie", "authorization", "a b", "", "\u00e4", "\udcff"]
)
def test_a_header_that_routes_or_frames_may_not_be_named(name: str) -> None:
    with pytest.raises(ConfigError, match="forward_header: "):
        check_passed([name])
    with pytest.raises(ConfigError, match="forward_header: "):  # also for --check-config
        RouterOptions(forward_header=(name,))


@given(st.lists(st.tuples(st.sampled_from([b"traceparent", b"tracestate", b"authorization", b"x-a"]), st.binary())))
def test_whatever_came_can_be_sent(received: list[tuple[bytes, bytes]]) -> None:
    made = leg_header_pairs(received, request_id="r", forwards_authorization=True, passed={b"x-a"})
    assert encode_head("POST", "/v1/completions", b"host", made, 3)
