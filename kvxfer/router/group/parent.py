"""The process that leads a router of several: it binds, learns the workers, and keeps the processes up that serve.

Decides the order of starting and stopping. It serves no request itself, and answers the control routes that the others
pass on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import random
import socket
import time
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.config import is_loopback
from kvxfer.errors import KvxferError
from kvxfer.openai.errors import error_body
from kvxfer.policy.admit import AdmitOptions
from kvxfer.router.admin import AdminAccess
from kvxfer.router.app import build_app
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.following import following
from kvxfer.router.front import Door, Front
from kvxfer.router.group import asking
from kvxfer.router.group.channel import Message
from kvxfer.router.group.children import RESTART, SETTLED_S, MemberProcess, start
from kvxfer.router.group.keys import LeadingKeys
from kvxfer.router.group.leader import Leader, LeadingWorkers, ToldMember
from kvxfer.router.group.messages import MemberStart
from kvxfer.router.group.plain import to_plain
from kvxfer.router.group.samples import Collected, GroupMetrics
from kvxfer.router.group.segment import INSIDE, SharedBoard, SharedCounts
from kvxfer.router.options import RouterOptions
from kvxfer.router.server import Ready, cors_of, fleet_options, followed_admin_keys, knowing
from kvxfer.router.tasks import cancel_all, finish
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.server import ready_line
from kvxfer.serving.side_port import side_ports

log = logging.getLogger("kvxfer.router")

MEASURE_S = 1.0
"""How often members are asked what they counted: what one counted since is lost where it is killed."""
MEASURE_WAIT_S = 0.5
"""How long ``/metrics`` waits for members that do not say it."""
HUNG_S = 10.0
"""A member that serves and says nothing for so long is killed, and replaced."""
START_S = 120.0
"""Likewise one that does not serve yet."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
STOP_MORE_S = 10.0
"""After ``shutdown_grace_s`` a member has so long until it is killed."""


