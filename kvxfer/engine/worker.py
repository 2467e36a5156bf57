"""A worker as a running process: binds, loads the model, joins the cluster, serves, and stops in order.

It decides the order of starting and stopping: a worker registers only once it can serve, and leaves only after the
blocks it promised are given back. It must never know what a request is. Nothing is printed here.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry

from kvxfer.engine.access import WorkerAccess
from kvxfer.engine.block_digests import BlockDigests
from kvxfer.engine.completion_parser import CompletionParser
from kvxfer.engine.engine import Engine
from kvxfer.engine.executor import Executor
from kvxfer.engine.http import WorkerHttp
from kvxfer.engine.metrics import EngineMetrics
from kvxfer.engine.model import LoadedModel
from kvxfer.engine.model_store import resolve
from kvxfer.engine.options import WorkerOptions
from kvxfer.engine.readiness import Readiness
from kvxfer.engine.runner import Runner
from kvxfer.engine.statistics import worker_statistics
from kvxfer.errors import KvxferError
from kvxfer.observe import hide
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.limits import share_now
from kvxfer.serving.server import in_url, listening, ready_line, serving
from kvxfer.serving.side_port import side_ports
from kvxfer.serving.threads import ABANDONABLE
from kvxfer.types import WorkerInfo

if TYPE_CHECKING:
    from kvxfer.agent import Agent, Pool

_log = logging.getLogger(__name__)

PEER_SOCKETS_MAX = 1024
"""Descriptors kept back for this worker's agent, of as many as there are: its peers' sessions and their stripes."""
Ready = Callable[[dict[str, Any]], None]


async def serve(options: WorkerOptions, *, on_ready: Ready, stop: asyncio.Event) -> None:
    """Run a worker until ``stop`` is set. ``on_ready`` gets the ready line as an object, once it serves and is known.
    Where ``stop`` is set while the model is loaded, it returns at once, and leaves the thread that loads
    (``ABANDONABLE``) behind.

    Raises ConfigError for a taken port, a model that cannot be had or a bad token file, and what entering the agent
    raises (AuthenticationError, CoordinatorUnavailableError, RefusedError).
    """
    threads, agent_id = options.thread_count(), options.new_agent_id()
    access = WorkerAccess(options, agent_id)
    with listening(options.host, options.port) as listener:
        model = await _loaded(options, threads, stop)
        if model is None:
            _log.info("stopped before the model was loaded")
            return
        torch.set_num_threads(threads)
        scheme = "https" if options.tls_cert_file else "http"
        url = f"{scheme}://{in_url(options.advertise_host or options.host)}:{listener.getsockname()[1]}"
        info = WorkerInfo(
            agent_id=agent_id,
            role=options.role,
            model=model.name,
            http_url=url,
            max_context_tokens=model.context_tokens,
            block_tokens=options.block_tokens,
        )
        metrics = EngineMetrics()
        agent = _make_agent(options, info, metrics.registry) if options.coordinator else None
        access.agent = agent
        await _serve_model(options, model, info, agent, access, metrics, listener, on_ready=on_ready, stop=stop)


async def _serve_model(
    options: WorkerOptions,
    model: LoadedModel,
    info: WorkerInfo,
    agent: Agent | None,
    access: WorkerAccess,
    metrics: EngineMetrics,
    listener: socket.socket,
    *,
    on_ready: Ready,
    stop: asyncio.Event,
) -> None:
    block_bytes = model.block_bytes(options.block_tokens)
    count = options.block_count(block_bytes)
    pool: Pool | None = None
    storage: torch.Tensor | None = None
    if agent is not None:
        pool, storage = _shared_pool(agent, model, options.block_tokens, count)
    runner = Runner(model, storage, block_count=count, block_tokens=options.block_tokens)
    executor = Executor(
        model,
        runner,
        options.limits(),
        on_transfer_failure=options.on_transfer_failure,
        room_wait_s=options.room_wait_s,
        digests=BlockDigests(runner.storage, model.layers) if options.record_block_digests else None,
        on_ttft=metrics.ttft.observe,
    )
    metrics.watch(executor)
    engine = Engine(executor, agent=agent, agent_pool=pool)
    capacity = count * options.block_tokens
    parser = CompletionParser(model, role=options.role, agent_id=info.agent_id, capacity_tokens=capacity)
    readiness = Readiness(engine, agent)
    metrics.watch_readiness(readiness)
    sockets = share_now(options.max_connections, legs_each=1, legs_max=PEER_SOCKETS_MAX)
    bodies = Bodies(options)
    http = WorkerHttp(
        engine,
        parser,
        readiness,
        bodies=bodies,
        statistics=lambda: worker_statistics(info, executor, agent),
        render_metrics=metrics.render,
    )
    app = http.app()
    engine.start()
    try:
        async with (
            access.followed(),
            side_ports(app, options.host, options) as side,
            serving(
                access.guarded(app, metrics.refused),
                listener,
                options,
                bodies,
                connections_max=sockets.connections,
                name="kvxfer worker http",
                tls=access.tls,
            ) as server,
            contextlib.AsyncExitStack() as stack,
        ):
            access.on_change(server.renew_connections)
            if agent is not None:
                await stack.enter_async_context(agent)
            stack.push_async_callback(engine.stop, options.shutdown_grace_s)
            access.registered()
            readiness.registered()
            names = {"http_url": info.http_url, "agent_id": info.agent_id, "model": info.model, **side}
            on_ready(ready_line(str(options.role), options.host, listener, **names))
            await server.wait_ended(stop.wait(), engine.failed.wait())
            if agent is not None:
                agent.set_draining()
    finally:
        await engine.stop(0.0)
        http.close()
    if engine.failure is not None:
        raise KvxferError(f"the engine failed: {engine.failure!r}")


def _shared_pool(agent: Agent, model: LoadedModel, block_tokens: int, count: int) -> tuple[Pool, torch.Tensor]:
    """The pool that peers read, and the same bytes as the engine sees them: where the model computes."""
    record, block_bytes = model.record(block_tokens), model.block_bytes(block_tokens)
    if model.device.type == "cpu":
        pool = agent.allocate_pool(record, block_count=count, block_bytes=block_bytes)
        return pool, torch.from_numpy(pool.array)
    storage = torch.zeros(count, block_bytes, dtype=torch.uint8, device=model.device)
    torch.cuda.synchronize(model.device)  # what lands from a peer must not be zeroed by what was asked for before
    return agent.register_pool(record, storage, block_count=count), storage


async def _loaded(options: WorkerOptions, threads: int, stop: asyncio.Event) -> LoadedModel | None:
    """None where it is told to stop first. The load is native code and a download, neither of which can be ended."""
    loading: concurrent.futures.Future[LoadedModel] = concurrent.futures.Future()
    loading.set_running_or_notify_cancel()

    def load() -> None:
        try:
            loading.set_result(_load(options, threads))
        except BaseException as error:
            loading.set_exception(error)

    threading.Thread(target=load, name=ABANDONABLE, daemon=True).start()
    loaded, stopping = asyncio.wrap_future(loading), asyncio.create_task(stop.wait())
    try:
        first: set[asyncio.Future[Any]] = {loaded, stopping}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        return loaded.result() if loaded.done() else None
    finally:
        loaded.cancel()
        stopping.cancel()


def _load(options: WorkerOptions, threads: int) -> LoadedModel:
    torch.set_num_threads(threads)
    path = resolve(options.model)
    name = options.served_model_name or (None if os.path.isdir(os.path.expanduser(options.model)) else options.model)
    model = LoadedModel.load(path, name=name, dtype=options.dtype, device=options.device)
    model.record(options.block_tokens)
    return model


def _make_agent(options: WorkerOptions, info: WorkerInfo, registry: CollectorRegistry) -> Agent:
    from kvxfer.agent import Agent
    from kvxfer.rpc import token_beside

    token = token_beside(options.coordinator_cert_file, options.token_file)
    hide(token)
    return Agent(info, coordinator=options.coordinator, token=token, config=options.agent_config(), registry=registry)
