"""One coordinator process: binds the port, reports when it is ready, ticks its clock, stops gracefully. Decides the
order of starting and stopping; must never know what the streams say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio

from kvxfer._pb import control_pb2_grpc
from kvxfer.clock import NS_PER_S, Clock, SystemClock
from kvxfer.coordinator.acquaintances import Acquaintances
from kvxfer.coordinator.gate import Gate
from kvxfer.coordinator.health import Health
from kvxfer.coordinator.hosts import RegisteredHosts
from kvxfer.coordinator.keeper import StoreKeeper
from kvxfer.coordinator.leg_keys import LegKeys
from kvxfer.coordinator.listening import ControlPort
from kvxfer.coordinator.metrics import CoordinatorMetrics, MetricsServer
from kvxfer.coordinator.options import CoordinatorOptions
from kvxfer.coordinator.peers import PeerWatches
from kvxfer.coordinator.receivers import Receivers
from kvxfer.coordinator.service import CoordinatorService
from kvxfer.coordinator.store import EtcdFiles, Store, make_store
from kvxfer.errors import ConfigError, CoordinatorUnavailableError
from kvxfer.observe import hide
from kvxfer.protocol.directory import Directory
from kvxfer.protocol.handshake import session_root
from kvxfer.protocol.liveness import LivenessLimits
from kvxfer.protocol.pace import Pace
from kvxfer.rpc.token import default_token_path, load_or_create_token
from kvxfer.trust.files import FollowedFiles, IdentityFiles
from kvxfer.trust.identity import CertRole
from kvxfer.trust.revoked import RevokedList

log = logging.getLogger("kvxfer.coordinator")

TICKS_PER_HEARTBEAT = 4
OTHER_CALLS_MAX = 64
"""Health checks and operator calls at a time, beside members and watchers."""
TRUST_LOOK_S = 1.0
"""How often certificates, CAs and the list of revoked ones are looked at."""
TOLD_S = 0.2
"""How long streams get to hear why they end."""
CAS_CHANGED = "the coordinator believes other CAs now: connect again"
LEASE_BEYOND_S = 2.0
"""How much longer than an agent's patience with its coordinator the store's lease on that coordinator lasts."""


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
    cannot be read, or the store can never be used as it is. ``store`` defaults to what the options name.
    """
    token = load_or_create_token(options.token_file or default_token_path())
    hide(token)
    clock = clock or SystemClock()
    started_us = time.time_ns() // 1000
    metrics = CoordinatorMetrics()
    files = _tls_files(options)
    revoked = RevokedList(options.revoked_file)
    gate = Gate(files.newest.identity.cluster if files is not None else "", revoked, metrics)
    lease_s = options.dead_after_s + LEASE_BEYOND_S
    store = store or make_store(options.store, started_us, lease_s=lease_s, files=_store_files(options))
    directory = make_directory(options, clock.now_ns(), first_revision=started_us, is_shared=store.is_shared)
    keeper = StoreKeeper(directory, store, clock)
    root = session_root(token)
    receivers = Receivers(directory, options.whole_view_max)
    service = CoordinatorService(
        options.config,
        directory,
        keeper,
        root,
        clock,
        metrics,
        receivers,
        watchers_max=options.watchers_max,
        hosts=RegisteredHosts(options.allow_http_host),
        gate=gate,
        leg_keys=LegKeys(root, clock, period_s=options.leg_key_period_s, wall_s=started_us / 1e6),
    )
    peers = PeerWatches(keeper, token, files)
    acquaintances = Acquaintances(directory, receivers, keeper.address_of, token, files)
    if store.is_shared:
        receivers.on_elsewhere = acquaintances.add
    health = Health("kvxfer.v1.Coordinator")

    def add_services(server: grpc.aio.Server) -> None:
        control_pb2_grpc.add_CoordinatorServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        server.add_generic_rpc_handlers((health.handler(),))

    control_port = ControlPort(
        options.host,
        options.port,
        add_services,
        token=token,
        files=files,
        calls_max=options.members_max + options.watchers_max + OTHER_CALLS_MAX,
    )
    exposition = None
    try:
        if options.metrics_port is not None:
            exposition = MetricsServer(metrics, options.host, options.metrics_port)
        await keeper.start(_reached_at(options, control_port.address))
        await control_port.start()
        health.set_serving(True)
        on_ready(
            {
                "event": "ready",
                "role": "coordinator",
                "address": control_port.address,
                "http_url": f"http://{control_port.host}:{exposition.port}" if exposition else None,
                "pid": os.getpid(),
            }
        )
        following = asyncio.create_task(_follow_trust(service, control_port, files, revoked, metrics))
        try:
            tick_s = options.heartbeat_s / TICKS_PER_HEARTBEAT
            await _run_until(stop, service, peers, tick_s, lambda: (following, *keeper.tasks, *acquaintances.tasks))
        finally:
            following.cancel()
            await asyncio.wait([following])
        log.info("stopping")
    finally:
        health.set_serving(False)
        service.stop()
        await acquaintances.close()
        await peers.close()
        await control_port.stop(options.stop_grace_s)
        await keeper.close()
        if exposition is not None:
            await asyncio.to_thread(exposition.close)


