"""Asks the workers how they are: whether they answer, what they serve, how loaded they are.

One task plans for all of them; a probe is a task only while it runs, and at most ``probes_max`` run at once. Workers
with the coordinator's lease are asked only while they are ejected, half open or doubted: their heartbeats say the rest.

Decides when a worker is asked and with which pages. What an answer means for the worker is `policy.health`'s; it must
never know a request of a client.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
import time
from collections.abc import Callable, Sequence

from kvxfer.config import check_positive
from kvxfer.policy.health import HealthEvent, HealthState
from kvxfer.router.fleet.entry import WorkerEntry
from kvxfer.router.fleet.facts import EngineIdentity, read_generated, read_metrics, read_models, read_server_info
from kvxfer.router.fleet.kinds import failure_kind
from kvxfer.router.fleet.pools import EnginePools
from kvxfer.router.fleet.worker import EngineDialect, Worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.router.upstream import UpstreamDeadlines, UpstreamError, UpstreamLimits

log = logging.getLogger("kvxfer.router")

HEALTH = "/health"
METRICS = "/metrics"
MODELS = "/v1/models"
SERVER_INFO = ("/server_info", "/get_server_info")
WITH_SERVER_INFO = frozenset({EngineDialect.SGLANG, EngineDialect.PLAIN})
PAGE_BYTES_MAX = 1 << 20
METRICS_BYTES_MAX = 4 << 20
PLAN_S = 0.02
"""At least so long between two looks at all workers."""
DOUBT_GAP_S = 0.1
"""At least so long between two probes of a worker."""
ABSENT_S = 60.0
"""How long a page that an engine does not have is not asked for."""
NOT_FOUND = 404

_SILENT = {"exhausted", "overran", "gone"}
"""Kinds of failures that say nothing of the worker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Raises ConfigError for a bad value."""

    probe_interval_s: float = 1.0
    """Between two probes of a worker that has no lease of the coordinator."""
    probe_timeout_s: float = 2.0
    """For the connection, and for the answer."""
    load_interval_s: float = 2.0
    """Between two looks at ``/metrics``."""
    identity_interval_s: float = 30.0
    """Between two looks at ``/v1/models``, once the worker said which models it serves."""
    probes_max: int = 64

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "probe_timeout_s", "load_interval_s", "identity_interval_s"):
            check_positive(name, getattr(self, name), maximum=3600.0)
        check_positive("probes_max", self.probes_max, maximum=4096)


class _Plan:
    """When one worker is asked for what."""

    __slots__ = ("due_s", "ended_s", "identity_due_s", "is_running", "load_due_s", "server_info_due_s")

    def __init__(self) -> None:
        self.due_s = self.identity_due_s = self.load_due_s = self.server_info_due_s = 0.0
        self.ended_s = -math.inf
        self.is_running = False


class Prober:
    """An async context manager: probes run inside it. ``headers`` gives what a probe of a worker carries (keys)."""

    def __init__(
        self,
        workers: Workers,
        options: ProbeOptions | None = None,
        *,
        headers: Callable[[Worker], Sequence[tuple[bytes, bytes]]] = lambda worker: (),
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._workers = workers
        self._options = options or ProbeOptions()
        self._headers = headers
        self._now = now
        self._draw = draw
        timeout_s = self._options.probe_timeout_s
        self._deadlines = UpstreamDeadlines(
            queue_s=timeout_s,
            connect_s=timeout_s,
            send_s=timeout_s,
            first_byte_s=timeout_s,
            between_chunks_s=timeout_s,
            whole_s=4 * timeout_s,
        )
        limits = UpstreamLimits(connections_max=2, waiting_max=64)
        self._pools = EnginePools(lambda url: workers.make_pool(url, limits))
        self._plans: dict[WorkerEntry, _Plan] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Prober:
        self._workers.on_probe_due = self._is_due.set
        self._task = asyncio.create_task(self._run(), name="kvxfer router probes")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._workers.on_probe_due = None
        if self._task is not None:
            tasks = {self._task, *self._running}
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._pools.close()

    async def _run(self) -> None:
        while True:
            self._is_due.clear()
            try:
                wait_s = self._plan()
            except Exception:
                log.exception("planning probes broke")
                wait_s = self._options.probe_interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_due.wait()
            await asyncio.sleep(PLAN_S)

    def _plan(self) -> float:
        """Start what is due. Returns how long nothing more will be."""
        now_s = self._now()
        self._workers.sweep()
        entries = self._workers.entries()
        if len(self._plans) > len(entries) or any(entry not in self._plans for entry in entries):
            before = self._plans
            self._plans = {entry: before.get(entry) or _Plan() for entry in entries}
            gone = {entry.worker.url for entry in before} - {entry.worker.url for entry in entries}
            self._pools.retire(gone)
        next_s = now_s + self._options.probe_interval_s
        for entry, plan in self._plans.items():
            if plan.is_running:
                continue
            due_s = self._due_s(entry, plan, now_s)
            if due_s > now_s:
                next_s = min(next_s, due_s)
            elif len(self._running) < self._options.probes_max:
                self._start(entry, plan, now_s)
        return max(0.0, next_s - now_s)

    def _due_s(self, entry: WorkerEntry, plan: _Plan, now_s: float) -> float:
        sooner_s = entry.health.probe_due_s
        if sooner_s is not None:
            return max(sooner_s, plan.ended_s + DOUBT_GAP_S)
        if not entry.given.has_lease or entry.health.state(now_s) is HealthState.HALF_OPEN:
            return plan.due_s
        return math.inf

    def _start(self, entry: WorkerEntry, plan: _Plan, now_s: float) -> None:
        # A little apart, so that the probes of many workers do not come in one beat.
        plan.due_s = now_s + self._options.probe_interval_s * (0.9 + 0.1 * self._draw())
        plan.is_running = True
        task = asyncio.create_task(self._probe(entry, plan), name="kvxfer router probe")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _probe(self, entry: WorkerEntry, plan: _Plan) -> None:
        was_due = entry.health.probe_due_s is not None
        try:
            event = await self._ask(entry, plan)
            is_away = event in (HealthEvent.PROBE_REFUSED, HealthEvent.PROBE_FAILED)
            if (is_away or not entry.has_model) and await self._move(entry):
                event = await self._ask(entry, plan)
            is_news = not was_due and entry.health.probe_due_s is not None
            if event is HealthEvent.PROBE_PASSED and is_news:
                return  # it may have answered before what requests met meanwhile, so that it is asked again
            if event is not None:
                self._workers.probed(entry, event)
        except Exception:
            log.exception("a probe broke", extra={"agent_id": entry.worker.agent_id})
        finally:
            plan.is_running = False
            plan.ended_s = self._now()
            if entry.health.probe_due_s is not None:
                self._is_due.set()

    async def _ask(self, entry: WorkerEntry, plan: _Plan) -> HealthEvent | None:
        event = await self._health(entry)
        if event is HealthEvent.PROBE_PASSED and not entry.given.has_lease:
            await self._learn(entry, plan)
        elif event is HealthEvent.PROBE_PASSED and entry.health.is_doubted:
            await self._count(entry, plan)
        return event

    async def _move(self, entry: WorkerEntry) -> bool:
        """Find an engine at another of a worker's addresses, where it is not at this one. Returns whether there is."""
        before = entry.worker.url
        others = [url for url in entry.given.addresses if url != before]
        try:
            for url in others:
                with contextlib.suppress(UpstreamError):
                    status, page = await self._get(entry, MODELS, PAGE_BYTES_MAX, url)
                    if status == 200 and read_models(page) is not None:
                        self._workers.move(entry, url)
                        return True
            return False
        finally:
            self._pools.retire({before, *others} - {one.worker.url for one in self._workers.entries()})

    async def _health(self, entry: WorkerEntry) -> HealthEvent | None:
        """None where the probe says nothing of the worker. An engine that has no such page, or asks for a key, has
        answered."""
        try:
            status, _ = await self._get(entry, HEALTH, PAGE_BYTES_MAX)
        except UpstreamError as error:
            kind = failure_kind(error)
            if kind in _SILENT:
                return None
            return HealthEvent.PROBE_REFUSED if kind == "unreachable" else HealthEvent.PROBE_FAILED
        return HealthEvent.PROBE_FAILED if status >= 500 else HealthEvent.PROBE_PASSED

    async def _learn(self, entry: WorkerEntry, plan: _Plan) -> None:
        now_s = self._now()
        try:
            # One that was away may be another engine by now.
            was_away = entry.health.state(now_s) is HealthState.OUT
            if now_s >= plan.identity_due_s or was_away or not entry.has_model:
                await self._identify(entry, plan, now_s)
            if now_s >= plan.load_due_s:
                await self._load(entry, plan, now_s)
        except UpstreamError as error:
            entry.trouble = str(error)

    async def _identify(self, entry: WorkerEntry, plan: _Plan, now_s: float) -> None:
        status, page = await self._get(entry, MODELS, PAGE_BYTES_MAX)
        identity = read_models(page) if status == 200 else None
        if identity is None:
            what = f"status {status}" if status != 200 else "no list of models"
            entry.trouble = f"GET {MODELS} of {entry.worker.url}: {what}"
            return
        entry.trouble = ""
        plan.identity_due_s = now_s + self._options.identity_interval_s
        if entry.worker.dialect in WITH_SERVER_INFO:
            identity = await self._with_server_info(entry, plan, identity, now_s)
        self._workers.learn(entry, identity=identity)

    async def _with_server_info(
        self, entry: WorkerEntry, plan: _Plan, identity: EngineIdentity, now_s: float
    ) -> EngineIdentity:
        if now_s < plan.server_info_due_s:
            return identity
        for target in SERVER_INFO:
            status, page = await self._get(entry, target, PAGE_BYTES_MAX)
            if status == 200:
                said = read_server_info(page)
                return dataclasses.replace(
                    said,
                    models=identity.models,
                    max_context_tokens=identity.max_context_tokens or said.max_context_tokens,
                )
        plan.server_info_due_s = now_s + ABSENT_S
        return identity

    async def _load(self, entry: WorkerEntry, plan: _Plan, now_s: float) -> None:
        status, page = await self._get(entry, METRICS, METRICS_BYTES_MAX)
        said = read_metrics(page, entry.worker.dp_rank) if status == 200 and not entry.given.has_lease else None
        generated = read_generated(page, entry.worker.dp_rank) if status == 200 else None
        plan.load_due_s = now_s + (ABSENT_S if status == NOT_FOUND else self._options.load_interval_s)
        self._workers.learn(entry, said=said)
        if generated is not None:
            entry.count(generated, now_s)

    async def _count(self, entry: WorkerEntry, plan: _Plan) -> None:
        """Ask a worker whose heartbeats say its load for its count of tokens, because one of its streams is silent."""
        now_s = self._now()
        with contextlib.suppress(UpstreamError):
            if now_s >= plan.load_due_s:
                await self._load(entry, plan, now_s)

    async def _get(self, entry: WorkerEntry, target: str, bytes_max: int, url: str = "") -> tuple[int, bytes]:
        pool = self._pools.get(url or entry.worker.url)
        async with await pool.request("GET", target, self._headers(entry.worker), (), self._deadlines) as response:
            return response.status, await response.read(bytes_max)
