"""An HTTP server of ours from bind to close: uvicorn over our own connections. Decides the order of starting and
stopping; it must never know what is served. Nothing is printed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from kvxfer.errors import ConfigError
from kvxfer.serving.accepting import Acceptor, Turn
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.connections import Connections
from kvxfer.serving.exchange import FindHandler
from kvxfer.serving.limits import ServingLimits
from kvxfer.serving.protocol import Connection, ConnectionContext
from kvxfer.serving.tls import ServerTls

BACKLOG = 2048
"""Connections that wait in the kernel while none is accepted."""
KEEPALIVE_S = 75
"""How long a connection may be without a request after an answer: longer than clients and load balancers keep one
(httpx, and so OpenAI's client, 5 s; common balancers 60 s). Requests are reset where both give up at once."""
STOP_GRACE_S = 1


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound TCP socket; raise ConfigError that says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is accepted inherits it
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            stack.pop_all()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    try:
        yield listener
    finally:
        listener.close()


def in_url(host: str) -> str:
    """``host`` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def ready_line(role: str, host: str, listener: socket.socket, *, scheme: str = "http", **more: Any) -> dict[str, Any]:
    """What a server says when it listens on ``host``; ``more`` is added, or stands instead."""
    address = f"{in_url(host)}:{listener.getsockname()[1]}"
    url = f"{scheme}://{address}"
    line = {"event": "ready", "role": role, "address": address, "http_url": url, "pid": os.getpid()}
    return line | more


class HttpServer:
    """A server that runs."""

    def __init__(
        self, running: asyncio.Task[None], connections: Connections, acceptor: Acceptor, state: ServerState
    ) -> None:
        self._running = running
        self.connections = connections
        self.stop_accepting = acceptor.stop
        """Accept no more connections, before the end of the block."""
        self._state = state

    def renew_connections(self) -> None:
        """Keep no connection that is open: each closes now, or after the answer that is being made."""
        for connection in tuple(self._state.connections):
            connection.shutdown()

    async def wait_ended(self, *events: Awaitable[object]) -> None:
        """Until the server has ended by itself, which is a failure, or the first of ``events``."""
        waits = [asyncio.ensure_future(event) for event in events]
        try:
            await asyncio.wait({self._running, *waits}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket.socket,
    limits: ServingLimits,
    bodies: Bodies,
    *,
    connections_max: int,
    name: str,
    find_handler: FindHandler | None = None,
    tls: ServerTls | None = None,
    turn: Turn | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve ``app`` on ``listener`` within the block; ``name`` is the task's. A request for which ``find_handler``
    gives a handler goes to that instead. ``tls``: every connection speaks it. ``turn`` is for a listener that other
    processes have too (`accepting.Turn`).

    At the end of the block the server accepts no more connections and refuses unfinished ``bodies``; answers under way
    get STOP_GRACE_S. Raises the error that ended the server.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        http=Connection,
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
    )
    server = _UvicornServer(config)
    connections = Connections(connections_max)

    context = ConnectionContext(
        app,
        server.server_state,
        connections,
        bodies,
        header_timeout_s=limits.header_timeout_s,
        keepalive_s=KEEPALIVE_S,
        find_handler=find_handler,
    )
    acceptor = Acceptor(
        listener,
        connections,
        lambda: Connection(context),
        tls=tls,
        handshake_timeout_s=limits.header_timeout_s,
        turn=turn,
    )
    running = asyncio.create_task(server.serve(sockets=[]), name=name)
    http = HttpServer(running, connections, acceptor, server.server_state)
    try:
        await http.wait_ended(server.listens.wait())
        if running.done():
            running.result()
        acceptor.start()
        yield http
    finally:
        acceptor.stop()
        bodies.close()
        server.should_exit = True
        await asyncio.wait({running})
        await _end(connections)
    running.result()


async def _end(connections: Connections) -> None:
    """Let clients take their last answers, for STOP_GRACE_S at most, and close what is open then."""
    await _wait_none(connections)
    connections.abort_all()
    await _wait_none(connections)


async def _wait_none(connections: Connections) -> None:
    changed = asyncio.Event()
    connections.on_room = changed.set
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            while len(connections):
                changed.clear()
                await changed.wait()


class _UvicornServer(uvicorn.Server):
    """Says when it is set up, and leaves signals alone: they belong to the process's own stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
