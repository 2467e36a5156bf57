"""The router as a running server: binds, learns its workers, serves, and stops in order.

Decides the order of starting and stopping; it must never know what a request is. Logs go through `logging`; nothing
is printed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
from kvxfer.router.cors import Cors
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.following import check_workers, following
from kvxfer.router.front import Door, Front
from kvxfer.router.headers import check_passed
from kvxfer.router.metrics import RouterMetrics
from kvxfer.router.options import RouterOptions
from kvxfer.router.tracing import Tracer
from kvxfer.router.upstream import WorkerPools
from kvxfer.router.worker_key import WorkerKey, followed_worker_key
from kvxfer.rpc import coordinator_tls, load_token, token_beside
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.leg_keys import LegKeyFile, followed_leg_keys
from kvxfer.serving.limits import share_now
from kvxfer.serving.server import HttpServer, listening, ready_line, serving
from kvxfer.serving.side_port import side_ports
from kvxfer.serving.tls import ServerTls, TlsFiles
from kvxfer.serving.watching import WatchedFiles

if TYPE_CHECKING:
    from kvxfer.router.otlp import OtlpExporter

LEGS_EACH = 2
"""Connections to workers that one request may need at once."""

KEYS_POLL_S = 1.0
"""How often it is looked whether a file of keys has changed."""

Ready = Callable[[dict[str, Any]], None]
FleetT = TypeVar("FleetT", bound=Workers)


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
    _check_source(options)
    keys = ApiKeys()
    token = b""
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(followed_api_keys(keys, options))
        if options.coordinator:
            token = token_beside(options.coordinator_cert_file, options.token_file)
            hide(token)
        listener = stack.enter_context(listening(options.host, options.port))
        if several is not None and options.workers > 1:
            await several(options, keys, token, listener, on_ready=on_ready, stop=stop)
            return
        workers = new_workers(options)
        await stack.enter_async_context(following(options, workers, token))
        await serve_workers(options, workers, keys, listener, on_ready=on_ready, stop=stop)


def check(options: RouterOptions) -> None:
    """Raise ConfigError for what a start would refuse before it listens: wrong addresses of workers, wrong files.
    Nothing is written, and no other process is asked."""
    _check_source(options)
    for path, with_limits in ((options.api_key_file, True), (options.admin_key_file, False)):
        if path:
            ApiKeys.from_file(path, with_limits=with_limits)
    if options.token_file:
        load_token(options.token_file)
    coordinator_tls(options.coordinator_ca_file, options.coordinator_cert_file, options.coordinator_key_file)
    if options.leg_key_file:
        LegKeyFile(options.leg_key_file).load()
    if options.worker_api_key_file:
        WorkerKey().load(options.worker_api_key_file)
    check_workers(options, new_workers(options))
    server_tls(options)
    check_passed(options.forward_header)
    if _asks_for_spans(options):
        from kvxfer.router import otlp

        otlp.settings(options)


def _check_source(options: RouterOptions) -> None:
    if not options.names_a_source:
        raise ConfigError(
            "coordinator, prefill and decode, engine, workers_file or kubernetes_selector must be given: they name the "
            "workers"
        )


@contextlib.asynccontextmanager
async def followed_keys(keys: ApiKeys, path: str, what: str, *, with_limits: bool = True) -> AsyncIterator[ApiKeys]:
    """Within the block ``keys`` are those of the file, also after it has changed; none where ``path`` is empty. Raises
    ConfigError for a file that is wrong at the start; one that is wrong later changes nothing."""
    if not path:
        yield keys
        return

    def load() -> None:
        keys.load(path, with_limits=with_limits)

    watched = WatchedFiles([path], load, what=what, poll_s=KEYS_POLL_S)
    load()
    async with watched:
        yield keys


def followed_api_keys(keys: ApiKeys, options: RouterOptions) -> contextlib.AbstractAsyncContextManager[ApiKeys]:
    """As :func:`followed_keys`, of inference routes."""
    return followed_keys(keys, options.api_key_file, "API keys")


def followed_admin_keys(keys: ApiKeys, options: RouterOptions) -> contextlib.AbstractAsyncContextManager[ApiKeys]:
    """As :func:`followed_keys`, of admin routes."""
    return followed_keys(keys, options.admin_key_file, "admin keys", with_limits=False)


def cors_of(options: RouterOptions) -> Cors | None:
    """None where no page of another origin may read answers."""
    return Cors(options.cors_origin, allows_credentials=options.cors_credentials) if options.cors_origin else None


def new_workers(options: RouterOptions) -> Workers:
    """The table of workers that ``options`` ask for, empty."""
    return knowing(Workers(**fleet_options(options)))


def knowing(workers: FleetT) -> FleetT:
    """``workers``; a connection to the address of some that the coordinator names must then be to one of these."""

    def agents_at(url: str) -> list[str]:
        return [one.worker.agent_id for one in workers.entries() if one.given.has_lease and one.worker.url == url]

    if isinstance(workers.make_pool, WorkerPools):
        workers.make_pool.agents_at = agents_at
    return workers


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
        "make_pool": WorkerPools(
            options.worker_ca_file,
            options.worker_cert_file,
            options.worker_key_file,
            knows_identities=options.worker_names == "identities",
        ),
    }


class Seat(Protocol):
    """The place of this process in a router of several (`router.group`)."""

    leave_port: Callable[[], None]
    """Set while the process serves: it accepts no more connections, and closes the listener."""

    def take_part(self, core: RouterCore, door: Door, app: ASGIApp, bodies: Bodies) -> ASGIApp:
        """Share what is shared. Returns the application to serve."""

    def turn(self, connections: int) -> float:
        """How long to leave a new connection to the others, where this process has so many."""


def server_tls(options: RouterOptions) -> ServerTls | None:
    """What clients' connections speak; None without TLS. Raises ConfigError for files that are wrong."""
    if not options.tls_cert_file:
        return None
    return ServerTls(TlsFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file))


