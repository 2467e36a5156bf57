"""Whatever a client sends, the router answers, and no 5xx is its own: router and mock engines in one process.

An answer is well where it is 2xx to 4xx. A 5xx must be an engine's: the same request, sent to an engine itself, gets
one too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.one_process import OneProcess, ask, one_process, request
from tests.support.wild_bodies import VALID, control_requests, hot_requests, valid_body

pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module")
"""The router's thread draws numbers while Hypothesis makes a request."""

COUNTS = [1000, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
Request = tuple[str, bytes, list[bytes], bytes]
SITES = {
    "vllm": {"roles": ("prefill", "decode"), "kind": "any", "dialect": "vllm"},
    "sglang": {"roles": ("prefill", "decode"), "kind": "any", "dialect": "sglang"},
    "plain": {"roles": ("both",), "kind": "any", "dialect": "vllm"},
}


def site_of(name: str, **options: Any) -> Any:
    chosen = SITES[name]
    roles, kind, dialect = chosen["roles"], chosen["kind"], chosen["dialect"]
    return one_process(*roles, kind=str(kind), dialect=str(dialect), **options)


def fuzzed(strategy: st.SearchStrategy[Request], count: int, check: Callable[[Request], None]) -> None:
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    @given(strategy)
    def each(made: Request) -> None:
        check(made)

    each()


def no_fault_of(caplog: pytest.LogCaptureFixture) -> None:
    """That nothing was logged with a traceback, or as an error."""
    bad = [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    assert bad == [], [record.getMessage() for record in bad]


def is_an_engines(there: OneProcess, made: Request) -> bool:
    """Whether an engine itself answers 5xx to it."""
    method, target, headers, body = made
    again = request(method, target, body, *headers)
    return any(ask("127.0.0.1", engine.port, again).status >= 500 for engine in there.engines)


def check_shape(path: str, content: bytes) -> None:
    """An error is an object in the shape of the API: it has a message."""
    error = json.loads(content)["error"]
    assert error["message"], path
    assert error["type"], path


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SITES)
def test_no_body_gets_a_fault_of_the_router(name: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    share = -(-count // len(SITES))
    with site_of(name, failures_to_eject=1000) as there:

        def check(made: Request) -> None:
            method, target, headers, body = made
            answer = there.send(request(method, target, body, *headers))
            assert answer.status < 500 or is_an_engines(there, made), (answer.status, answer.body[:400])
            is_whole = method != "HEAD" and answer.headers.get("transfer-encoding") != "chunked"
            if answer.status >= 400 and is_whole:
                check_shape(target.decode(), answer.body)
            no_fault_of(caplog)

        fuzzed(hot_requests(), share, check)
        for path in VALID:
            sent = json.dumps(valid_body(path)).encode()
            assert there.send(request("POST", path.encode(), sent)).status in (200, 404), path
    no_fault_of(caplog)


@pytest.mark.parametrize("count", COUNTS)
def test_no_control_request_gets_a_fault_of_the_router(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """``/ready`` alone may say 503: it is asked about models that are not there."""
    with site_of("vllm") as there:

        def check(made: Request) -> None:
            method, target, headers, body = made
            answer = there.send(request(method, target, body, *headers))
            is_unready = target.startswith(b"/ready") and answer.status == 503
            assert answer.status < 500 or is_unready, (answer.status, answer.body[:400])
            no_fault_of(caplog)

        fuzzed(control_requests(), -(-count // 4), check)
        sent = json.dumps(valid_body("/v1/completions")).encode()
        assert there.send(request("POST", b"/v1/completions", sent)).status == 200
    no_fault_of(caplog)


def test_a_name_that_is_half_a_character_is_quoted_in_the_refusal() -> None:
    with site_of("vllm") as there:
        head = b"content-type: application/json"
        answer = there.send(request("POST", b"/workers", b'{"\\ud800": 1}', head))
        assert answer.status == 400
        assert json.loads(answer.body)["error"]["param"] == "\ud800"
        sent = b'{"url": "http://127.0.0.1:1", "role": "decode", "model": "\\ud800"}'
        answer = there.send(request("POST", b"/workers", sent, head))
        assert answer.status == 400
        assert there.send(request("GET", b"/workers")).status == 200
