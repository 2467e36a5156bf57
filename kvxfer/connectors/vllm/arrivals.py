"""Prompts that have arrived in vLLM's API server and not yet at its engine. The server tokenises one text after the
other, and no step of the engine shows those that wait. A middleware in the server reports them to the engine's first
rank.

``vllm serve ... --middleware kvxfer.connectors.vllm.arrivals.Arrivals``. As long as the server has a prompt, it repeats
that by datagrams. They go to a Unix socket with the agent's name, in a directory that only this user can enter. The
middleware never waits for the engine, and changes nothing of a request. Without it, and for requests of more than
BODY_MAX bytes, a prompt must reach the engine within ``unknown_wait_s``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import pathlib
import random
import socket
import struct
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvxfer.connectors.vllm.arrival_place import find_socket, make_socket
from kvxfer.connectors.vllm.params import PrefillLeg, parse
from kvxfer.errors import ConfigError, InvalidArgumentError
from kvxfer.types import TransferId, check_agent_id

log = logging.getLogger("kvxfer.vllm")

REPEAT_S = 1.0
"""The interval at which the server repeats that it has a prompt: short enough that an engine that missed one message
does not call the prompt unknown."""
AGAIN_S = (0.05, 0.2)
"""The kernel queues about ten datagrams. One that finds no room is sent again after a random time in this range."""
GONE_TRIES = 20
"""How often the end of a prompt is repeated; an engine that got no message forgets it after ARRIVED_S."""
BODY_MAX = 1 << 20
"""Longer bodies are not read: that would delay other requests."""
_HERE, _GONE = b"+", b"-"
_FULL = (errno.EAGAIN, errno.ENOBUFS)
_CREDENTIALS = struct.Struct("3i")

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[MutableMapping[str, Any], _Receive, _Send], Awaitable[None]]


def arrival_of(body: bytes | bytearray) -> tuple[str, TransferId] | None:
    """The agent of the engine that will compute the prompt, and its transfer id, if that request is a prefill leg that
    other engines may wait for."""
    if b'"do_remote_decode"' not in body:
        return None
    try:
        params = json.loads(body).get("kv_transfer_params")
        leg = parse(params)
        if not isinstance(leg, PrefillLeg) or leg.transfer_id is None:
            return None
        return check_agent_id(params["source"]["agent_id"]), leg.transfer_id
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, InvalidArgumentError):
        return None  # the server says what is wrong with it


class _Body:
    """The body of one request, until it has been read."""

    def __init__(self) -> None:
        self._bytes: bytearray | None = bytearray()

    def __len__(self) -> int:
        return len(self._bytes or b"")

    def add(self, message: _Message) -> tuple[str, TransferId] | None:
        """Add a message. Returns the arrival once the body is complete. A complete body, and one of more than BODY_MAX
        bytes, is dropped."""
        if self._bytes is None or message["type"] != "http.request":
            return None
        more = message.get("body", b"")
        if len(self._bytes) + len(more) > BODY_MAX:
            self._bytes = None
            return None
        self._bytes += more
        if message.get("more_body"):
            return None
        whole, self._bytes = self._bytes, None
        return arrival_of(whole)


class Arrivals:
    """The middleware, around an ASGI application."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._saying: set[asyncio.Task[None]] = set()
        """Tasks that still report the end of a prompt."""

    async def __call__(self, scope: MutableMapping[str, Any], receive: _Receive, send: _Send) -> None:
        """The ASGI call: serve one request, and report it while it is here."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = _Body()
        arrival: tuple[str, TransferId] | None = None
        saying: asyncio.Task[None] | None = None

        async def look() -> _Message:
            nonlocal arrival, saying
            message = await receive()
            found = body.add(message)
            if found is not None:
                arrival = found
                saying = asyncio.create_task(self._keep_saying(*found, is_said=self._say(*found, _HERE)))
            return message

        try:
            await self._app(scope, look, send)
        finally:
            if arrival is not None and saying is not None:
                saying.cancel()
                if not self._say(*arrival, _GONE):
                    task = asyncio.create_task(self._say_gone(*arrival))
                    self._saying.add(task)
                    task.add_done_callback(self._saying.discard)

    async def _keep_saying(self, agent_id: str, transfer_id: TransferId, *, is_said: bool) -> None:
        while True:
            await asyncio.sleep(REPEAT_S if is_said else random.uniform(*AGAIN_S))
            is_said = self._say(agent_id, transfer_id, _HERE)

    async def _say_gone(self, agent_id: str, transfer_id: TransferId) -> None:
        for _ in range(GONE_TRIES):
            await asyncio.sleep(random.uniform(*AGAIN_S))
            if self._say(agent_id, transfer_id, _GONE):
                return

    def _say(self, agent_id: str, transfer_id: TransferId, what: bytes) -> bool:
        """Send one datagram. Returns False if the kernel's queue was full: try again soon. True: it was sent, or no
        listener is there that a second try could reach."""
        path = find_socket(agent_id)
        if path is None:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
                own.setblocking(False)
                own.sendto(what + transfer_id.raw, path)
        except OSError as error:
            return error.errno not in _FULL
        return True


class ArrivalSocket:
    """Where an engine's first rank receives arrivals. Runs on its agent's loop."""

    def __init__(self, agent_id: str, on_arrival: Callable[[TransferId, bool], None]) -> None:
        """``on_arrival(transfer_id, is_here)``: the prompt is at the API server, or it has left."""
        self._on_arrival = on_arrival
        self._socket: socket.socket | None = None
        self._path: pathlib.Path | None = None
        heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        heard.setblocking(False)
        try:
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._path = make_socket(heard, agent_id)
        except (OSError, AttributeError, ConfigError) as error:  # another engine has the name, or no such sockets
            heard.close()
            log.info("arrivals at the API server cannot be received: %s", error)
            return
        self._socket = heard
        asyncio.get_running_loop().add_reader(heard, self._hear)

    def close(self) -> None:
        """Callable twice."""
        if self._socket is not None and self._path is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            with contextlib.suppress(OSError):
                self._path.unlink()
            self._socket.close()
            self._socket = None

    def _hear(self) -> None:
        while self._socket is not None:
            try:
                payload, ancillary, _, _ = self._socket.recvmsg(64, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return
            users = [
                _CREDENTIALS.unpack(data)[1]
                for level, kind, data in ancillary
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size
            ]
            if users == [os.getuid()] and len(payload) == 17 and payload[:1] in (_HERE, _GONE):
                self._on_arrival(TransferId(payload[1:]), payload[:1] == _HERE)