def _asks_for_spans(options: RouterOptions) -> bool:
    return bool(options.otlp_endpoint) or any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ)


def open_exporter(options: RouterOptions, metrics: RouterMetrics) -> OtlpExporter | None:
    """What sends spans; None, and nothing of it is imported, where no spans are asked for. Raises ConfigError."""
    if not _asks_for_spans(options):
        return None
    from kvxfer.router import otlp

    where = otlp.settings(options)
    return None if where is None else otlp.OtlpExporter(where, metrics.traced)


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
    metrics = RouterMetrics(workers)
    exporter = open_exporter(options, metrics)
    tracer = None if exporter is None else Tracer(exporter.offer, share=options.otlp_share)
    core = RouterCore(options, workers, metrics, tracer=tracer)
    bodies = Bodies(options)
    cors = cors_of(options)
    front = Front(core, keys, door, cors)
    admin_keys = ApiKeys()
    admin = AdminAccess(admin_keys, is_loopback(options.host))
    app: ASGIApp = build_app(core, keys, door, front, admin, bodies, cors)
    if seat is not None:
        app = seat.take_part(core, door, app, bodies)
    try:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(followed_admin_keys(admin_keys, options))
            core.leg_keys = await stack.enter_async_context(followed_leg_keys(options.leg_key_file))
            core.worker_key = await stack.enter_async_context(followed_worker_key(options.worker_api_key_file))
            side = await stack.enter_async_context(side_ports(app, options.host, options))
            tls = server_tls(options)
            if tls is not None:
                await stack.enter_async_context(tls.watched)
            http = await stack.enter_async_context(
                serving(
                    app,
                    listener,
                    options,
                    bodies,
                    connections_max=sockets.connections,
                    name="kvxfer router http",
                    find_handler=front.find,
                    tls=tls,
                    turn=None if seat is None else seat.turn,
                )
            )
            if seat is not None:
                seat.leave_port = functools.partial(_leave_port, http, listener)
            try:
                scheme = "http" if tls is None else "https"
                on_ready(ready_line("router", options.host, listener, scheme=scheme, **side))
                await http.wait_ended(stop.wait())
                await door.drain(options.shutdown_grace_s)
            finally:
                door.end()
    finally:
        with contextlib.suppress(Exception):
            await core.aclose()
        await workers.close()
        if exporter is not None:
            await asyncio.to_thread(exporter.close)


def _leave_port(http: HttpServer, listener: socket.socket) -> None:
    http.stop_accepting()
    listener.close()
