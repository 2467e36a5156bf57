"""Sockets that do not move: workers whose connections hang, and clients that read one byte a second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import re
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.routers import check, site

QUICK = ("--connect-timeout-s=0.3",)


@contextlib.contextmanager
def full_backlog() -> Iterator[int]:
    """The port of a listener that accepts nothing and whose queue is full: connections to it hang."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(16):
            one = stack.enter_context(socket.socket())
            one.settimeout(0.2)
            try:
                one.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("the kernel lets more connections wait than were asked for")
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_worker_whose_connection_hangs_costs_no_client_an_error(dialect: str, role: str) -> None:
    with full_backlog() as port:
        more = f"&bootstrap_port={port}" if dialect == "sglang" else ""
        flags = (f"--{role}=http://127.0.0.1:{port}?model=mock{more}", *QUICK)
        async with site(1, 1, dialect=dialect, router_flags=flags) as there:
            for _ in range(4):
                begun_s = time.monotonic()
                check(await there.complete())
                assert time.monotonic() - begun_s < 5.0


async def test_where_every_connection_hangs_the_client_gets_a_named_error_by_the_deadline() -> None:
    with full_backlog() as port:
        flags = (f"--engine=http://127.0.0.1:{port}?model=other", *QUICK)
        async with site(1, 1, router_flags=flags) as there:
            begun_s = time.monotonic()
            answer = await there.complete(model="other")
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "peer_gone"
            assert time.monotonic() - begun_s < 5.0


def resident_bytes(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


ESTABLISHED = 1


def is_open(connection: socket.socket) -> bool:
    """What the kernel knows: bytes that came before a reset are still read after it."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0] == ESTABLISHED


async def read_slowly(port: int, body: bytes) -> float:
    """Seconds until the router has given the connection up, of which one byte a second is read."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        await loop.sock_sendall(connection, head + body)
        begun_s = time.monotonic()
        for _ in range(60):
            with contextlib.suppress(ConnectionError):
                await loop.sock_recv(connection, 1)
            if not is_open(connection):
                break
            await asyncio.sleep(1.0)
        return time.monotonic() - begun_s


async def test_clients_that_read_one_byte_a_second_cost_bounded_memory_and_end_by_the_deadline() -> None:
    """Unbounded, each of them would hold 15 MB."""
    async with site(1, 1, engine_flags=("--ttft-ms=1", "--itl-ms=0"), router_flags=("--request-timeout-s=4",)) as there:
        check(await there.complete())
        before = resident_bytes(there.router.process.pid)
        body = json.dumps({"model": "mock", "prompt": "x", "max_tokens": 100_000, "stream": True}).encode()
        port = int(there.router.url.rpartition(":")[2])
        reading = [asyncio.create_task(read_slowly(port, body)) for _ in range(8)]
        most = 0
        while not all(task.done() for task in reading):
            most = max(most, resident_bytes(there.router.process.pid))
            await asyncio.sleep(0.1)
        assert most - before < 48 << 20
        # Read to the end, each would take days; how long the engines' first bytes take is the machine's business.
        assert all(task.result() < 60.0 for task in reading)
        await there.wait_free(within_s=5.0)
        check(await there.complete())
