"""The waits between requests, and what of the socket is set."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Any

import httpx
import pytest

from kvxfer.serving import server as serving_server
from kvxfer.serving.loop import new_event_loop, run
from tests.support.serving.servers import ConnectionPhase, eventually, head, is_closed, read_answer, served


def only_connection(server: Any) -> Any:
    (connection,) = server.http.connections._phases
    return connection


async def test_server_idle_connection_is_closed_after_its_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.server.KEEPALIVE_S", 0.3)
    async with served() as server:
        reader, writer = await server.connect()
        loop = asyncio.get_running_loop()
        for _ in range(8):
            writer.write(head(2) + b"{}")
            assert (await read_answer(reader))[0] == 200
            last_s = loop.time()
            await asyncio.sleep(0.1)
        assert await is_closed(reader)
        assert loop.time() - last_s >= 0.29


async def test_server_idle_time_is_counted_while_the_first_request_was_waited_for_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvxfer.serving.server.KEEPALIVE_S", 0.2)
    async with served(header_timeout_s=60.0) as server:
        reader, writer = await server.send(head(2) + b"{}")
        assert (await read_answer(reader))[0] == 200
        assert await is_closed(reader)
        writer.close()


def test_server_keeps_an_idle_connection_longer_than_clients_do() -> None:
    """Otherwise the client sends a request into a connection that is being closed, and has to see it as reset."""
    clients_s = httpx.Limits().keepalive_expiry
    assert clients_s is not None
    assert 10 * clients_s < serving_server.KEEPALIVE_S


async def test_server_work_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.server.KEEPALIVE_S", 0.1)
    async with served(header_timeout_s=0.1) as server:
        server.hold.clear()
        reader, _ = await server.send(head(2) + b"{}")
        await server.wait_phase(ConnectionPhase.WORK, 1)
        await asyncio.sleep(0.3)
        server.hold.set()
        assert (await read_answer(reader))[0] == 200


async def test_server_connection_sets_no_timer_for_each_request() -> None:
    async with served() as server:
        reader, writer = await server.connect()
        await eventually(lambda: len(server.http.connections) == 1)
        connection = only_connection(server)
        timers = [connection._timer]
        for _ in range(50):
            writer.write(head(2) + b"{}")
            assert (await read_answer(reader))[0] == 200
            if connection._timer is not timers[-1]:
                timers.append(connection._timer)
        assert len(timers) <= 2  # the head's, and the shorter one of the first wait after an answer


async def test_server_connection_sends_small_answers_at_once() -> None:
    async with served() as server:
        await server.connect()
        await eventually(lambda: len(server.http.connections) == 1)
        found = only_connection(server).transport.get_extra_info("socket")
        assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_loop_run_is_as_asyncio_run_on_uvloop() -> None:
    async def main() -> str:
        await asyncio.sleep(0)
        return type(asyncio.get_running_loop()).__module__

    assert run(main()) == "uvloop"


def test_loop_is_asyncios_own_where_uvloop_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    try:
        assert isinstance(loop, asyncio.SelectorEventLoop)
    finally:
        loop.close()
