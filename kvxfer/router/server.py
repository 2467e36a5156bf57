"""The router as a running server: binds, learns its workers, serves, and stops in order.

Decides the order of starting and stopping; it must never know what a request is. Logs go through `logging`; nothing
is printed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from starlette.types import ASGIApp

from kvxfer.config import is_loopback
from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.policy.admit import AdmitOptions
from kvxfer.policy.health import HealthOptions
from kvxfer.protocol.http_url import HostList
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.following import following
from kvxfer.router.front import Door, Front
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.rpc import member_token
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.limits import share_now
from kvxfer.serving.server import HttpServer, listening, ready_line, serving

LEGS_EACH = 2
"""Connections to workers that one request may need at once."""

Ready = Callable[[dict[str, Any]], None]


ServeSeveral = Callable[..., Awaitable[None]]
"""Serves with several processes: gets the options, the keys, the token, the listener, ``on_ready`` and ``stop``."""


async def serve(
    options: RouterOptions, *, on_ready: Ready, stop: asyncio.Event, several: ServeSeveral | None = None
) -> None:
    """Run the router until ``stop`` is set. ``on_ready`` gets the ready line as an object, once it listens.

    Raises ConfigError for settings that name no worker and no source of workers, a taken port, a bad token, key or
    workers file, and AuthenticationError if the coordinator does not take the token at the start. A coordinator that is
    away is waited for in the background.
    """
    if not options.names_a_source:
        raise ConfigError(
            "coordinator, prefill and decode, engine, or workers_file must be given: the router knows no worker"
        )
    keys = ApiKeys.from_file(options.api_key_file) if options.api_key_file else ApiKeys()
    token = b""
    if options.coordinator:
        token = member_token(options.token_file)
        hide(token)
    with listening(options.host, options.port) as listener:
        if several is not None and options.workers > 1:
            await several(options, keys, token, listener, on_ready=on_ready, stop=stop)
            return
        workers = new_workers(options)
        async with following(options, workers, token):
            await serve_workers(options, workers, keys, listener, on_ready=on_ready, stop=stop)


def new_workers(options: RouterOptions) -> Workers:
    """The table of workers that ``options`` ask for, empty."""
    return Workers(**fleet_options(options))


def fleet_options(options: RouterOptions) -> dict[str, Any]:
    """What ``options`` say of the table of workers."""
    return {
        "health": HealthOptions(
            failures_to_eject=options.failures_to_eject,
            eject_base_s=options.eject_base_s,
            eject_cap_s=options.eject_cap_s,
            slow_start_s=options.slow_start_s,
        ),
        "allowed": HostList("allow_http_host", options.allow_http_host),
    }


class Seat(Protocol):
    """The place of this process in a router of several (`router.group`)."""

    leave_port: Callable[[], None]
    """Set while the process serves: it accepts no more connections, and closes the listener."""

    def take_part(self, core: RouterCore, door: Door, app: ASGIApp, bodies: Bodies) -> ASGIApp:
        """Share what is shared. Returns the application to serve."""

    def turn(self, connections: int) -> float:
        """How long to leave a new connection to the others, where this process has so many."""


async def serve_workers(
    options: RouterOptions,
    workers: Workers,
    keys: ApiKeys,
    listener: socket.socket,
    *,
    on_ready: Ready,
    stop: asyncio.Event,
    seat: Seat | None = None,
) -> None:
    """Serve HTTP on ``listener`` over ``workers``, which others keep up to date, until ``stop`` is set."""
    sockets = share_now(options.max_connections, legs_each=LEGS_EACH, legs_max=LEGS_EACH * options.max_inflight)
    door = Door(AdmitOptions(options.max_inflight))
    core = RouterCore(options, workers, RouterMetrics(workers))
    bodies = Bodies(options)
    front = Front(core, keys, door)
    admin_keys = ApiKeys.from_file(options.admin_key_file) if options.admin_key_file else ApiKeys()
    app: ASGIApp = build_app(core, keys, door, front, AdminAccess(admin_keys, is_loopback(options.host)), bodies)
    if seat is not None:
        app = seat.take_part(core, door, app, bodies)
    try:
        async with serving(
            app,
            listener,
            options,
            bodies,
            connections_max=sockets.connections,
            name="kvxfer router http",
            find_handler=front.find,
            turn=None if seat is None else seat.turn,
        ) as http:
            if seat is not None:
                seat.leave_port = functools.partial(_leave_port, http, listener)
            try:
                on_ready(ready_line("router", options.host, listener))
                await http.wait_ended(stop.wait())
                await door.drain(options.shutdown_grace_s)
            finally:
                door.end()
    finally:
        with contextlib.suppress(Exception):
            await core.aclose()
        await workers.close()


def _leave_port(http: HttpServer, listener: socket.socket) -> None:
    http.stop_accepting()
    listener.close()
