"""Metadata through a TCPStore of torch.distributed, by the keys that NIXL uses, in the store's own protocol with the
standard library: torch is not needed. Decides keys and bounds; must never know what a blob holds.

A process that can reach the store can reach the agents in it: their metadata is a capability. A query is one byte of
kind and its arguments, numbers in the byte order of the host and strings after their length; its answer has no head at
all. One deadline holds for all of a query, dialling included (the system's resolver alone has bounds of its own)."""

from __future__ import annotations

import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from kvxfer.connectors.nixl.deadline_socket import DeadlineSocket, seconds_left
from kvxfer.connectors.nixl.errors import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.metadata import BLOB_BYTES_MAX

VALIDATE, SET, GET, CHECK, DELETE, PING = 0, 1, 3, 5, 8, 13
MAGIC = 0x3C85F7CE
READY = b"\0"
GET_CONNECT_S = 1.0
"""A get is repeated: meanwhile the thread has other work than to wait for a connection."""
T = TypeVar("T")
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class TcpStoreClient:
    """One agent's link to the store, dialled when it is first needed and again after it broke. One thread at a time;
    :meth:`close` may be called beside it."""

    NAME = "the TCPStore"

    def __init__(self, endpoint: str, connect_s: float, answer_s: float) -> None:
        """``endpoint``: ``host:port``. ``answer_s`` bounds each query. The first connection may take ``connect_s``
        before that. Raises nixlInvalidParamError."""
        host, _, port = endpoint.strip().rpartition(":")
        is_short = port.isascii() and port.isdecimal() and len(port) <= 5
        if not (host and is_short and 0 < int(port) < 65536):
            raise nixlInvalidParamError(f"NIXL_TCPSTORE_ENDPOINT must be host:port, not {endpoint!r:.200}")
        self._address = (host.strip("[]"), int(port))
        self._connect_s, self._answer_s = connect_s, answer_s
        self._was_dialled = False
        self._published: set[tuple[str, str]] = set()
        self._lock = threading.RLock()
        self._socket: DeadlineSocket | None = None
        self._is_asking = self._is_closed = False

    def open(self) -> None:
        """Nothing is needed beside this package."""

    @staticmethod
    def key(agent: str, label: str) -> str:
        """The key under which torch's clients find it too; on the wire they put a ``/`` before it."""
        return f"nixl/agents/{label}/{agent}/NULL_AGENT"

    def put(self, agent: str, label: str, blob: bytes) -> None:
        """Store the blob: once this returns the store has it. Raises nixlBackendError."""
        self._ask(functools.partial(_put, self._wire_key(agent, label), blob))
        self._published.add((agent, label))

    def get(self, agent: str, label: str) -> bytes | None:
        """The stored blob; None if there is none, or none yet. Raises nixlBackendError."""
        return self._ask(functools.partial(_get, self._wire_key(agent, label)), GET_CONNECT_S)

    def delete(self, agent: str) -> None:
        """Delete all labels of an agent that this client has stored. Raises nixlBackendError."""
        for label in sorted(label for name, label in self._published if name == agent):
            self._ask(functools.partial(_delete, self._wire_key(agent, label)))
            self._published.discard((agent, label))

    def watch(self, on_gone: Callable[[str], None]) -> None:
        """Does nothing: a TCPStore does not report deletions."""

    def close(self) -> None:
        """No query is sent after this has returned; a running one fails. May be called twice."""
        with self._lock:
            self._is_closed = True
            if self._socket is not None:
                self._socket.shut()
            if not self._is_asking:
                self._hang_up()

    def __repr__(self) -> str:
        return f"<TcpStoreClient {self._address[0]}:{self._address[1]}>"

    def _wire_key(self, agent: str, label: str) -> bytes:
        return _text(b"/" + self.key(agent, label).encode())

    def _ask(self, query: Callable[[DeadlineSocket], T], connect_s: float | None = None) -> T:
        """Every query may be repeated: on a link that was open before, a second time on a new one. ``connect_s`` bounds
        the connection where that must be less than otherwise."""
        with self._lock:
            self._check_open()
            self._is_asking = True
        try:
            return self._try(query, connect_s)
        except (OSError, EOFError, UnicodeError) as error:
            self._check_open()
            raise nixlBackendError(f"{self._where}: {error}") from None
        finally:
            with self._lock:
                self._is_asking = False
                if self._is_closed:
                    self._hang_up()

    def _try(self, query: Callable[[DeadlineSocket], T], connect_s: float | None) -> T:
        end_s = time.monotonic() + self._answer_s
        link = self._socket
        if link is not None:
            link.end_s = end_s
            try:
                return query(link)
            except (OSError, EOFError):
                self._drop()
                self._check_open()
                seconds_left(end_s)
        link = self._dial(end_s, connect_s)
        try:
            return query(link)
        except (OSError, EOFError):
            self._drop()
            raise

    def _dial(self, end_s: float, connect_s: float | None) -> DeadlineSocket:
        if connect_s is not None:
            link = DeadlineSocket(_connect(self._address, min(end_s, time.monotonic() + connect_s)), end_s)
        elif self._was_dialled:
            link = DeadlineSocket(_connect(self._address, end_s), end_s)
        else:
            self._was_dialled = True
            connection = _connect(self._address, time.monotonic() + self._connect_s)
            link = DeadlineSocket(connection, time.monotonic() + self._answer_s)
        try:
            nonce = os.urandom(4)
            link.send(bytes([VALIDATE]) + _U32.pack(MAGIC) + bytes([PING]) + nonce)
            if link.receive(4) != nonce:
                raise EOFError("what answers there is no TCPStore")
            with self._lock:
                self._check_open()
                self._socket = link
        except BaseException:
            link.close()
            raise
        return link

    def _drop(self) -> None:
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        """Under the lock, and by the asking thread alone."""
        link, self._socket = self._socket, None
        if link is not None:
            link.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise nixlBackendError(f"{self._where}: closed")

    @property
    def _where(self) -> str:
        return f"the TCPStore at {self._address[0]}:{self._address[1]}"


def _connect(address: tuple[str, int], end_s: float) -> socket.socket:
    """Connect to the first of the host's addresses that answers, each within its share of the time."""
    error: OSError | None = None
    found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for place, (family, kind, protocol, _, to) in enumerate(found):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(seconds_left(end_s) / (len(found) - place))
            connection.connect(to)
        except OSError as failure:
            connection.close()
            error = failure
        else:
            return connection
    raise error or OSError("no address")


def _put(key: bytes, blob: bytes, link: DeadlineSocket) -> None:
    link.send(bytes([SET]) + key + _text(blob) + _check(key))
    if link.receive(1) != READY:
        raise EOFError("what was put there is not there")


def _get(key: bytes, link: DeadlineSocket) -> bytes | None:
    link.send(_check(key))
    if link.receive(1) != READY:
        return None
    link.send(bytes([GET]) + key)
    (size,) = _U64.unpack(link.receive(_U64.size))
    if size > BLOB_BYTES_MAX:
        raise EOFError(f"a value of {size} bytes is no metadata")
    return link.receive(size) or None


def _delete(key: bytes, link: DeadlineSocket) -> None:
    link.send(bytes([DELETE]) + key)
    link.receive(8)


def _check(key: bytes) -> bytes:
    return bytes([CHECK]) + _U64.pack(1) + key


def _text(data: bytes) -> bytes:
    return _U64.pack(len(data)) + data
