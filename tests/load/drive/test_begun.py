"""What a server delays is not the generator's lateness: a request is begun when the driver has done its part."""

from __future__ import annotations

import pathlib
import ssl
import threading

import pytest

from tests.support.certificates import Authority
from tests.support.load_server import NumberBody, driven, scripted, stream, token, usage, workload_of

DELAY_S = 0.5
BODY_BYTES = 20 << 20
"""More than the kernel takes of a connection that nobody reads."""


def test_a_server_that_is_slow_to_read() -> None:
    with scripted() as server:
        answer, delay = server._answer, threading.Event()
        server._answer = lambda one, number: (delay.wait(DELAY_S), answer(one, number))  # type: ignore[method-assign]
        _, (record,) = driven(server.url, workload_of([0.0]), NumberBody(pad=BODY_BYTES))
    assert record.is_good
    assert record.begun_s is not None
    assert record.sent_s is not None
    assert record.sent_s - record.begun_s >= 0.8 * DELAY_S
    assert record.lateness_s == pytest.approx(record.begun_s - record.due_s)


def test_a_server_that_is_slow_to_shake_hands(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.cert, identity.key)
    with scripted(context=context) as server:
        serve, delay = server._serve, threading.Event()
        server._serve = lambda one, number: (delay.wait(DELAY_S), serve(one, number))  # type: ignore[method-assign,func-returns-value]
        _, (record,) = driven(server.url, workload_of([0.0]), target={"ca_file": authority.cert})
    assert record.is_good
    assert record.begun_s is not None
    assert record.sent_s is not None
    assert record.sent_s - record.begun_s >= 0.8 * DELAY_S


def test_a_request_is_begun_once_whatever_becomes_of_its_connection() -> None:
    """The kept connection is closed when the second request comes, which is then sent over another."""
    with scripted(lambda asked: iter([stream(token("a"), usage(1))] if asked.place == 0 else ["close"])) as server:
        _, records = driven(server.url, workload_of([0.0, 0.6]), connections_max=1)
    assert [record.error for record in records] == ["", ""]
    again = records[1]
    assert again.begun_s is not None
    assert again.sent_s is not None
    assert again.due_s <= again.begun_s < again.sent_s


def test_what_the_driver_may_not_connect_was_never_begun() -> None:
    never = threading.Event()
    with scripted(lambda asked: iter([never])) as server:
        _, records = driven(server.url, workload_of([0.0, 0.1]), connections_max=1, drain_s=0.3)
        never.set()
    assert [(record.error, record.begun_s is None) for record in records] == [
        ("not_finished", False),
        ("too_many_connections", True),
    ]
