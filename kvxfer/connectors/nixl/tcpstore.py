"""Metadata through a TCPStore of torch.distributed, by the keys that NIXL uses, in the store's own protocol with the
standard library: torch is not needed. Decides keys and bounds; must never know what a blob holds.

Who can reach the store can reach the agents in it: their metadata is a capability. A query is one byte of kind and its
arguments, numbers in the byte order of the host and strings after their length; its answer has no head at all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

from kvxfer.connectors.nixl.errors import nixlBackendError, nixlInvalidParamError
from kvxfer.connectors.nixl.metadata import BLOB_BYTES_MAX

VALIDATE, SET, GET, CHECK, DELETE, PING = 0, 1, 3, 5, 8, 13
MAGIC = 0x3C85F7CE
READY = b"\0"
T = TypeVar("T")
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")


class TcpStoreClient:
    """One agent's line to the store, dialled when it is first needed and again after it broke. One thread at a time."""

    NAME = "the TCPStore"

    def __init__(self, endpoint: str, connect_s: float, answer_s: float) -> None:
        """``endpoint``: ``host:port``. ``connect_s`` bounds the first dialling, ``answer_s`` all that comes after it,
        between two pieces. Raises nixlInvalidParamError."""
        host, colon, port = endpoint.strip().rpartition(":")
        if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise nixlInvalidParamError(f"NIXL_TCPSTORE_ENDPOINT must be host:port, not {endpoint!r}")
        self._address = (host.strip("[]"), int(port))
        self._connect_s, self._answer_s = connect_s, answer_s
        self._line: socket.socket | None = None
        self._published: set[tuple[str, str]] = set()

    @staticmethod
    def key(agent: str, label: str) -> str:
        """By which torch's clients find it too; on the wire they put a ``/`` before it."""
        return f"nixl/agents/{label}/{agent}/NULL_AGENT"

    def put(self, agent: str, label: str, blob: bytes) -> None:
        """Once this returns the store has it. Raises nixlBackendError."""
        self._ask(functools.partial(_put, self._wire_key(agent, label), blob))
        self._published.add((agent, label))

    def get(self, agent: str, label: str) -> bytes | None:
        """None where there is nothing, or nothing yet. Raises nixlBackendError."""
        return self._ask(functools.partial(_get, self._wire_key(agent, label)))

    def delete(self, agent: str) -> None:
        """All labels of an agent that this client has put there. Raises nixlBackendError."""
        for label in sorted(label for name, label in self._published if name == agent):
            self._ask(functools.partial(_delete, self._wire_key(agent, label)))
            self._published.discard((agent, label))

    def close(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def __repr__(self) -> str:
        return f"<TcpStoreClient {self._address[0]}:{self._address[1]}>"

    def _wire_key(self, agent: str, label: str) -> bytes:
        return _text(b"/" + self.key(agent, label).encode())

    def _ask(self, query: Callable[[socket.socket], T]) -> T:
        """Every query may be repeated: on a line that was open before, a second time on a new one."""
        for is_last in (self._line is None, True):
            try:
                line = self._line = self._line or self._dial()
                return query(line)
            except (OSError, EOFError) as error:
                self.close()
                if is_last:
                    host, port = self._address
                    raise nixlBackendError(f"the TCPStore at {host}:{port}: {error}") from None
        raise AssertionError

    def _dial(self) -> socket.socket:
        line = socket.create_connection(self._address, self._connect_s)
        self._connect_s = self._answer_s
        try:
            line.settimeout(self._answer_s)
            nonce = os.urandom(4)
            line.sendall(bytes([VALIDATE]) + _U32.pack(MAGIC) + bytes([PING]) + nonce)
            if _receive(line, 4) != nonce:
                raise EOFError("what answers there is no TCPStore")
        except BaseException:
            with contextlib.suppress(OSError):
                line.close()
            raise
        return line


def _put(key: bytes, blob: bytes, line: socket.socket) -> None:
    line.sendall(bytes([SET]) + key + _text(blob) + _check(key))
    if _receive(line, 1) != READY:
        raise EOFError("what was put there is not there")


def _get(key: bytes, line: socket.socket) -> bytes | None:
    line.sendall(_check(key))
    if _receive(line, 1) != READY:
        return None
    line.sendall(bytes([GET]) + key)
    (size,) = _U64.unpack(_receive(line, _U64.size))
    if size > BLOB_BYTES_MAX:
        raise EOFError(f"a value of {size} bytes is no metadata")
    return _receive(line, size) or None


def _delete(key: bytes, line: socket.socket) -> None:
    line.sendall(bytes([DELETE]) + key)
    _receive(line, 8)


def _check(key: bytes) -> bytes:
    return bytes([CHECK]) + _U64.pack(1) + key


def _text(data: bytes) -> bytes:
    return _U64.pack(len(data)) + data


def _receive(line: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = line.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("it hung up")
        data += part
    return bytes(data)
