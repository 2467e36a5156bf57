"""NIXL's transfer requests: made once, posted any number of times, one post at a time. Decides the state of a request
by NIXL's rules; must never know how bytes move.

A request to the agent itself (NIXL calls it loopback) is a copy in memory, over when :meth:`post` returns.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvxfer.connectors.nixl.endpoint import Endpoint
from kvxfer.connectors.nixl.enums import nixl_status_t
from kvxfer.connectors.nixl.errors import (
    nixlError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlRepostActiveError,
    translate,
    translated,
)
from kvxfer.connectors.nixl.remotes import RemoteAgent
from kvxfer.errors import PeerGoneError
from kvxfer.transport.base import as_blocks
from kvxfer.transport.batch import TransferBatch
from kvxfer.transport.plan import TransferPlan
from kvxfer.types import Lane

RELEASE_S = 1.0
"""How long a release waits until a cancelled transfer no longer uses the memory."""
IN_PROG, SUCCESS = nixl_status_t.NIXL_IN_PROG, nixl_status_t.NIXL_SUCCESS


@dataclasses.dataclass(frozen=True)
class nixlXferTelemetry:
    """The telemetry of a finished transfer: microseconds (``startTime`` on the steady clock), bytes, descriptors. NIXL
    has no ``lane``."""

    startTime: int = 0
    postDuration: int = 0
    xferDuration: int = 0
    totalBytes: int = 0
    descCount: int = 0
    lane: Lane | None = None


OnEnd: TypeAlias = Callable[[nixlXferTelemetry | nixlError], None]


class TransferRequest(Protocol):
    """What a transfer handle stands for."""

    backend: int

    def post(self, message: bytes) -> None: ...
    def status(self) -> nixl_status_t: ...
    def release(self) -> None: ...
    def telemetry(self) -> nixlXferTelemetry: ...
    def estimate_us(self) -> int | None: ...


class RemoteRequest:
    """A request between this agent and another."""

    def __init__(
        self,
        endpoint: Endpoint,
        remote: RemoteAgent,
        plan: TransferPlan,
        message: bytes,
        backend: int,
        on_end: OnEnd | None = None,
    ) -> None:
        """``on_end`` is called once for each post with its outcome, when :meth:`status` first sees it."""
        self.backend = backend
        self._on_end = on_end
        self._endpoint = endpoint
        self._remote = remote
        self._plan = plan
        self._message = message
        self._payload: bytes | None = endpoint.link.wrap(message) if message else None
        self._post: TransferBatch | None = None
        self._unseen: TransferBatch | None = None
        self._lock = threading.Lock()
        self._start_us = 0

    def post(self, message: bytes) -> None:
        """Start it (again). A message replaces the one before, for later posts too.

        Raises nixlNotFoundError (the remote was removed), nixlRepostActiveError, and what a start can raise.
        """
        link = self._endpoint.link
        self._check_known()
        if self._post is not None and not self._post.poll().is_final:
            raise nixlRepostActiveError(f"the transfer is under way: {self._post!r}")
        if message:
            self._payload, self._message = link.wrap(message), message
        self._start_us = time.monotonic_ns() // 1000
        with translated():
            post = link.poster.start(self._plan, notification=self._payload)
        self._unseen = post
        self._post = post

    def status(self) -> nixl_status_t:
        """Raises nixlNotPostedError, nixlNotFoundError (the remote was removed meanwhile), and what ended it."""
        post = self._post
        if post is None:
            raise nixlNotPostedError("the transfer was not posted")
        if not post.is_final:
            self._endpoint.poll()
        if not post.is_final:
            self._check_known()
            return IN_PROG
        if post.error is None:
            if self._is_first_to_see(post):
                self._measure(post)
            return SUCCESS
        if isinstance(post.error, PeerGoneError):
            self._check_known()
        error = translate(post.error)
        if self._is_first_to_see(post) and self._on_end is not None:
            self._on_end(error)
        raise error

    def release(self) -> None:
        """Cancel it and wait until the memory is free. Raises nixlRepostActiveError if that takes too long."""
        post = self._post
        if post is None or not self._endpoint.is_open:
            return
        if not post.is_final:
            post.cancel()
        if not post.wait_drained(RELEASE_S):
            raise nixlRepostActiveError(f"the transfer was cancelled and still uses its memory: {post!r}")

    def telemetry(self) -> nixlXferTelemetry:
        """Telemetry, of a running transfer as far as known. Raises as :meth:`status`."""
        self.status()
        assert self._post is not None
        return self._taken(self._post)

    def _taken(self, post: TransferBatch) -> nixlXferTelemetry:
        seen = post.statistics()
        post_us = max(1, round(seen.post_us))
        transfer_us = max(post_us, round(seen.transfer_us))
        return nixlXferTelemetry(self._start_us, post_us, transfer_us, seen.bytes, seen.elements, seen.lane)

    def estimate_us(self) -> int | None:
        self._check_known()
        lane = None if self._post is None else self._post.statistics().lane
        seconds = self._remote.estimate_s(lane, self._plan.nbytes)
        return None if seconds is None else max(1, round(seconds * 1e6))

    def _check_known(self) -> None:
        if self._remote.is_gone:
            raise nixlNotFoundError(f"agent {self._remote.name!r} was removed after this transfer was made")

    def _is_first_to_see(self, post: TransferBatch) -> bool:
        """Whether no thread was told yet how ``post`` ended; several threads may ask."""
        with self._lock:
            if self._unseen is not post:
                return False
            self._unseen = None
            return True

    def _measure(self, post: TransferBatch) -> None:
        seen = post.statistics()
        if seen.lane is not None:
            self._remote.speed.measured(seen.lane, seen.bytes, seen.transfer_us / 1e6)
        if self._on_end is not None:
            self._on_end(self._taken(post))


class InstantRequest:
    """A request that is over when :meth:`post` returns: one without bytes, whose message is sent as any other."""

    def __init__(
        self,
        message: bytes,
        backend: int,
        deliver: Callable[[bytes], None],
        check: Callable[[], None],
        on_end: OnEnd | None = None,
    ) -> None:
        """``deliver`` and ``check`` raise what posting a request to that agent raises."""
        self.backend = backend
        self._message = message
        self._deliver = deliver
        self._check = check
        self._on_end = on_end
        self._telemetry: nixlXferTelemetry | None = None

    def post(self, message: bytes) -> None:
        self._check()
        self._message = message or self._message
        telemetry = self._move()
        if self._message:
            self._deliver(self._message)
        self._telemetry = telemetry
        if self._on_end is not None:
            self._on_end(telemetry)

    def _move(self) -> nixlXferTelemetry:
        return nixlXferTelemetry(time.monotonic_ns() // 1000, 1, 1)

    def status(self) -> nixl_status_t:
        if self._telemetry is None:
            raise nixlNotPostedError("the transfer was not posted")
        return SUCCESS

    def release(self) -> None:
        pass

    def telemetry(self) -> nixlXferTelemetry:
        self.status()
        assert self._telemetry is not None
        return self._telemetry

    def estimate_us(self) -> int | None:
        return None


class LoopRequest(InstantRequest):
    """A request between an agent and itself."""

    def __init__(
        self, source: npt.NDArray[np.uint64], destination: npt.NDArray[np.uint64], *arguments: Any, **options: Any
    ) -> None:
        """Piece i of ``source`` goes to piece i of ``destination``; both shape [n, 2] (address, length). ``check``
        raises where the memory is not registered any more; else as :class:`InstantRequest`.

        Raises nixlInvalidParamError where they do not pair.
        """
        if len(source) != len(destination) or not np.array_equal(source[:, 1], destination[:, 1]):
            raise nixlInvalidParamError("the descriptors of both sides do not pair by number and length")
        super().__init__(*arguments, **options)
        self._runs = _join(source, destination)
        self._nbytes, self._pieces = int(source[:, 1].sum()), len(source)

    def _move(self) -> nixlXferTelemetry:
        begun_ns = time.monotonic_ns()
        for source, destination, length in self._runs:
            ctypes.memmove(destination, source, length)
        took_us = max(1, (time.monotonic_ns() - begun_ns) // 1000)
        return nixlXferTelemetry(begun_ns // 1000, took_us, took_us, self._nbytes, self._pieces, Lane.MEMORY)

    def estimate_us(self) -> int | None:
        return None if self._telemetry is None else self._telemetry.xferDuration


def as_indices(indices: object) -> npt.NDArray[np.uint32]:
    """Indices of a prepared list. Raises nixlInvalidParamError for anything else, an empty list among it."""
    array = np.asarray(indices)
    if array.dtype.kind == "f" and bool((array == np.floor(array)).all()):
        array = array.astype(np.int64)  # NIXL casts them: whole numbers it is
    with translated():
        return as_blocks(array)


def state_of(status: nixl_status_t) -> str:
    """The word that NIXL's Python uses for it."""
    return "DONE" if status == SUCCESS else "PROC" if status == IN_PROG else "ERR"


def _join(source: npt.NDArray[np.uint64], destination: npt.NDArray[np.uint64]) -> list[tuple[int, int, int]]:
    """(from, to, length), neighbours on both sides as one."""
    follows = (source[1:, 0] == source[:-1, 0] + source[:-1, 1]) & (
        destination[1:, 0] == destination[:-1, 0] + destination[:-1, 1]
    )
    begins = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.add.reduceat(source[:, 1], begins)
    return list(zip(source[begins, 0].tolist(), destination[begins, 0].tolist(), lengths.tolist(), strict=True))
