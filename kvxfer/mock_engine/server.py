"""Starts and stops the engines of one process, and says where they are.

Decides the order of starting and the ready line. It must never know what an engine answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from kvxfer.mock_engine.claims import KvClaims
from kvxfer.mock_engine.engine import MockEngine
from kvxfer.mock_engine.options import EngineRole, MockEngineOptions
from kvxfer.mock_engine.port import EnginePort, listening

log = logging.getLogger("kvxfer.mock_engine")

CLOSE_TURNS = 3
"""Turns of the loop in which closed sockets are let go of."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _described(engine: MockEngine, host: str, index: int) -> dict[str, Any]:
    options = engine.options
    shown: dict[str, Any] = {
        "port": engine.port,
        "role": engine.role,
        "kind": options.kind,
        "http_url": f"http://{_in_url(host)}:{engine.port}",
        "engine_id": engine.engine_id,
    }
    if engine.bootstrap_port and engine.role is not EngineRole.DECODE:
        shown["bootstrap_port"] = engine.bootstrap_port
    if options.kv_events_port:
        shown["kv_events"] = f"tcp://{_in_url(host)}:{options.kv_events_port + index}"
    if options.kv_events_replay_port:
        shown["kv_events_replay"] = f"tcp://{_in_url(host)}:{options.kv_events_replay_port + index}"
    return shown


async def serve(options: MockEngineOptions, *, on_ready: Callable[[dict[str, Any]], None], stop: asyncio.Event) -> None:
    """Run the engines until ``stop`` is set. Raises OSError where a port is taken, ConfigError for KV events'."""
    claims = KvClaims(dials_anywhere=options.insecure)
    engines: dict[int, MockEngine] = {}
    opened: list[EnginePort] = []
    sockets: list[socket.socket] = []
    try:
        for port in options.port_list:
            sockets.append(listening(options.host, port))
        for index, listener in enumerate(tuple(sockets)):
            engine = MockEngine(options, index, listener.getsockname()[1], claims)
            engines[engine.port] = engine
            opened.append(EnginePort(engine, engines, listener))
            claims.add(engine, engine.port)
            if engine.bootstrap_port and engine.role is not EngineRole.DECODE:
                bootstrap = listening(options.host, engine.bootstrap_port)
                sockets.append(bootstrap)
                opened.append(EnginePort(engine, engines, bootstrap))
                claims.add(engine, engine.bootstrap_port)
        for one in opened:
            await one.listen()
        shown = [_described(engine, options.host, index) for index, engine in enumerate(engines.values())]
        first = shown[0]
        on_ready(
            {
                "event": "ready",
                "role": "mock-engine",
                "address": first["http_url"].removeprefix("http://"),
                "http_url": first["http_url"],
                "pid": os.getpid(),
                "engines": shown,
            }
        )
        await stop.wait()
    finally:
        for engine in engines.values():
            engine.close()
        for one in opened:
            one.close()
        for listener in sockets:
            listener.close()
        for _ in range(CLOSE_TURNS):
            await asyncio.sleep(0)
