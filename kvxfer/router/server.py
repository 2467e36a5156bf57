"""The router as a running server: binds, follows the membership, serves, and stops in order.

Decides the order of starting and stopping; it must never know what a request is. Logs go through `logging`; nothing
is printed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from kvxfer.errors import ConfigError, CoordinatorUnavailable
from kvxfer.observe import hide
from kvxfer.policy.admit import AdmitOptions
from kvxfer.policy.backoff import Backoff
from kvxfer.router.app import Door, build_app
from kvxfer.router.attempt import Room
from kvxfer.router.auth import ApiKeys
from kvxfer.router.legs import new_client
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.workers import Workers
from kvxfer.rpc import MembershipWatch, member_token

BACKLOG = 2048
FIRST_MEMBERSHIP_WAIT_S = 1.0
"""How long the start waits for a first membership, so that a router that says it is ready usually knows its workers."""

Ready = Callable[[dict[str, Any]], None]


async def serve(options: RouterOptions, *, on_ready: Ready, stop: asyncio.Event) -> None:
    """Run the router until ``stop`` is set. ``on_ready`` gets the ready line as an object, once it listens.

    Raises ConfigError for no coordinator, a taken port, a bad token or key file, and AuthenticationFailed if the
    coordinator does not take the token at the start. A coordinator that is away is waited for in the background.
    """
    if not options.coordinator:
        raise ConfigError("coordinator must be given as host:port")
    keys = ApiKeys.from_file(options.api_key_file) if options.api_key_file else ApiKeys()
    token = member_token(options.token_file)
    hide(token)
    workers = Workers(aside=Backoff(base_s=options.aside_base_s, cap_s=options.aside_cap_s))

    def on_state(is_connected: bool) -> None:
        workers.is_connected = is_connected

    with listening(options.host, options.port) as listener:
        watch = MembershipWatch(options.coordinator, token, on_membership=workers.update, on_state=on_state)
        async with watch:
            with contextlib.suppress(CoordinatorUnavailable):
                await watch.wait_connected(FIRST_MEMBERSHIP_WAIT_S)
            await serve_workers(options, workers, keys, listener, on_ready=on_ready, stop=stop)


async def serve_workers(
    options: RouterOptions,
    workers: Workers,
    keys: ApiKeys,
    listener: socket.socket,
    *,
    on_ready: Ready,
    stop: asyncio.Event,
) -> None:
    """Serve HTTP on ``listener`` over ``workers``, whoever keeps those up to date, until ``stop`` is set."""
    door = Door(AdmitOptions(options.max_inflight))
    metrics = RouterMetrics(workers)
    async with new_client(connect_timeout_s=options.connect_timeout_s) as client:
        app = build_app(Room(options, workers, client, metrics), keys, door)
        server = _Server(
            uvicorn.Config(
                app,
                lifespan="off",
                ws="none",
                http="h11",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=1,
            )
        )
        running = asyncio.create_task(server.serve(sockets=[listener]), name="kvxfer router http")
        listening_task = asyncio.create_task(server.listens.wait())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, listening_task}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                on_ready(ready_line(options.host, listener))
                await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await door.drain(options.shutdown_grace_s)
        finally:
            door.stop.set()
            server.should_exit = True
            stopping.cancel()
            listening_task.cancel()
            await asyncio.wait({running, stopping, listening_task})
        running.result()


class _Server(uvicorn.Server):
    """Says when it listens, and leaves signals alone: they belong to whoever sets ``stop``."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound TCP socket; raise ConfigError that says why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


def ready_line(host: str, listener: socket.socket) -> dict[str, Any]:
    """What the router says when it listens."""
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    return {
        "event": "ready",
        "role": "router",
        "address": f"{shown}:{port}",
        "http_url": f"http://{shown}:{port}",
        "pid": os.getpid(),
    }
