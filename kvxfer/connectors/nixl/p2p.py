"""Metadata from agent to agent over TCP: what NIXL's listener thread does. Decides the frames and their bounds; must
never know what a blob holds.

A frame is ``b"KVXN"``, one byte of version, one of kind, four of length (big endian) and the body. Kinds: 1 here is my
metadata; 2 send me yours; 3 forget me (a proof of 32 bytes, then my name). The port authenticates no peer, as NIXL's
does: a process that can reach it gets metadata that lets it read and write what the agent registers. So it binds where
the agent's data port binds, loopback unless the operator said otherwise."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from typing import Protocol

from kvxfer.connectors.nixl.deadline_socket import DeadlineSocket
from kvxfer.connectors.nixl.errors import nixlBackendError, nixlMismatchError
from kvxfer.connectors.nixl.metadata import BLOB_BYTES_MAX
from kvxfer.errors import KvxferError

HEAD = struct.Struct(">4sBBI")
MAGIC, VERSION = b"KVXN", 1
LOAD, SEND, FORGET = 1, 2, 3
PROOF_BYTES = 32
CONNECT_S = 1.0
FRAME_S = 5.0
"""The time limit of one exchange: to receive a frame, to send the answer, or in :func:`tell` for both together."""
CONNECTIONS_MAX = 64
log = logging.getLogger("nixl.kvxfer")


class Party(Protocol):
    """The agent whose metadata a listener gives, and which takes the metadata that comes."""

    def metadata(self) -> bytes: ...
    def load(self, blob: bytes) -> str: ...
    def forget_proven(self, name: str, proof: bytes) -> None: ...


def bounded_socket(connection: socket.socket) -> DeadlineSocket:
    """The connection with the time limit FRAME_S from now on."""
    return DeadlineSocket(connection, time.monotonic() + FRAME_S)


def send_frame(connection: DeadlineSocket, kind: int, body: bytes = b"") -> None:
    """Raises OSError."""
    connection.send(HEAD.pack(MAGIC, VERSION, kind, len(body)) + body)


def receive_frame(connection: DeadlineSocket) -> tuple[int, bytes] | None:
    """(kind, body), or None where the other side has hung up. Raises nixlMismatchError, OSError."""
    try:
        begin = connection.receive(1)
    except EOFError:
        return None
    try:
        magic, version, kind, length = HEAD.unpack(begin + connection.receive(HEAD.size - 1))
        if magic != MAGIC or version != VERSION or length > BLOB_BYTES_MAX:
            raise nixlMismatchError("this is no metadata exchange of kvxfer (NIXL's own listener speaks another one)")
        return kind, connection.receive(length)
    except EOFError:
        raise nixlMismatchError("a frame was cut off") from None


def tell(host: str, port: int, kind: int, body: bytes = b"") -> bytes | None:
    """Send one frame; where it asks for metadata, return what comes back, all within CONNECT_S and FRAME_S. Raises
    OSError, nixlMismatchError."""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        bounded = bounded_socket(connection)
        send_frame(bounded, kind, body)
        connection.shutdown(socket.SHUT_WR)
        answer = receive_frame(bounded)
    if kind != SEND:
        return None
    if answer is None or answer[0] != LOAD:
        raise nixlMismatchError("asked for metadata, something else came")
    return answer[1]


class Listener:
    """Answers each connection on a thread of its own, at most CONNECTIONS_MAX at once."""

    def __init__(self, party: Party, host: str, port: int) -> None:
        """Raises nixlBackendError where the port cannot be had."""
        self._party = party
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(CONNECTIONS_MAX)
        except OSError as error:
            self._socket.close()
            raise nixlBackendError(f"cannot listen for metadata on {host} port {port}: {error.strerror}") from None
        self.port = int(self._socket.getsockname()[1])
        # NIXL's words: where port 0 was asked for, programs find the port in them
        log.log(logging.DEBUG if port else logging.INFO, "MD listener is listening on port %d", self.port)
        self._thread = threading.Thread(target=self._accept, name="nixl-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections. Callable twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            connections = list(self._open)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(FRAME_S)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            if not self._slots.acquire(blocking=False):
                log.error("more than CONNECTIONS_MAX=%d connections to the metadata listener", CONNECTIONS_MAX)
                connection.close()
                continue
            with self._lock:
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="nixl-metadata", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while not self._is_closed:
                frame = receive_frame(bounded_socket(connection))
                if frame is None:
                    return
                self._answer(connection, *frame)
        except (KvxferError, OSError, ValueError) as error:
            if not self._is_closed:
                log.error("metadata exchange: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._open.discard(connection)
            self._slots.release()

    def _answer(self, connection: socket.socket, kind: int, body: bytes) -> None:
        if kind == LOAD:
            name = self._party.load(body)
            log.debug("metadata of agent %s came", name)
        elif kind == SEND:
            send_frame(bounded_socket(connection), LOAD, self._party.metadata())
        elif kind == FORGET and len(body) > PROOF_BYTES:
            self._party.forget_proven(body[PROOF_BYTES:].decode(), body[:PROOF_BYTES])
        else:
            raise nixlMismatchError(f"a frame of kind {kind} with {len(body)} bytes is unexpected")
