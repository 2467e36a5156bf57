"""Each fault, as a client sees it; and that afterwards the engine is as before."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest

from tests.support.mock_engine.mocks import Engine, mocks, read_all

BODY = {"prompt": "x", "max_tokens": 8, "stream": True}


def stream(engine: Engine, **more: object) -> socket.socket:
    """A connection on which a streamed request was sent."""
    connection = engine.connect()
    connection.sendall(engine.raw("/v1/completions", {**BODY, **more}))
    return connection


def events_of(raw: bytes) -> int:
    return raw.count(b"data: {")


@pytest.fixture(autouse=True)
def healthy_afterwards(fast: Engine) -> object:
    yield
    assert fast.request("DELETE", "/mock/faults").status == 200
    assert fast.complete().status == 200
    fast.wait(lambda now: now["blocks_used"] == now["running"] == now["open_requests"] == 0)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_status_is_answered_with_its_headers(fast: Engine, status: int) -> None:
    fast.fault("status", status=status, message="no room", headers={"retry-after": "7"}, count=1)
    answer = fast.complete()
    assert (answer.status, answer.headers["retry-after"]) == (status, "7")
    assert answer.json()["error"] == {
        "message": "no room",
        "type": "InternalServerError",
        "param": None,
        "code": status,
    }
    assert fast.complete().status == 200


def test_late_answer_comes_whole(fast: Engine) -> None:
    fast.fault("late", delay_s=0.3, count=1)
    before_s = time.monotonic()
    assert fast.complete().status == 200
    assert time.monotonic() - before_s >= 0.3


def test_hang_before_the_first_byte_ends_with_its_client(fast: Engine) -> None:
    fast.fault("hang", count=1)
    left = fast.statistics()["clients_left"]
    with stream(fast) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
    fast.wait(lambda now: now["clients_left"] == left + 1)


def test_stall_between_tokens_for_ever(fast: Engine) -> None:
    fast.fault("stall", after_tokens=3, count=1)
    with stream(fast) as connection:
        got = read_all(connection, timeout_s=0.3)
    assert events_of(got) == 3


def test_stall_between_tokens_for_a_while(fast: Engine) -> None:
    fast.fault("stall", after_tokens=3, delay_s=0.2, count=1)
    before_s = time.monotonic()
    answer = fast.complete("x", stream=True)
    assert (answer.text, time.monotonic() - before_s >= 0.2) == (fast.complete("x").text, True)


@pytest.mark.parametrize("after", [0, 5])
def test_cut_in_mid_stream(fast: Engine, after: int) -> None:
    fast.fault("cut", after_tokens=after, count=1)
    with stream(fast) as connection:
        raw = read_all(connection)
    assert (events_of(raw), raw.endswith(b"0\r\n\r\n")) == (after, False)


def test_cut_by_reset(fast: Engine) -> None:
    fast.fault("cut", after_tokens=2, reset=True, count=1)
    with stream(fast) as connection:
        assert events_of(read_all(connection)) <= 2


def test_cut_of_an_answer_that_is_not_streamed(fast: Engine) -> None:
    fast.fault("cut", count=1)
    with pytest.raises(http.client.RemoteDisconnected):
        fast.complete()


def test_half_a_chunk(fast: Engine) -> None:
    fast.fault("half", after_tokens=2, count=1)
    with stream(fast) as connection:
        raw = read_all(connection)
    assert events_of(raw) == 3
    assert not raw.endswith(b"\r\n")
    fast.fault("half", count=1)
    with pytest.raises(http.client.IncompleteRead):
        fast.complete()


@pytest.mark.parametrize("streamed", [False, True])
def test_garbage_instead_of_an_answer(fast: Engine, streamed: bool) -> None:
    fast.fault("garbage", count=1)
    with pytest.raises(http.client.BadStatusLine):
        fast.complete(stream=streamed)


def test_garbage_event_in_a_stream(fast: Engine) -> None:
    fast.fault("garbage", after_tokens=2, count=1)
    with stream(fast) as connection:
        raw = read_all(connection)
    lines = [line[6:] for line in raw.split(b"\r\n") if line.startswith(b"data: ")]
    assert json.loads(lines[1])
    with pytest.raises(ValueError, match=r"utf-8|Expecting|delimiter"):
        json.loads(lines[2].strip())


def test_huge_headers(fast: Engine) -> None:
    fast.fault("headers", bytes=200_000, count=2)
    for streamed in (True, False):
        with fast.connect() as connection:
            body = {**BODY, "stream": streamed}
            connection.sendall(fast.raw("/v1/completions", body, headers="connection: close\r\n"))
            raw = read_all(connection)
        assert len(raw.partition(b"\r\n\r\n")[0]) > 200_000


def test_slow_reader_takes_a_body_in_small_steps(fast: Engine) -> None:
    fast.fault("slow_read", delay_s=0.05, count=1)
    before_s = time.monotonic()
    assert fast.complete(filler="x" * 2_000_000).status == 200
    assert time.monotonic() - before_s >= 0.1


def test_fault_of_a_path_meets_that_path_only(fast: Engine) -> None:
    fast.fault("status", path="/health", status=503)
    assert fast.request("GET", "/health").status == 503
    assert fast.complete().status == 200
    assert fast.request("GET", "/v1/models").status == 200


def test_fault_of_a_leg_meets_that_leg_only(fast: Engine) -> None:
    fast.fault("status", leg="prefill")
    assert fast.complete().status == 200
    assert fast.complete(kv_transfer_params={"do_remote_decode": True}).status == 500


def test_fault_skips_counts_and_is_listed(fast: Engine) -> None:
    fast.fault("status", skip=1, count=2)
    assert [fast.complete().status for _ in range(4)] == [200, 500, 500, 200]
    fast.fault("status", probability=0.5)
    found = {fast.complete().status for _ in range(40)}
    assert found == {200, 500}
    [listed] = fast.request("GET", "/mock/faults").json()
    assert (listed["fault"], listed["probability"], listed["count"]) == ("status", 0.5, None)
    assert fast.statistics()["faults"]["status"] >= 3


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        ({"fault": "nothing"}, "fault"),
        ({"fault": "status", "status": 200}, "status"),
        ({"fault": "status", "count": 0}, "count"),
        ({"fault": "status", "probability": 2}, "probability"),
        ({"fault": "status", "headers": {"a": "b\r\nc"}}, "headers"),
        ({"fault": "status", "leg": "third"}, "leg"),
        ({"fault": "status", "more": 1}, "more"),
        ({"fault": "lie"}, "cached_tokens"),
        ({"fault": "lie", "cached_tokens": -1}, "cached_tokens"),
        ({"fault": "lie", "cached_factor": "twice"}, "cached_factor"),
        ({"fault": "lie", "time_factor": -0.5}, "time_factor"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_fault_is_refused_by_its_field(fast: Engine, fault: object, field: str) -> None:
    answer = fast.post("/mock/faults", fault)
    assert (answer.status, answer.json()["error"]["param"]) == (400, field)


def test_client_that_leaves_frees_its_blocks_and_is_counted() -> None:
    for pace in (("--itl-ms", "50"), ("--pace", "steps", "--step-ms", "50")):
        with mocks(*pace) as started:
            [engine] = started.engines
            with stream(engine, max_tokens=1000) as connection:
                connection.recv(1)
                assert engine.wait(lambda now: now["running"] == 1)["blocks_used"] >= 1
            now = engine.wait(lambda now: now["blocks_used"] == 0, timeout_s=1)
            assert (now["clients_left"], now["open_requests"], now["running"]) == (1, 0, 0)


def test_exit_ends_the_process_amid_a_stream() -> None:
    with mocks("--itl-ms", "0") as started:
        [engine] = started.engines
        engine.fault("exit", after_tokens=2, status=7)
        with stream(engine) as connection:
            read_all(connection)
        assert started.process.wait(timeout=5) == 7


def test_down_closes_a_port_and_opens_it_again() -> None:
    with mocks("--count", "2", "--itl-ms", "20") as started:
        engine, other = started.engines
        with stream(engine, max_tokens=1000) as connection:
            connection.recv(1)
            assert other.post(f"/mock/faults?port={engine.port}", {"fault": "down", "delay_s": 0.3}).status == 200
            assert b"[DONE]" not in read_all(connection)
        with pytest.raises(ConnectionRefusedError):
            engine.connect()
        assert other.complete().status == 200
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s:
            try:
                engine.connect().close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        assert engine.complete().status == 200
        assert engine.statistics()["blocks_used"] == 0
