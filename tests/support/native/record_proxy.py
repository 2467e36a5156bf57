"""A machine on the way that knows what a TLS record is: of one connection it changes, cuts, repeats, swaps, drops,
forges or replays one record, as it was armed, and says whether it did. It has no key. Must never know a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator

HEADER_BYTES = 5
RECORD_TYPES = range(20, 25)
CHANGE_CIPHER, ALERT, HANDSHAKE, DATA = 20, 21, 22, 23
CHUNK_BYTES = 1 << 16
HOLD_S = 0.02
"""How long a record is held back for a next one to come before it."""
REMEMBERED = 64
"""Records of each way that are kept, for replay."""
TO, FROM = "to", "from"
"""The ways: to the core that listens, and from it."""

Passed = tuple[list[bytes], str]
"""What goes on in place of a record, and what becomes of the connection then: nothing, ``end`` or ``reset``."""


def record(kind: int, body: bytes) -> bytes:
    return struct.pack(">BHH", kind, 0x0303, len(body)) + body


def flip(one: bytes, chance: random.Random) -> Passed:
    at = chance.randrange(len(one))
    return [one[:at] + bytes([one[at] ^ 1 << chance.randrange(8)]) + one[at + 1 :]], ""


def overwrite(one: bytes, chance: random.Random) -> Passed:
    return [one[:HEADER_BYTES] + chance.randbytes(len(one) - HEADER_BYTES)], ""


def relabel(one: bytes, chance: random.Random) -> Passed:
    other = chance.choice([kind for kind in RECORD_TYPES if kind != one[0]])
    return [bytes([other]) + one[1:]], ""


def downgrade(one: bytes, chance: random.Random) -> Passed:
    """The version field of the record says TLS 1.0, 1.1, 1.2, SSL 3 or nonsense."""
    versions = [
        version for version in (0x0300, 0x0301, 0x0302, 0x0304, 0x7F1C) if one[1:3] != version.to_bytes(2, "big")
    ]
    return [one[:1] + chance.choice(versions).to_bytes(2, "big") + one[3:]], ""


def lengthen(one: bytes, chance: random.Random) -> Passed:
    return [one[:3] + chance.randrange(16_641, 65_536).to_bytes(2, "big") + one[5:]], ""


def shorten(one: bytes, chance: random.Random) -> Passed:
    """The record and its length lose their end: what follows is a record again."""
    body = one[HEADER_BYTES : -chance.randrange(1, len(one) - HEADER_BYTES + 1)]
    return [one[:3] + len(body).to_bytes(2, "big") + body], ""


def truncate(one: bytes, chance: random.Random) -> Passed:
    return [one[: chance.randrange(len(one))]], ""


def cut(one: bytes, chance: random.Random) -> Passed:
    return [one[: chance.randrange(len(one))]], "end"


def reset(one: bytes, chance: random.Random) -> Passed:
    return [one[: chance.randrange(len(one))]], "reset"


def drop(one: bytes, chance: random.Random) -> Passed:
    return [], ""


def repeat(one: bytes, chance: random.Random) -> Passed:
    return [one] * chance.choice((2, 2, 3)), ""


def forge(one: bytes, chance: random.Random) -> Passed:
    """A record that no end made goes before this one: an alert, a handshake message, a change of ciphers, or data."""
    forged = chance.choice(
        (
            record(ALERT, bytes([1, 0])),
            record(ALERT, bytes([2, 40])),
            record(HANDSHAKE, bytes([24, 0, 0, 1, 1])),
            record(HANDSHAKE, bytes(4)),
            record(DATA, chance.randbytes(chance.randrange(17, 200))),
            record(DATA, b""),
            record(CHANGE_CIPHER, bytes([2])),
        )
    )
    return [forged, one], ""


CHANGES: dict[str, Callable[[bytes, random.Random], Passed]] = {
    one.__name__: one
    for one in (flip, overwrite, relabel, downgrade, lengthen, shorten, truncate, cut, reset, drop, repeat, forge)
}
KINDS = (*CHANGES, "swap", "replay")
"""The attacks. ``swap`` needs a record behind the one that is held, ``replay`` one of an earlier connection."""


@dataclasses.dataclass
class Attack:
    """On the record number ``at`` of one way, counted from the arming."""

    kind: str
    way: str
    at: int
    chance: random.Random
    has_hit: bool = False


class RecordProxy:
    """Forwards connections to the port ``to`` of this host. One attack at a time is armed, and hits at most once."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._lock = threading.Lock()
        self._attack: Attack | None = None
        self._counts = {TO: 0, FROM: 0}
        self._of_before: dict[str, deque[bytes]] = {way: deque(maxlen=REMEMBERED) for way in (TO, FROM)}
        self._of_now: dict[str, deque[bytes]] = {way: deque(maxlen=REMEMBERED) for way in (TO, FROM)}
        self.connections = 0
        self.watched: Callable[[str, bytes], None] = lambda way, data: None
        """Called with all bytes that pass."""
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)

    def __enter__(self) -> RecordProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def arm(self, attack: Attack) -> None:
        with self._lock:
            self._attack = attack
            self._counts = {TO: 0, FROM: 0}

    def hang_up(self) -> None:
        """End all connections, so that the next thing is a handshake."""
        with self._lock:
            for pair in self._pairs:
                for end in pair:
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    # --- connections ---

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections += 1
                self._pairs.append((near, far))
                for way, now in self._of_now.items():
                    self._of_before[way].extend(now)
                    now.clear()
            left = [2]
            self._start(self._forward, TO, near, far, left)
            self._start(self._forward, FROM, far, near, left)

    def _forward(self, way: str, origin: socket.socket, target: socket.socket, left: list[int]) -> None:
        end = "end"
        with contextlib.suppress(OSError):
            end = self._carry(way, origin, target)
        if end == "reset":
            for one in (origin, target):
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for one in (origin, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                self._pairs = [pair for pair in self._pairs if origin not in pair]
                origin.close()
                target.close()

    def _carry(self, way: str, origin: socket.socket, target: socket.socket) -> str:
        held = b""
        for one in self._records(way, origin):
            if one == b"":  # nothing came in time
                if held:
                    target.sendall(held)
                    held = b""
                continue
            if held:
                with self._lock:
                    assert self._attack is not None
                    self._attack.has_hit = True
                    self._attack = None
                target.sendall(one + held)
                held = b""
                continue
            pieces, end, is_held = self._pass(way, one)
            if is_held:
                held = one
            for piece in pieces:
                target.sendall(piece)
            if end:
                return end
        return "end"

    def _pass(self, way: str, one: bytes) -> tuple[list[bytes], str, bool]:
        """What goes on in place of the record, what becomes of the connection, and whether the record is held."""
        with self._lock:
            attack = self._attack
            number, self._counts[way] = self._counts[way], self._counts[way] + 1
            self._of_now[way].append(one)
            if attack is None or attack.way != way or number != attack.at or one[0] not in RECORD_TYPES:
                return [one], "", False
            if attack.kind == "swap":
                return [], "", True
            if attack.kind == "replay":
                if not self._of_before[way]:
                    return [one], "", False
                pieces, end = [attack.chance.choice(list(self._of_before[way])), one], ""
            else:
                pieces, end = CHANGES[attack.kind](one, attack.chance)
            attack.has_hit = True
            self._attack = None
            return pieces, end, False

    def _records(self, way: str, origin: socket.socket) -> Iterator[bytes]:
        """Whole records, or nothing where none came for HOLD_S; bytes that are no record are given whole."""
        buffer = b""
        origin.settimeout(HOLD_S)
        while True:
            try:
                data = origin.recv(CHUNK_BYTES)
            except TimeoutError:
                yield b""
                continue
            if not data:
                if buffer:
                    yield buffer
                return
            self.watched(way, data)
            buffer += data
            while len(buffer) >= HEADER_BYTES:
                size = HEADER_BYTES + int.from_bytes(buffer[3:5], "big") if buffer[0] in RECORD_TYPES else len(buffer)
                if len(buffer) < size:
                    break
                yield buffer[:size]
                buffer = buffer[size:]
