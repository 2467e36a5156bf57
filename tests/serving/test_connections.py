"""The bound of connections: which connection is given up, which waits, and what happens where descriptors run out."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer.serving.connections import PARTING_MAX, Connections
from kvxfer.serving.limits import CONNECTIONS_MAX, Sockets, share_descriptors
from tests.support.serving.servers import (
    ConnectionPhase,
    eventually,
    hang_up,
    head,
    is_closed,
    logged,
    read_answer,
    read_error,
    served,
)


async def test_server_full_of_idle_connections_gives_up_the_oldest() -> None:
    async with served(connections_max=5) as server:
        idle = []
        for count in range(1, 6):
            idle.append(await server.connect())
            await server.wait_phase(ConnectionPhase.IDLE, count)
        for number in range(3):
            reader, writer = await server.send(head(2) + b"{}")
            assert (await read_answer(reader))[0] == 200
            assert await is_closed(idle[number][0])
            writer.close()
            await eventually(lambda: len(server.http.connections) <= 4)
            idle.append(await server.connect())
            await eventually(lambda: len(server.http.connections) == 5)
        for _, writer in idle:
            writer.close()


async def test_server_flood_of_idle_connections_keeps_no_request_out() -> None:
    async with served(connections_max=8) as server:
        with logged(logging.WARNING) as records:
            idle = [await server.connect() for _ in range(200)]
            for _ in range(5):
                reader, writer = await server.send(head(2) + b"{}")
                assert (await read_answer(reader))[0] == 200
                writer.close()
            assert len(server.http.connections) <= 8
            for _, writer in idle:
                writer.close()
        assert not records


async def test_server_full_of_unfinished_requests_gives_up_heads_before_bodies() -> None:
    async with served(connections_max=2) as server:
        body_reader, body_writer = await server.connect()
        body_writer.write(head(1000) + b"x")
        await server.wait_phase(ConnectionPhase.BODY, 1)
        head_reader, head_writer = await server.connect()
        head_writer.write(b"POST")
        await server.wait_phase(ConnectionPhase.HEAD, 1)
        for refused, refused_writer in ((head_reader, head_writer), (body_reader, body_writer)):
            await server.send(head(1000) + b"y")
            assert (await read_error(refused))[:2] == (503, "overloaded")
            assert await is_closed(refused)
            refused_writer.close()


async def test_server_body_given_up_for_a_new_connection_is_read_on_until_its_client_has_the_503() -> None:
    async with served(connections_max=1, max_body_bytes=4 << 20) as server:
        reader, writer = await server.send(head(4 << 20) + b"x")
        await server.wait_phase(ConnectionPhase.BODY, 1)
        other_reader, other = await server.connect()
        other.write(head(2) + b"{}")
        assert (await read_answer(other_reader))[0] == 200  # at once, although the first is still open
        writer.write(b"x" * ((4 << 20) - 1))
        await writer.drain()
        assert (await read_error(reader))[:2] == (503, "overloaded")


async def test_server_request_that_came_with_its_connection_is_not_given_up_as_idle() -> None:
    async with served(connections_max=2) as server:
        clients = []
        for _ in range(40):
            client = socket.socket()
            client.connect(("127.0.0.1", server.port))  # this loop does not turn: all are in the kernel's queue
            client.sendall(head(2) + b"{}")
            client.setblocking(False)
            clients.append(client)
        loop = asyncio.get_running_loop()
        try:
            for client in clients:
                async with asyncio.timeout(20):
                    assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
                client.close()
        finally:
            for client in clients:
                client.close()


async def test_server_full_of_idle_clients_that_do_not_read_serves_others_at_once() -> None:
    async with served(connections_max=6) as server:
        lazy = []
        try:
            for number in range(6):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                lazy.append(client)
                client.connect(("127.0.0.1", server.port))
                await eventually(lambda: len(server.http.connections) == len(lazy))
                connection: Any = list(server.http.connections._phases)[number]
                while not connection.transport.get_write_buffer_size():  # as after many answers, and none at work
                    connection.transport.write(b"x" * 9000)
            assert server.http.connections.count(ConnectionPhase.IDLE) == 6
            async with asyncio.timeout(10):
                for _ in range(6):
                    reader, _ = await server.send(head(2) + b"{}")
                    assert (await read_answer(reader))[0] == 200
        finally:
            for client in lazy:
                client.close()


async def test_server_full_of_requests_at_work_lets_others_wait_and_serves_them_then() -> None:
    async with served(connections_max=2) as server:
        server.hold.clear()
        working = [await server.connect() for _ in range(2)]
        for _, writer in working:
            writer.write(head(2) + b"{}")
        await server.wait_phase(ConnectionPhase.WORK, 2)
        with logged(logging.WARNING) as records:
            waiting = [await server.connect() for _ in range(3)]  # the kernel takes them
            for _, writer in waiting:
                writer.write(head(2) + b"{}")
            await eventually(lambda: bool(records))
            server.hold.set()
            for reader, writer in [*working, *waiting]:
                assert (await read_answer(reader))[0] == 200
                writer.close()
        assert [record.levelname for record in records] == ["WARNING"]
        assert "max_connections 2" in records[0].getMessage()


async def test_server_out_of_descriptors_rests_says_so_once_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as server:
        monkeypatch.setattr("kvxfer.serving.accepting.RETRY_S", 0.01)
        tried = 0

        def accept(listener: socket.socket) -> tuple[socket.socket, object]:
            nonlocal tried
            tried += 1
            raise OSError(errno.EMFILE, "Too many open files")

        with logged(logging.WARNING) as records:
            with monkeypatch.context() as broken:
                broken.setattr(socket.socket, "accept", accept)
                reader, writer = await server.send(head(2) + b"{}")
                await eventually(lambda: tried >= 5)
            assert (await read_answer(reader))[0] == 200
            writer.close()
        assert [record.getMessage() for record in records] == [
            "cannot accept connections: Too many open files (one of 1 since this was last said)"
        ]


async def test_server_client_that_takes_no_byte_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.serving.transport.WRITE_STALL_S", 0.1)
    async with served() as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head(method="GET") * 300)
            await eventually(lambda: len(server.http.connections) == 1)
            await eventually(lambda: len(server.http.connections) == 0)


class Fake:
    def __init__(self, connections: Connections, phase: ConnectionPhase) -> None:
        self.is_given_up = False
        self.is_aborted = False
        connections.move(self, phase)

    def give_up(self) -> None:
        self.is_given_up = True

    def abort(self) -> None:
        self.is_aborted = True


def test_connections_given_up_leave_room_at_once_up_to_a_bound() -> None:
    connections = Connections(8)
    fakes = [Fake(connections, ConnectionPhase.IDLE) for _ in range(8)]
    for number in range(PARTING_MAX):
        assert connections.make_room()
        assert (connections.kept, len(connections)) == (7 - number, 8)
    assert connections.make_room()
    assert connections.given_up == PARTING_MAX
    assert [fake.is_aborted for fake in fakes] == [True] + [False] * 7
    connections.remove(fakes[0])
    assert connections.make_room()
    assert fakes[PARTING_MAX].is_given_up
    assert not fakes[PARTING_MAX].is_aborted


def test_connections_give_up_by_phase_and_then_by_age() -> None:
    connections = Connections(10)
    work, body, young_idle = (
        Fake(connections, phase) for phase in (ConnectionPhase.WORK, ConnectionPhase.BODY, ConnectionPhase.BODY)
    )
    old_idle, first_head, closing = (
        Fake(connections, phase) for phase in (ConnectionPhase.IDLE, ConnectionPhase.HEAD, ConnectionPhase.CLOSING)
    )
    connections.move(young_idle, ConnectionPhase.IDLE)
    for expected in (closing, old_idle, young_idle, first_head, body):
        assert connections.make_room()
        assert expected.is_given_up
        connections.remove(expected)
    assert not connections.make_room()
    assert not work.is_given_up
    assert (len(connections), connections.given_up) == (1, 5)


def test_connections_tell_of_room_when_work_ends_and_when_a_connection_does() -> None:
    connections = Connections(1)
    told: list[int] = []
    connections.on_room = lambda: told.append(1)
    one = Fake(connections, ConnectionPhase.IDLE)
    connections.move(one, ConnectionPhase.WORK)
    assert not told
    connections.move(one, ConnectionPhase.IDLE)
    assert len(told) == 1
    connections.remove(one)
    connections.remove(one)
    assert len(told) == 2


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (64, Sockets(12, 24)),
        (1024, Sockets(332, 664)),
        (20_000, Sockets(CONNECTIONS_MAX, 2048)),
        (1 << 20, Sockets(CONNECTIONS_MAX, 2048)),
    ],
)
def test_descriptors_are_shared_so_that_every_client_can_have_its_legs(limit: int, expected: Sockets) -> None:
    found = share_descriptors(0, legs_each=2, legs_max=2048, limit=limit, used=20)
    assert found == expected
    assert found.connections + found.legs <= limit - 20


def test_descriptors_for_a_number_that_was_asked_for_must_be_there() -> None:
    assert share_descriptors(100, legs_each=2, legs_max=2048, limit=1024, used=20) == Sockets(100, 200)
    with pytest.raises(ConfigError, match=r"max_connections 500 .* limit of 1528 open files, and it is 1024"):
        share_descriptors(500, legs_each=2, legs_max=2048, limit=1024, used=20)
    with pytest.raises(ConfigError, match=r"the fewest .* limit of 40 open files, and it is 32: raise it"):
        share_descriptors(0, legs_each=2, legs_max=2048, limit=32, used=20)


async def test_server_that_stops_closes_idle_connections_and_leaves_no_task() -> None:
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head(2) + b"{}")
        assert (await read_answer(reader))[0] == 200
    assert await is_closed(reader)
    await hang_up(writer)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "test http" not in names
