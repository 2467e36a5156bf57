"""The router as a running server: binds, follows the membership, serves, and stops in order.

Decides the order of starting and stopping; it must never know what a request is. Logs go through `logging`; nothing
is printed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from kvxfer.observe import hide
from kvxfer.policy.admit import AdmitOptions
from kvxfer.policy.backoff import Backoff
from kvxfer.protocol.http_url import HostList
from kvxfer.router.app import Door, build_app
from kvxfer.router.attempt import Room
from kvxfer.router.auth import ApiKeys
from kvxfer.router.legs import new_client
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.workers import Workers
from kvxfer.rpc import MembershipWatch, member_token
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.limits import share_now
from kvxfer.serving.server import listening, ready_line, serving

LEGS_EACH = 2
"""Connections to workers that one request may need at once."""
FIRST_MEMBERSHIP_WAIT_S = 1.0
"""How long the start waits for a first membership, so that a router that says it is ready usually knows its workers."""

Ready = Callable[[dict[str, Any]], None]


async def serve(options: RouterOptions, *, on_ready: Ready, stop: asyncio.Event) -> None:
    """Run the router until ``stop`` is set. ``on_ready`` gets the ready line as an object, once it listens.

    Raises ConfigError for no coordinator, a taken port, a bad token or key file, and AuthenticationError if the
    coordinator does not take the token at the start. A coordinator that is away is waited for in the background.
    """
    if not options.coordinator:
        raise ConfigError("coordinator must be given as host:port")
    keys = ApiKeys.from_file(options.api_key_file) if options.api_key_file else ApiKeys()
    token = member_token(options.token_file)
    hide(token)
    workers = Workers(
        aside=Backoff(base_s=options.aside_base_s, cap_s=options.aside_cap_s),
        allowed=HostList("allow_http_host", options.allow_http_host),
    )

    def on_state(is_connected: bool) -> None:
        workers.is_connected = is_connected

    with listening(options.host, options.port) as listener:
        watch = MembershipWatch(options.coordinator, token, on_membership=workers.update, on_state=on_state)
        async with watch:
            with contextlib.suppress(CoordinatorUnavailableError):
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
    sockets = share_now(options.max_connections, legs_each=LEGS_EACH, legs_max=LEGS_EACH * options.max_inflight)
    door = Door(AdmitOptions(options.max_inflight))
    metrics = RouterMetrics(workers)
    bodies = Bodies(options)
    async with new_client(connect_timeout_s=options.connect_timeout_s, connections_max=sockets.legs) as client:
        app = build_app(Room(options, workers, client, metrics), keys, door, bodies)
        async with serving(
            app, listener, options, bodies, connections_max=sockets.connections, name="kvxfer router http"
        ) as http:
            try:
                on_ready(ready_line("router", options.host, listener))
                await http.wait_ended(stop.wait())
                await door.drain(options.shutdown_grace_s)
            finally:
                door.stop.set()