def make_directory(options: CoordinatorOptions, now_ns: int, *, first_revision: int, is_shared: bool) -> Directory:
    """The membership machine for these options, with a fresh epoch. ``is_shared``: other coordinators share the store.

    A gap in our own running counts for half a heartbeat.
    """
    limits = LivenessLimits(
        suspect_after_ns=round(options.suspect_after_s * NS_PER_S),
        dead_after_ns=round(options.dead_after_s * NS_PER_S),
        gap_max_ns=round(options.heartbeat_s * NS_PER_S / 2),
    )
    return Directory(
        limits,
        now_ns,
        epoch=secrets.token_bytes(16),
        first_revision=first_revision,
        members_max=options.members_max,
        is_shared=is_shared,
        pace=Pace(options.heartbeat_s, options.dead_after_s, options.heartbeats_a_s_max),
    )


def _tls_files(options: CoordinatorOptions) -> FollowedFiles | None:
    """None without TLS. Raises ConfigError for files that are wrong, or that are no coordinator's."""
    if not options.tls_cert_file:
        return None
    settings = ("tls_cert_file", "tls_client_ca_file")
    files = FollowedFiles(
        IdentityFiles(options.tls_cert_file, options.tls_key_file, options.tls_client_ca_file, settings, is_server=True)
    )
    identity = files.newest.identity
    if identity.role is not CertRole.COORDINATOR:
        raise ConfigError(f"tls_cert_file: {options.tls_cert_file} is of {identity}, and not of a coordinator")
    return files


def _store_files(options: CoordinatorOptions) -> EtcdFiles | None:
    """None where there is no TLS to the store."""
    if not options.store_ca_file:
        return None
    return EtcdFiles(options.store_ca_file, options.store_cert_file, options.store_key_file)


def _reached_at(options: CoordinatorOptions, bound: str) -> str:
    """Where other coordinators reach this one; empty where only the operator could know."""
    is_any = options.host.strip("[]") in ("0.0.0.0", "::", "")
    if is_any and not options.advertise_address and options.store.startswith("etcd:"):
        log.warning("other coordinators do not learn loads from this one: --advertise-address says where it is")
    return options.advertise_address or ("" if is_any else bound)


async def _follow_trust(
    service: CoordinatorService,
    control_port: ControlPort,
    files: FollowedFiles | None,
    revoked: RevokedList,
    metrics: CoordinatorMetrics,
) -> None:
    """End what is no longer trusted, for ever."""
    while files is not None:
        metrics.certificate_ends(files.newest.ends_s)
        await asyncio.sleep(TRUST_LOOK_S)
        if revoked.look():
            service.end_revoked()
        files.look()
        if files.dropped:
            log.warning("a CA was taken away: all connections are made anew")
            service.close_for(CoordinatorUnavailableError(CAS_CHANGED))
            await asyncio.sleep(TOLD_S)
            await control_port.restart()
            service.reopen()


async def _run_until(
    stop: asyncio.Event,
    service: CoordinatorService,
    peers: PeerWatches,
    tick_s: float,
    tasks: Callable[[], Iterable[asyncio.Task[None]]],
) -> None:
    """``tasks``: what runs beside it for ever. Raises what one of these raises: a coordinator without it would seem
    alive."""
    while not stop.is_set():
        for task in tasks():
            if task.done():
                task.result()
        service.tick()
        await peers.reconcile()
        try:
            async with asyncio.timeout(tick_s):
                await stop.wait()
        except TimeoutError:
            continue
