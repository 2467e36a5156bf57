"""A peer written in Python: real machines for the handshake, and whatever the test wants to say after it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from kvxfer._native import _core as native

KEY = b"k" * 32


class RawPeer:
    """Dials a core; owns every byte that it says."""

    def __init__(self, name: str = "raw", number: int = 1) -> None:
        self.ref = native.AgentRef(name, number, os.urandom(16))
        self.endpoint = native.Endpoint(self.ref, native.EndpointLimits())
        self.decoder = native.Decoder()
        self.socket: socket.socket | None = None
        self.session = 0
        self.payload = b""
        self.descriptors: list[int] = []
        """That came over a Unix socket."""
        self.lane = native.Lane.STREAM
        """That it asks by."""

    def dial(self, core: Any, key: bytes = KEY, kind: Any = native.SessionKind.TCP) -> None:
        """A session that is up, both sides having proven `key`."""
        self.endpoint.set_peer(core.agent, key, kind)
        if kind == native.SessionKind.TCP:
            self.socket = socket.create_connection(("127.0.0.1", core.tcp_port), 10)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(10)
            self.socket.connect(core.unix_path)
        self.session, effects = self.endpoint.dialed(core.agent, kind, os.urandom(32), 1)
        self._perform(effects)
        while self.endpoint.counts().sessions_up == 0:
            self._perform(self.endpoint.on_frame(self.session, self._frame(), 1))

    def _perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, native.SendFrame):
                self.say(effect.frame)

    def say(self, frame: Any, payload: bytes = b"") -> None:
        assert self.socket is not None
        self.socket.sendall(native.encode(frame) + payload)

    def _frame(self) -> Any:
        while (frame := self.decoder.next()) is None:
            self._feed()
        return frame

    def _feed(self) -> None:
        assert self.socket is not None
        if self.socket.family == socket.AF_UNIX:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 16, 4)
            self.descriptors += descriptors
        else:
            data = self.socket.recv(1 << 16)
        if not data:
            raise EOFError("the core hung up")
        self.decoder.feed(data)

    def hear(self, *kinds: type) -> Any:
        """The next frame of these kinds; the payload of a DATA frame is in `payload` afterwards."""
        while True:
            frame = self._frame()
            if isinstance(frame, native.Data):
                parts = []
                while self.decoder.payload_pending:
                    if part := self.decoder.take_payload(1 << 20):
                        parts.append(part)
                    else:
                        self._feed()
                self.payload = b"".join(parts)
            if isinstance(frame, kinds):
                return frame
            if isinstance(frame, native.ErrorFrame):
                raise AssertionError(f"told {frame.code}: {frame.text}")

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


class RawSource:
    """The machines of a real source over TCP, with payloads of the test's choice."""

    def __init__(self, add: Callable[[Any], None], content: Callable[[Any], bytes]) -> None:
        """`add` prepares the endpoint; `content` gives the payload of a SendData effect, checksums included."""
        self.ref = native.AgentRef("raw-source", 1, os.urandom(16))
        self.endpoint = native.Endpoint(self.ref, native.EndpointLimits())
        add(self.endpoint)
        self.content = content
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(10)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        with connection:
            session, effects = self.endpoint.accepted(native.SessionKind.TCP, os.urandom(32), time.monotonic_ns())
            decoder = native.Decoder()
            while True:
                while effects:
                    effects = [more for effect in effects for more in self._perform(connection, session, effect)]
                while (frame := decoder.next()) is None:
                    try:
                        data = connection.recv(65536)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    decoder.feed(data)
                effects = self.endpoint.on_frame(session, frame, time.monotonic_ns())

    def _perform(self, connection: socket.socket, session: int, effect: Any) -> list[Any]:
        if isinstance(effect, native.SendFrame):
            connection.sendall(native.encode(effect.frame))
        elif isinstance(effect, native.SendData):
            frame = effect.frame
            connection.sendall(native.encode(frame) + self.content(effect))
            after = self.endpoint.data_sent(session, frame.id, frame.attempt, frame.count, time.monotonic_ns())
            return list(after)
        return []

    def close(self) -> None:
        self.listener.close()
        self.thread.join(10)
