"""One coordinator process: binds the port, reports when it is ready, ticks its clock, stops gracefully. Decides the
order of starting and stopping; must never know what the streams say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import grpc.aio

from kvxfer._pb import control_pb2_grpc
from kvxfer.clock import NS_PER_S, Clock, SystemClock
from kvxfer.coordinator.health import HEALTH_SERVICE, Health
from kvxfer.coordinator.hosts import RegisteredHosts
from kvxfer.coordinator.metrics import CoordinatorMetrics, MetricsServer
from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.service import CoordinatorService, TokenGate
from kvxfer.coordinator.store import MemoryStore, Store
from kvxfer.errors import ConfigError
from kvxfer.observe import hide
from kvxfer.protocol.directory import Directory
from kvxfer.protocol.handshake import session_root
from kvxfer.protocol.liveness import LivenessLimits
from kvxfer.rpc.convert import MESSAGE_BYTES_MAX
from kvxfer.rpc.link import KEEPALIVE_OPTIONS, PINGS_APART_MIN_MS
from kvxfer.rpc.token import default_token_path, load_or_create_token

log = logging.getLogger("kvxfer.coordinator")

RECEIVE_BYTES_MAX = 2 << 20
"""No message of an agent is larger, with every list and text at its bound."""
TICKS_PER_HEARTBEAT = 4
OTHER_CALLS_MAX = 64
"""Health checks and operator calls at a time, beside members and watchers."""

HANDSHAKE_MS = 5_000
"""How long a connection may hold a descriptor before it has begun to speak HTTP/2."""

SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", PINGS_APART_MIN_MS),
)


async def serve(
    options: CoordinatorOptions,
    *,
    on_ready: Callable[[dict[str, Any]], None],
    stop: asyncio.Event,
    clock: Clock | None = None,
    store: Store | None = None,
) -> None:
    """Run until ``stop`` is set, then end gracefully: agents are told, and come back to the next coordinator.

    ``on_ready`` gets what the process prints when it listens. Raises ConfigError if the port cannot be had or the token
    cannot be read. ``store`` defaults to a MemoryStore on the wall clock.
    """
    token = load_or_create_token(options.token_file or default_token_path())
    hide(token)
    clock = clock or SystemClock()
    started_us = time.time_ns() // 1000
    metrics = CoordinatorMetrics()
    service = CoordinatorService(
        options.config,
        make_directory(options, clock.now_ns(), first_revision=started_us),
        store or MemoryStore(started_us),
        session_root(token),
        clock,
        metrics,
        watchers_max=options.watchers_max,
        hosts=RegisteredHosts(options.allow_http_host),
    )
    health = Health("kvxfer.v1.Coordinator")
    server = grpc.aio.server(
        interceptors=(TokenGate(token, open_prefix=f"/{HEALTH_SERVICE}/"),),
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=options.members_max + options.watchers_max + OTHER_CALLS_MAX,
    )
    control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    server.add_generic_rpc_handlers((health.handler(),))
    host = f"[{options.host}]" if ":" in options.host and not options.host.startswith("[") else options.host
    port = _bind(server, f"{host}:{options.port}")
    exposition = None
    try:
        if options.metrics_port is not None:
            exposition = MetricsServer(metrics, options.host, options.metrics_port)
        await server.start()
        health.set_serving(True)
        on_ready(
            {
                "event": "ready",
                "role": "coordinator",
                "address": f"{host}:{port}",
                "http_url": f"http://{host}:{exposition.port}" if exposition else None,
                "pid": os.getpid(),
            }
        )
        await _run_until(stop, service, options.heartbeat_s / TICKS_PER_HEARTBEAT)
        log.info("stopping")
    finally:
        health.set_serving(False)
        service.stop()
        await server.stop(options.stop_grace_s)
        if exposition is not None:
            await asyncio.to_thread(exposition.close)


def make_directory(options: CoordinatorOptions, now_ns: int, *, first_revision: int) -> Directory:
    """The membership machine for these options, with a fresh epoch.

    A gap in our own running counts for half a heartbeat.
    """
    limits = LivenessLimits(
        suspect_after_ns=round(options.suspect_after_s * NS_PER_S),
        dead_after_ns=round(options.dead_after_s * NS_PER_S),
        gap_max_ns=round(options.heartbeat_s * NS_PER_S / 2),
    )
    epoch = secrets.token_bytes(16)
    return Directory(limits, now_ns, epoch=epoch, first_revision=first_revision, members_max=options.members_max)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0:
        raise ConfigError(f"the coordinator cannot listen on {address}: the port is taken, or the address is not ours")
    return port


async def _run_until(stop: asyncio.Event, service: CoordinatorService, tick_s: float) -> None:
    while not stop.is_set():
        service.tick()
        try:
            async with asyncio.timeout(tick_s):
                await stop.wait()
        except TimeoutError:
            continue
