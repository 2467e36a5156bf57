"""A process that serves, of a router of several: takes what the parent tells it, and the connections that it accepts.

Decides how this process takes its part: its share of new connections, its count of requests, what it passes on. What a
request needs it has from the same code as a router in one process.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from kvxfer.errors import ConfigError
from kvxfer.router.core import RouterCore
from kvxfer.router.front import Door
from kvxfer.router.group.asking import PassingOn, Questions
from kvxfer.router.group.channel import Channel, Message
from kvxfer.router.group.follower import FollowingWorkers
from kvxfer.router.group.keys import FollowingKeys
from kvxfer.router.group.messages import MemberStart, Update
from kvxfer.router.group.plain import from_plain
from kvxfer.router.group.samples import samples_of
from kvxfer.router.group.segment import CONNECTIONS, INSIDE, SERVING, SharedBoard, SharedCounts
from kvxfer.router.responses import KeptResponses
from kvxfer.router.server import Seat, fleet_options, knowing, serve_workers
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.head_as_get import HeadAsGet

log = logging.getLogger("kvxfer.router")

WAIT_EACH_S = 0.001
WAIT_MAX_S = 0.004
"""How long this process leaves a new connection to the others, while it has more than one of them."""


async def serve_member(inherited: str, *, stop: asyncio.Event) -> None:
    """Serve until the parent says stop, or ``stop`` is set, or the parent is gone.

    ``inherited`` are the descriptors of the channel, the listening socket and the shared memory, and the row there.
    """
    try:
        channel_fd, listener_fd, memory_fd, row = map(int, inherited.split(","))
        channel = await Channel.over(socket.socket(fileno=channel_fd))
        listener = socket.socket(fileno=listener_fd)
        listener.setblocking(False)
    except (ValueError, OSError):
        raise ConfigError("--member is for the router's own processes") from None
    first = await channel.receive()
    if first is None:
        return
    hello = from_plain(MemberStart, first[1])
    segment = SharedCounts(memory_fd, hello.processes + 1)
    with listener:
        await GroupMember(hello, channel, segment, row).serve(listener, stop)


class GroupMember(Seat):
    """This process in the group."""

    def __init__(self, hello: MemberStart, channel: Channel, segment: SharedCounts, row: int) -> None:
        self._hello = hello
        self._channel = channel
        self._board = board = SharedBoard(segment, row)
        self._keys = FollowingKeys(segment, row)
        self._responses = KeptResponses(segment.responses, row)
        self._questions = Questions(channel)
        self._workers = knowing(FollowingWorkers(board, channel.send, **fleet_options(hello.options)))
        self._core: RouterCore | None = None
        self._is_told = asyncio.Event()
        self._has_keys = asyncio.Event()
        self._is_told_to_stop = False
        self.leave_port: Callable[[], None] = lambda: None

    async def serve(self, listener: socket.socket, stop: asyncio.Event) -> None:
        listening = asyncio.create_task(self._listen(stop))
        looking = asyncio.create_task(self._keys.cells.look_often())
        told = asyncio.create_task(self._told_all())
        stopping = asyncio.create_task(stop.wait())
        self._channel.send("keys")
        try:
            await asyncio.wait({told, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                await serve_workers(
                    self._hello.options,
                    self._workers,
                    self._keys.keys,
                    listener,
                    on_ready=lambda line: self._serves(),
                    stop=stop,
                    seat=self,
                )
        finally:
            self._tell_samples(0)  # what was counted since the last time
            for task in (listening, looking, told, stopping):
                task.cancel()
            await self._channel.close_flushed()

    async def _told_all(self) -> None:
        await self._is_told.wait()
        await self._has_keys.wait()

    def _serves(self) -> None:
        self._board.show_self(SERVING, 1)
        self._channel.send("serving")

    async def _listen(self, stop: asyncio.Event) -> None:
        """Do what the leader says. Where that cannot be done, this process ends well, and is replaced."""
        try:
            while (message := await self._channel.receive()) is not None:
                self._hear(message, stop)
        except Exception:
            log.exception("what the process that leads said cannot be done: this one ends")
            stop.set()
            return
        if self._is_told_to_stop:
            os._exit(128 + signal.SIGTERM)  # the parent did not wait for this process: its end was forced
        log.error("the process that leads this router is gone: this one finishes what it serves")
        self.leave_port()  # another router may want it
        stop.set()

    def _hear(self, message: Message, stop: asyncio.Event) -> None:
        match message:
            case ["update", update]:
                told = from_plain(Update, update)
                self._workers.apply(told)
                self._channel.send("applied", told.version)
                self._is_told.set()
            case ["keys", told]:
                self._channel.send("keys_applied", self._keys.apply(told))
                self._has_keys.set()
            case ["measure", number]:
                self._tell_samples(number)
            case ["answer", number, status, headers, body]:
                self._questions.answered(number, status, headers, body)
            case ["stop"]:
                self._is_told_to_stop = True
                stop.set()
            case _:
                log.error("the process that leads said what is not understood: %.100r", message[0])

    def _tell_samples(self, number: int) -> None:
        if self._core is not None:
            samples = samples_of(self._core.metrics.registry)
            self._channel.send("samples", number, samples, self._core.history.drain())

    # As `server.Seat`.

    def take_part(self, core: RouterCore, door: Door, app: ASGIApp, bodies: Bodies) -> ASGIApp:
        self._core = core
        core.describe_process = self._describe
        core.responses = self._responses
        door.share(functools.partial(self._board.show_self, INSIDE), lambda: sum(self._board.elsewhere(INSIDE)))
        return HeadAsGet(PassingOn(app, self._questions, bodies))

    def _describe(self) -> dict[str, Any]:
        """``workers_inflight`` is what placement in this process takes to be in flight at all workers together."""
        return {"pid": os.getpid(), "workers_inflight": sum(self._workers.inflight().values())}

    def turn(self, connections: int) -> float:
        self._board.show_self(CONNECTIONS, connections)
        others = self._board.elsewhere(CONNECTIONS)
        ahead = connections - min(others) if others else 0
        return min(WAIT_MAX_S, ahead * WAIT_EACH_S) if ahead > 0 else 0.0
