"""A proxy that reads the frames it passes on, and stops at the one it was told: a phase of a transfer, held as long as
the test likes. It runs in the process that has the bytes, so that a reader of that process's memory finds its pid
behind the Unix socket. Knows the header of a frame and nothing else of the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import socket
import struct
import threading
from typing import Any

from kvxfer._native import _core

HELLO, PULL, PUSH, READY, DATA, CONFIRM, VERDICT, RELEASE = range(1, 9)
REVOKE, MAP, FETCH, DONE = 10, 15, 16, 17
HEADER = struct.Struct("<2sBBI")
CHUNK = 1 << 18
FOREVER_S = 120.0


class FaultProxy:
    """Listens on TCP and on a Unix socket, and passes on to the core behind it. ``way``: ``to`` the core that listens,
    or ``from`` it."""

    def __init__(self, tcp: tuple[str, int], unix_path: str) -> None:
        self._targets: dict[int, Any] = {socket.AF_INET: tcp, socket.AF_UNIX: unix_path}
        self.unix_path = f"{unix_path}.{os.urandom(3).hex()}"
        self._listeners: list[socket.socket] = []
        self._rule: tuple[str, int, int] | None = None
        self._is_frozen = False
        self._changed = threading.Condition()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._passed = {"to": 0, "from": 0}
        self._stops = 0
        self._pumps = 0
        self._host = tcp[0]
        self.tcp_port = 0
        self.listen()

    def aim(self, tcp: tuple[str, int], unix_path: str) -> None:
        """Pass what is dialed from now on to another core."""
        self._targets = {socket.AF_INET: tuple(tcp), socket.AF_UNIX: unix_path}

    def listen(self) -> None:
        """Take dials (again, at the same addresses)."""
        tcp = socket.create_server((self._host, self.tcp_port))
        self.tcp_port = tcp.getsockname()[1]
        pathlib.Path(self.unix_path).unlink(missing_ok=True)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(self.unix_path)
        unix.listen()
        self._listeners = [tcp, unix]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop_at(self, way: str, kind: int, payload: int = 0) -> None:
        """Hold the first frame of ``kind``; of DATA, let ``payload`` bytes of blocks through before. What another rule
        held goes on."""
        with self._changed:
            self._rule, self._stops, self._passed = (way, kind, payload), 0, {"to": 0, "from": 0}
            self._changed.notify_all()

    def wait_stopped(self, timeout_s: float = 20.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._stops > 0, timeout_s)

    def freeze(self) -> None:
        """Nothing passes any more, and no party is told: a partition."""
        with self._changed:
            self._is_frozen = True

    def resume(self) -> None:
        """Whatever was held goes on, and nothing is held again."""
        with self._changed:
            self._rule, self._is_frozen = None, False
            self._changed.notify_all()

    def reset(self) -> None:
        """Break every connection the hard way (TCP: RST)."""
        with self._changed:
            pairs, self._pairs = self._pairs, []
            self._rule, self._is_frozen = None, False
            for end in [end for pair in pairs for end in pair]:
                _break(end)
            self._changed.notify_all()

    def shut(self) -> None:
        """Refuse dials, and break what is there."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        pathlib.Path(self.unix_path).unlink(missing_ok=True)
        self.reset()

    def passed(self) -> dict[str, int]:
        """Payload bytes that went through since stop_at, by way."""
        return dict(self._passed)

    def wait_empty(self, timeout_s: float = 20.0) -> bool:
        """Until no connection is left: what was held has arrived, or never will."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pumps == 0, timeout_s)

    # --- connections ---

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            remote = socket.socket(listener.family)
            try:
                remote.connect(self._targets[listener.family])
            except OSError:
                near.close()
                remote.close()
                continue
            if near.family != socket.AF_UNIX:
                for end in (near, remote):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                self._pairs.append((near, remote))
                self._pumps += 2
            left = [2]
            for way, source, target in (("to", near, remote), ("from", remote, near)):
                threading.Thread(target=self._pump, args=(way, source, target, left), daemon=True).start()

    def _pump(self, way: str, source: socket.socket, target: socket.socket, left: list[int]) -> None:
        try:
            self._copy(way, source, target)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            with self._changed:
                left[0] -= 1
                if left[0] == 0:
                    self._pairs = [pair for pair in self._pairs if source not in pair]
                    source.close()
                    target.close()
                self._pumps -= 1
                self._changed.notify_all()

    def _copy(self, way: str, source: socket.socket, target: socket.socket) -> None:
        descriptors: list[int] = []
        try:
            self._copy_frames(way, source, target, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _copy_frames(self, way: str, source: socket.socket, target: socket.socket, descriptors: list[int]) -> None:
        """``descriptors``: those that came, and were not sent on yet."""
        is_unix = source.family == socket.AF_UNIX
        held = bytearray()
        payload = 0
        while True:
            data, more, _, _ = socket.recv_fds(source, CHUNK, 16) if is_unix else (source.recv(CHUNK), [], 0, None)
            descriptors += more
            if not data:
                return
            held += data
            while held:
                if payload:
                    size = self._let(way, DATA, min(payload, len(held)))
                    payload -= size
                else:
                    kind, body = HEADER.unpack_from(held)[2:] if len(held) >= HEADER.size else (0, CHUNK * 8)
                    size = HEADER.size + body
                    if len(held) < size:
                        break
                    self._let(way, kind, 0)
                    payload = _payload_of(bytes(held[:size])) if kind == DATA else 0
                self._send(target, bytes(held[:size]), descriptors)
                del held[:size]

    def _let(self, way: str, kind: int, size: int) -> int:
        """Wait until a frame of ``kind`` (``size`` 0), or some of ``size`` bytes of DATA's payload, may pass."""
        with self._changed:
            while True:
                rule = self._rule
                is_meant = rule is not None and rule[:2] == (way, kind)
                allowed = size
                if is_meant and kind == DATA:
                    allowed = min(size, rule[2] - self._passed[way])  # type: ignore[index]
                    is_meant = allowed == 0 and size > 0
                if not is_meant and not self._is_frozen:
                    self._passed[way] += allowed
                    return allowed
                if is_meant:
                    self._stops += 1
                    self._changed.notify_all()
                if not self._changed.wait(FOREVER_S):
                    raise TimeoutError("held for too long")

    @staticmethod
    def _send(target: socket.socket, data: Any, descriptors: list[int]) -> None:
        if descriptors:
            sent = socket.send_fds(target, [data], descriptors)
            while descriptors:
                os.close(descriptors.pop())
            data = data[sent:]
        if data:
            target.sendall(data)


def _payload_of(frame: bytes) -> int:
    decoder = _core.Decoder()
    decoder.feed(frame)
    data: Any = decoder.next()
    return int(data.payload_bytes)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _break(end: socket.socket) -> None:
    """Of a TCP socket: connected to nothing, which sends a RST and wakes the side that reads from it."""
    with contextlib.suppress(OSError):
        if end.family == socket.AF_UNIX:
            end.shutdown(socket.SHUT_RDWR)
        else:
            _LIBC.connect(end.fileno(), bytes(16), 16)