def options_of_one(options: RouterOptions) -> RouterOptions:
    """What each of ``options.workers`` processes is told. Budgets and connections are divided, because each process has
    its own; ``max_inflight`` is not, because they share the count."""
    count = options.workers
    return dataclasses.replace(
        options,
        workers=1,
        probe_port=None,  # and has these ports
        metrics_port=None,
        admin_key_file="",  # the leader asks for the key
        api_key_file="",  # the leader tells what it says
        max_connections=math.ceil(options.max_connections / count),
        body_budget_bytes=max(options.max_body_bytes, options.body_budget_bytes // count),
        retry_floor_per_s=options.retry_floor_per_s / count,
        recompute_per_s=options.recompute_per_s / count,
    )


async def serve_group(
    options: RouterOptions,
    keys: ApiKeys,
    token: bytes,
    listener: socket.socket,
    *,
    on_ready: Ready,
    stop: asyncio.Event,
) -> None:
    """Run a router of ``options.workers`` processes until ``stop`` is set. Raises KvxferError where one of them ends
    before all serve."""
    segment = SharedCounts.make(options.workers + 1)
    board = SharedBoard(segment, None)
    workers = knowing(LeadingWorkers(board=board, **fleet_options(options)))
    admin_keys = ApiKeys()
    group = Group(options, keys, admin_keys, listener, segment, workers, board)
    try:
        async with followed_admin_keys(admin_keys, options), following(options, workers, token):
            running = [asyncio.create_task(group.leader.run()), asyncio.create_task(group.measure_often())]
            running.append(asyncio.create_task(group.keys.cells.look_often()))
            try:
                async with side_ports(group.control, options.host, options) as side:
                    await group.run(on_ready=lambda line: on_ready(line | side), stop=stop)
            finally:
                await finish(cancel_all(running))
    finally:
        await workers.close()
        segment.close()


class Group:
    """The processes, and what is between them."""

    def __init__(
        self,
        options: RouterOptions,
        keys: ApiKeys,
        admin_keys: ApiKeys,
        listener: socket.socket,
        segment: SharedCounts,
        workers: LeadingWorkers,
        board: SharedBoard,
    ) -> None:
        self._options = options
        self._listener = listener
        self._segment = segment
        self._hello = to_plain(MemberStart(options_of_one(options), options.workers))
        self._children: dict[int, MemberProcess] = {}
        self._collected = Collected()
        self._measures: dict[tuple[int, int], asyncio.Event] = {}
        """By row and number of the question."""
        self._measure_number = 0
        self._is_stopping = False
        self._first = [asyncio.Event() for _ in range(options.workers)]
        """Set once a process of that row has served."""
        self._asked: set[asyncio.Task[None]] = set()
        self.leader = Leader(workers, board, segment)
        self.keys = LeadingKeys(keys, segment, options.workers)
        self._door = Door(AdmitOptions(options.max_inflight))
        self._door.share(lambda count: None, lambda: sum(board.elsewhere(INSIDE)))
        self._app = self._application(workers, keys, admin_keys)

    def _application(self, workers: LeadingWorkers, keys: ApiKeys, admin_keys: ApiKeys) -> ASGIApp:
        options = self._options
        core = RouterCore(options, workers, GroupMetrics(workers, self._collected))
        self._history = core.history
        cors = cors_of(options)
        access = AdminAccess(admin_keys, is_loopback(options.host))
        front = Front(core, keys, self._door, cors)
        return build_app(core, keys, self._door, front, access, Bodies(options), cors)

    async def control(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: the control routes, as members pass them on."""
        if scope["type"] == "http" and scope["path"] == "/metrics":
            await self.measure()
        await self._app(scope, receive, send)

    async def run(self, *, on_ready: Ready, stop: asyncio.Event) -> None:
        """Start all, say that they serve, and stop them when ``stop`` is set."""
        kept = [asyncio.create_task(self._keep(row)) for row in range(self._options.workers)]
        stopping, serving = asyncio.create_task(stop.wait()), asyncio.create_task(_all(self._first))
        try:
            await asyncio.wait({serving, stopping, *kept}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not stop.is_set():
                options = self._options
                scheme = "https" if options.tls_cert_file else "http"
                on_ready(ready_line("router", options.host, self._listener, scheme=scheme, processes=options.workers))
                await asyncio.wait({stopping, *kept}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            serving.cancel()
            await self._stop(kept)
        for task in kept:
            task.result()

    async def _stop(self, kept: list[asyncio.Task[None]]) -> None:
        """Let all finish what they serve, but for the grace; kill what is left then."""
        self._is_stopping = self._door.is_draining = True
        for child in self._children.values():
            child.channel.send("stop")
        await asyncio.wait(kept, timeout=self._options.shutdown_grace_s + STOP_MORE_S)
        for child in self._children.values():
            if not child.ended.is_set():
                log.error("a process of the router did not stop, and is killed", extra={"pid": child.pid})
                child.kill()
        await asyncio.wait(kept)

    async def _keep(self, row: int) -> None:
        """Keep a process of that row up until the router stops. Raises KvxferError where the first one never serves."""
        failures = 0
        while not self._stops():
            try:
                child = await start(row, (self._listener.fileno(), self._segment.descriptor))
            except KvxferError as error:
                if not self._first[row].is_set():
                    raise
                failures += 1
                log.error("%s", error)
                await asyncio.sleep(RESTART.delay_s(failures, random=random.random()))
                continue
            self._children[row] = child
            child.channel.send("hello", self._hello)
            self.leader.join(ToldMember(row, child.channel))
            if self._stops():
                child.channel.send("stop")
            code = await child.wait(self._heard)
            self.leader.leave(row)
            self.keys.leave(row)
            self._collected.ended(row)
            self._measured(row)
            if self._stops():
                return
            if not self._first[row].is_set():
                raise KvxferError(f"a process of the router ended with code {code} before it served")
            failures = 0 if time.monotonic() - child.began_s >= SETTLED_S else failures + 1
            wait_s = RESTART.delay_s(failures, random=random.random()) if failures else 0.0
            log.error(
                "a process of the router ended, and is replaced",
                extra={"pid": child.pid, "exit_code": code, "wait_s": round(wait_s, 2)},
            )
            await asyncio.sleep(wait_s)

    def _stops(self) -> bool:
        return self._is_stopping

    def _heard(self, child: MemberProcess, message: Message) -> None:
        match message:
            case ["serving"]:
                child.is_serving.set()
                self._first[child.row].set()
            case ["keys"]:
                self.keys.join(child.row, child.channel)
            case ["keys_applied", int(version)]:
                self.keys.applied(child.row, version)
            case ["samples", int(measure), samples, history]:
                self._collected.take(child.row, samples)
                self._history.take(history)
                self._measured(child.row, measure)
            case ["ask", int(number), *question]:
                task = asyncio.create_task(self._answer(child, number, question))
                self._asked.add(task)
                task.add_done_callback(self._asked.discard)
            case _:
                self.leader.report(child.row, message)

    # Control routes.

    async def _answer(self, child: MemberProcess, number: int, question: list[Any]) -> None:
        method, path, *_ = question
        if path == "/metrics":
            await self.measure()
        try:
            said = await asking.answer(self._app, *question)
        except TimeoutError:
            log.warning("a control route did not answer in time", extra={"path": path})
            return
        except Exception as error:
            log.exception("a control route failed in the router", extra={"path": path})
            said = [500, [["content-type", "application/json"]], json.dumps(error_body(error))]
        if method not in SAFE_METHODS:
            await self.leader.settle()  # a drain holds in every process when its answer goes out
        child.channel.send("answer", number, *said)

    async def measure(self) -> None:
        """Learn what every member has counted until now; one that does not say so in time is left as it was."""
        self._measure_number += 1
        asked = []
        for row, child in self._children.items():
            if child.is_serving.is_set() and not child.ended.is_set():
                asked.append((row, self._measure_number))
                self._measures[asked[-1]] = asyncio.Event()
                child.channel.send("measure", self._measure_number)
        try:
            async with asyncio.timeout(MEASURE_WAIT_S):
                await _all([self._measures[key] for key in asked])
        except TimeoutError:
            pass
        finally:
            for key in asked:
                del self._measures[key]

    def _measured(self, row: int, number: int | None = None) -> None:
        """A member answered; or (without a number) it is gone, and answers nothing more."""
        for key, event in self._measures.items():
            if key[0] == row and number in (None, key[1]):
                event.set()

    async def measure_often(self) -> None:
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(MEASURE_S)
            await self.measure()
            # where this process itself stood still, that is not counted as their silence
            self._check_silence(min(time.monotonic() - begun_s, 2 * MEASURE_S))

    def _check_silence(self, more_s: float) -> None:
        for child in self._children.values():
            child.silent_s += more_s
            if child.ended.is_set() or child.silent_s < (HUNG_S if child.is_serving.is_set() else START_S):
                continue
            log.error(
                "a process of the router hangs, and is killed",
                extra={"pid": child.pid, "silent_s": round(child.silent_s, 1)},
            )
            child.kill()


async def _all(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
