"""Runs against servers whose answers are written here: every request has one record, and each failure its name."""

from __future__ import annotations

import gc
import itertools
import json
import pathlib
import ssl
import threading
from collections.abc import Iterator

import pytest

from kvxfer.errors import AuthenticationError, ConfigError, InvalidArgumentError, PeerGoneError, ProtocolError
from kvxfer.load.drive.endpoint import first_model
from kvxfer.load.drive.start import DriveProgress
from kvxfer.load.options import TargetOptions
from kvxfer.workload.request import DispatchMode, WorkloadRequest
from tests.support.certificates import Authority
from tests.support.load_server import (
    CLOSE,
    LAST_CHUNK,
    RESET,
    STREAM_HEAD,
    AskedOf,
    NumberBody,
    Step,
    chunk,
    driven,
    good,
    plain,
    scripted,
    sessions_of,
    sse,
    stream,
    token,
    usage,
    workload_of,
)
from tests.support.local_http import free_ports

CASES: list[tuple[list[Step], str]] = [
    ([stream(token(), usage(1))], ""),
    ([STREAM_HEAD, chunk(sse(token("a"), done=False)), chunk(sse(token("b"))), LAST_CHUNK], ""),
    ([plain(503, {"error": {"code": "overloaded", "message": "full"}})], "overloaded"),
    ([plain(503, b"<html>", "connection: close\r\n"), CLOSE], "http_503"),
    ([plain(200, {"choices": [{"text": "a"}]})], ""),
    ([b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + sse(token()), CLOSE], ""),
    (
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + sse(token(), done=False), CLOSE],
        "broken_stream",
    ),
    ([stream(token(), done=False)], "broken_stream"),
    ([STREAM_HEAD, chunk(sse(token(), done=False)), CLOSE], "broken_stream"),
    ([STREAM_HEAD, chunk(sse(token(), done=False)), RESET], "connection_lost"),
    ([STREAM_HEAD, chunk(sse(token())), CLOSE], ""),
    ([b"HTTP/1.1 200 OK\r\n", CLOSE], "connection_lost"),
    ([b"SSH-2.0-OpenSSH_9.2\r\n", CLOSE], "bad_answer"),
    ([b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", CLOSE], "bad_answer"),
    ([b"HTTP/1.1 100 Continue\r\n\r\n", stream(token())], ""),
    ([stream(token()) + b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"], ""),
    ([b"HTTP/1.1 204 No Content\r\n\r\n"], "http_204"),
    ([STREAM_HEAD, chunk(sse({"error": {"code": "peer_gone"}}, done=False)), LAST_CHUNK], "peer_gone"),
    ([STREAM_HEAD, chunk(b"data: {nonsense\n\n"), LAST_CHUNK], "bad_answer"),
]


def test_each_failure_has_its_name() -> None:
    def script(asked: AskedOf) -> Iterator[Step]:
        yield from CASES[asked.number][0]

    with scripted(script) as server:
        result, records = driven(server.url, workload_of([place * 0.02 for place in range(len(CASES))]))
    assert [record.error for record in records] == [error for _, error in CASES]
    assert all(record.sent_s is not None and record.end_s is not None for record in records)
    assert all(record.first_s is not None for record in records if record.is_good)
    assert (result.ended, len(result.processes), result.processes[0].sent) == ("complete", 1, len(CASES))


def test_what_a_request_carries(tmp_path: pathlib.Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with scripted() as server:
        target = {"url": f"{server.url}/base/v1", "api_key_file": str(key)}
        _, records = driven("", workload_of([0.0, 0.01]), target=target, warmup=1, id_prefix="abc")
        (first, _) = sorted(server.asked, key=lambda asked: asked.number)
        driven("", workload_of([0.0]), target={"url": server.url, "account": False})
    assert (first.route, first.headers["authorization"]) == ("/base/v1/completions", "Bearer secret")
    assert (first.headers["x-request-id"], first.headers["x-kvxfer-account"]) == ("abc-0", "1")
    assert [(record.request_id, record.is_warmup) for record in records] == [("abc-0", True), ("abc-1", False)]
    assert "x-kvxfer-account" not in server.asked[-1].headers
    assert "authorization" not in server.asked[-1].headers


def test_two_processes_begin_together() -> None:
    with scripted() as server:
        result, records = driven(server.url, workload_of([0.2] * 8), processes=2)
    assert sorted(use.sent for use in result.processes) == [4, 4]
    assert {record.process for record in records} == {0, 1}
    assert all(record.sent_s is not None and record.sent_s >= 0.2 for record in records)


@pytest.mark.parametrize("mode", DispatchMode)
def test_sessions(mode: DispatchMode) -> None:
    with scripted() as server:
        _, records = driven(server.url, sessions_of(2, 3, think_s=0.05, mode=mode))
    turns = [record for record in records if record.session == 1]
    assert [record.turn for record in turns] == [0, 1, 2]
    if mode is DispatchMode.TIMESTAMP:
        assert [record.due_s for record in turns] == pytest.approx([0.0, 0.05, 0.1])
    else:
        for before, after in itertools.pairwise(turns):
            assert before.end_s is not None
            assert after.due_s == pytest.approx(before.end_s + 0.05, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "errors"), [(DispatchMode.TIMESTAMP, ["c", "", ""]), (DispatchMode.THINK, ["c", "not_sent", "not_sent"])]
)
def test_a_broken_session(mode: DispatchMode, errors: list[str]) -> None:
    def script(asked: AskedOf) -> Iterator[Step]:
        yield plain(500, {"error": {"code": "c"}}) if asked.body["turn"] == 0 else stream(token())

    with scripted(script) as server:
        _, records = driven(server.url, sessions_of(1, 3, think_s=0.05, mode=mode))
    assert [record.error for record in records] == errors
    if mode is DispatchMode.THINK:
        assert records[0].end_s is not None
        assert records[2].due_s == pytest.approx(records[0].end_s + 0.1, abs=1e-6)


def test_connections_are_kept() -> None:
    with scripted() as server:
        driven(server.url, workload_of([place * 0.05 for place in range(20)]))
    assert len({asked.connection for asked in server.asked}) <= 10  # a busy machine needs more than two


def test_a_stale_connection_is_tried_again_once() -> None:
    """The server ends an idle connection just as a request is sent on it: it reads the request, and closes."""
    closed: list[int] = []

    def script(asked: AskedOf) -> Iterator[Step]:
        if asked.place == 1 and asked.number not in closed:
            closed.append(asked.number)
            yield RESET if asked.number % 2 else CLOSE
        else:
            yield stream(token())

    with scripted(script) as server:
        result, records = driven(server.url, workload_of([place * 0.05 for place in range(8)]))
    assert closed
    assert [record.error for record in records] == [""] * 8
    assert all(record.sent_s is not None for record in records)
    assert [record.due_s for record in records] == pytest.approx([place * 0.05 for place in range(8)])
    assert result.processes[0].sent == 8


def test_a_request_that_the_server_had_and_dropped_is_not_tried_again() -> None:
    """It reads the request on a kept connection, works for more than a second, and closes."""
    dropped: list[int] = []

    def script(asked: AskedOf) -> Iterator[Step]:
        if asked.place:
            dropped.append(asked.number)
            threading.Event().wait(1.2)
            yield CLOSE
        yield stream(token())

    with scripted(script) as server:
        _, records = driven(server.url, workload_of([place * 0.05 for place in range(6)]))
    assert dropped
    assert [record.number for record in records if record.error == "connection_lost"] == sorted(dropped)
    assert sum(not record.error for record in records) == 6 - len(dropped)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nx: ", STREAM_HEAD + chunk(sse(token())) + b"0\r\nx: "])
def test_a_head_without_an_end_is_given_up(head: bytes) -> None:
    def script(_asked: AskedOf) -> Iterator[Step]:
        yield head
        while True:
            yield b"x" * (1 << 16)

    with scripted(script) as server:
        _, records = driven(server.url, workload_of([0.0]), timeout_s=30.0, drain_s=30.0)
    assert (records[0].end_s or 30.0) < 20
    assert records[0].error == ("" if b"DONE" in head else "bad_answer")


def test_a_server_that_always_closes_is_tried_twice() -> None:
    with scripted(lambda asked: iter([CLOSE])) as server:
        _, records = driven(server.url, workload_of([0.3, 0.4]))
        assert 2 <= len(server.asked) <= 4
    assert [record.error for record in records] == ["connection_lost"] * 2


def test_a_large_body_is_sent_in_parts() -> None:
    with scripted(read_late=True) as server:
        _, records = driven(server.url, workload_of([0.0, 0.0]), NumberBody(pad=20 << 20))
        assert [len(asked.body["pad"]) for asked in server.asked] == [20 << 20] * 2
    assert [record.error for record in records] == ["", ""]


def test_an_answer_before_the_body_was_sent() -> None:
    """The server refuses by the head alone, and reads nothing more."""
    refusal = plain(413, {"error": {"code": "too_large"}}, "connection: close\r\n")
    with scripted() as server:
        served = threading.Event()
        server._answer = lambda one, _: (one.recv(100), one.sendall(refusal), served.wait(20))  # type: ignore[method-assign]
        _, records = driven(server.url, workload_of([0.0]), NumberBody(pad=40 << 20))
        served.set()
    assert (records[0].error, records[0].status, records[0].sent_s) == ("too_large", 413, None)


def test_too_many_connections() -> None:
    release = threading.Event()

    def script(_asked: AskedOf) -> Iterator[Step]:
        yield from (release, stream(token()))

    def heard(progress: DriveProgress) -> None:
        if progress.failed >= 3:
            release.set()

    with scripted(script) as server:
        _, records = driven(server.url, workload_of([0.0] * 5), connections_max=2, on_progress=heard)
    assert sorted(record.error for record in records) == ["", "", *["too_many_connections"] * 3]


@pytest.mark.parametrize(("options", "error"), [({"timeout_s": 0.3}, "timeout"), ({"drain_s": 0.3}, "not_finished")])
def test_no_answer(options: dict[str, float], error: str) -> None:
    never = threading.Event()
    with scripted(lambda asked: iter([never])) as server:
        result, records = driven(server.url, workload_of([0.0, 0.1]), **options)
        never.set()
    assert [record.error for record in records] == [error] * 2
    assert (result.ended, all(record.sent_s is not None for record in records)) == ("complete", True)


def test_a_body_that_cannot_be_made() -> None:
    with scripted() as server:
        _, records = driven(server.url, workload_of([0.0, 0.01, 0.02]), NumberBody(broken=(1,)))
    assert [record.error for record in records] == ["", "no_body", ""]
    assert records[1].message == "RuntimeError: no such body"


def test_a_driver_that_is_late_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that take longer to make than is between two requests, and more of them than are made before the run."""
    monkeypatch.setattr("kvxfer.load.drive.start.AHEAD_BYTES", 1)
    with scripted() as server:
        result, records = driven(server.url, workload_of([place * 0.05 for place in range(10)]), NumberBody(make_s=0.1))
    assert max(record.lateness_s or 0.0 for record in records) >= 0.4
    assert result.processes[0].bodies_late >= 5


def test_an_arrival_while_a_body_is_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.load.drive.start.AHEAD_BYTES", 1)
    with scripted() as server:
        result, records = driven(server.url, workload_of([0.0, 1.0]), NumberBody(make_s=0.4))
    assert (result.processes[0].bodies_late, result.processes[0].stamps_late) == (0, 1)
    assert result.processes[0].worst_stamp_s >= 0.4
    assert records[0].ttft_s >= 0.4


def test_bodies_are_made_before_the_run() -> None:
    with scripted() as server:
        result, records = driven(server.url, workload_of([0.0] * 5), NumberBody(make_s=0.1))
    assert result.processes[0].bodies_late == 0
    assert max(record.lateness_s or 0.0 for record in records) < 0.4  # one after the other they take 0.5 s


def test_a_whole_answer_before_the_body_was_sent_is_none() -> None:
    with scripted() as server:
        served = threading.Event()
        early = stream(token(), usage(1))
        server._answer = lambda one, _: (one.recv(100), one.sendall(early), served.wait(20))  # type: ignore[method-assign]
        _, records = driven(server.url, workload_of([0.0]), NumberBody(pad=40 << 20))
        served.set()
    assert (records[0].error, records[0].status, records[0].sent_s) == ("bad_answer", 200, None)


class CollectingBody(NumberBody):
    """Says also whether the collector of cycles was on when it was made."""

    def __call__(self, request: WorkloadRequest) -> bytes:
        return json.dumps({"number": request.number, "collects": gc.isenabled()}).encode()


def test_nothing_is_collected_between_ready_and_the_first_request() -> None:
    """Of 300,000 planned requests it took 0.08 s, and the first requests were so much late."""
    with scripted() as server:
        driven(server.url, workload_of([0.0, 0.0]), CollectingBody())
    assert [asked.body["collects"] for asked in server.asked] == [False, False]


def test_tls(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.cert, identity.key)
    with scripted(context=context) as server:
        target = {"ca_file": authority.cert}
        _, records = driven(server.url, workload_of([0.0, 0.1, 0.2]), NumberBody(pad=1 << 20), target=target)
        _, refused = driven(server.url, workload_of([0.0]))
    assert [record.error for record in records] == [""] * 3
    assert refused[0].error == "unreachable"
    assert "certificate" in refused[0].message.lower()


def test_tickets_of_tls_do_not_end_a_connection_that_was_dialed_ahead(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path)
    identity = authority.issue("server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.cert, identity.key)
    with scripted(context=context) as server:
        _, records = driven(server.url, workload_of([0.5]), target={"ca_file": authority.cert})
        assert server._connections == 2  # one is the look whether anything is there
    assert records[0].error == ""


def test_a_dead_endpoint_is_told_at_once() -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    for ask in (lambda: driven(url, workload_of([0.0])), lambda: first_model(TargetOptions(url=url))):
        with pytest.raises(PeerGoneError, match=f"nothing answers at {url}: Connection refused"):
            ask()
    with pytest.raises(PeerGoneError, match="cannot be looked up"):
        driven("http://no-such-host.invalid:1", workload_of([0.0]))


def test_an_endpoint_that_dies_before_the_run() -> None:
    with scripted() as server:
        url = server.url

        def heard(_progress: DriveProgress) -> None:
            if server._threads[0].is_alive():
                server.close()

        result, records = driven(url, workload_of([1.0, 1.1]), on_progress=heard)
        server.close = lambda: None  # type: ignore[method-assign]
    assert [record.error for record in records] == ["unreachable"] * 2
    assert result.ended == "unreachable"


def test_what_cannot_be_used(tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    with scripted() as server:
        with pytest.raises(InvalidArgumentError, match="no requests"):
            driven(server.url, workload_of([]))
        for target, words in [
            ({"api_key_file": str(tmp_path / "none")}, "api_key_file cannot be read"),
            ({"api_key_file": str(empty)}, "has no key"),
            ({"url": server.url.replace("http", "https"), "ca_file": str(empty)}, "ca_file"),
        ]:
            with pytest.raises(ConfigError, match=words):
                driven(server.url, workload_of([0.0]), target=target)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (plain(200, {"data": [{"id": "tiny"}, {"id": "other"}]}), "tiny"),
        (plain(200, {"data": []}), ProtocolError),
        (plain(404, {}), ProtocolError),
        (plain(401, {}), AuthenticationError),
        (b"hello", PeerGoneError),
    ],
)
def test_first_model(answer: bytes, expected: str | type[Exception]) -> None:
    with scripted(lambda asked: iter([answer, CLOSE])) as server:
        target = TargetOptions(url=server.url)
        if isinstance(expected, str):
            assert first_model(target) == expected
            assert server.asked[0].route == "/v1/models"
        else:
            with pytest.raises(expected, match=r"127\.0\.0\.1"):
                first_model(target)


def test_good_is_the_default() -> None:
    with scripted(good) as server:
        _, records = driven(server.url, workload_of([0.0]))
    assert (records[0].output_tokens, records[0].tokens_from, records[0].chunks) == (2, "usage", 2)
