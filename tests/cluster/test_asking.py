"""What the demo's client counts as failed, retried and wrong, and what is said at the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator

import pytest

from tests.cluster import demo
from tests.support.cluster.asking import TRIES, Clients, KnownAnswer, Tally

KNOWN = KnownAnswer((5, 6, 7), (1, 2))


def answer(status: str = "200 OK", token_ids: tuple[int, ...] = KNOWN.token_ids) -> bytes:
    body = json.dumps({"choices": [{"token_ids": token_ids}], "kvxfer": {"prefill": "remote"}}).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def saying(said: bytes) -> AsyncIterator[str]:
    """The URL of a router that answers so to everything, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def tallied(first: bytes, second: bytes) -> Tally:
    """Of one request that asks the first router first."""
    async with saying(first) as one, saying(second) as other:
        async with Clients([one, other], ssl.create_default_context(), [KNOWN], lines=1) as clients:
            await clients.some(1)
        tally = clients.whole
        assert tally.done >= 1
        return tally


async def test_a_router_that_is_gone_costs_a_retry() -> None:
    tally = await tallied(b"", answer())
    assert (tally.failed, tally.wrong) == ([], 0)
    assert tally.retried == tally.remote == tally.done


async def test_an_answer_that_broke_off_is_retried_because_the_client_has_not_used_it() -> None:
    tally = await tallied(answer()[:-5], answer())
    assert (tally.failed, tally.wrong, tally.retried) == ([], 0, tally.done)


async def test_busy_routers_are_asked_so_often_and_no_oftener() -> None:
    tally = await tallied(answer("503 Service Unavailable"), answer("503 Service Unavailable"))
    assert len(tally.failed) == tally.done
    assert tally.retried == (TRIES - 1) * tally.done


async def test_a_refusal_is_a_failure_at_once() -> None:
    tally = await tallied(answer("400 Bad Request"), answer())
    assert len(tally.failed) == tally.done
    assert tally.retried == 0


async def test_other_tokens_are_wrong() -> None:
    tally = await tallied(answer(token_ids=(1, 3)), answer())
    assert (tally.failed, tally.wrong) == ([], tally.done)


async def test_a_count_begins_anew_and_the_whole_goes_on() -> None:
    async with saying(answer()) as one, Clients([one], ssl.create_default_context(), [KNOWN], lines=2) as clients:
        await clients.some(2)
        tally = clients.begin()
        await clients.some(2)
        assert 2 <= tally.done <= clients.whole.done - 2


def rows(tally: Tally, kind: str = "router") -> list[demo.FaultRow]:
    return [demo.FaultRow(kind, "r0", tally, 6.0, 0.25)]


@pytest.mark.parametrize(
    ("tally", "lost", "is_well", "last"),
    [
        (Tally(done=9, retried=2, remote=9), [], True, "none failed"),
        (Tally(done=9, failed=["ReadError"], remote=8), [], False, "1 requests failed, 0 answers were wrong"),
        (Tally(done=9, wrong=2, remote=9), [], False, "0 requests failed, 2 answers were wrong"),
        (Tally(done=9, remote=9), ["p1 ended with code 1"], False, "0 requests failed, 0 answers were wrong"),
        (Tally(done=9), [], False, "no request ran, or no prefill worker had a part in one, so nothing was shown"),
        (Tally(), [], False, "no request ran, or no prefill worker had a part in one, so nothing was shown"),
    ],
)
def test_the_last_line(
    tally: Tally, lost: list[str], is_well: bool, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.verdict(rows(tally), tally, lost) is is_well
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == last
    assert all(sentence in "\n".join(lines) for sentence in (*tally.failed, *lost))


@pytest.mark.parametrize("kind", [kind for kind, _ in demo.VICTIMS])
def test_a_client_asks_again_only_where_a_router_died(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally(done=9, retried=2, remote=9)
    is_router = kind == "router"
    assert demo.verdict(rows(tally, kind), tally, []) is is_router
    last = "none failed" if is_router else "2 requests were asked again although no router was killed"
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_the_table() -> None:
    lines = demo.shown(rows(Tally(done=9, failed=["x"], retried=2, wrong=3))).splitlines()
    assert lines[1].split() == ["router", "r0", "9", "1", "2", "3", "6.00", "s", "250.0", "ms"]


def test_ports_are_free_and_different() -> None:
    ports = demo.free_ports(20)
    assert len(set(ports)) == 20
    assert all(port in demo.UNCHOSEN for port in ports)
