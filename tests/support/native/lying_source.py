"""A source that wants its memory mapped, written in Python, whose MAP frame and descriptors a test chooses."""

from __future__ import annotations

import os
import pathlib
import socket
import threading
from typing import Any

from kvxfer._native import _core as native

KEY = b"k" * 32
BLOCK, BLOCKS = 4096, 16
BYTES = BLOCK * BLOCKS


class LyingSource:
    """The machines of a real source, with a MAP frame and descriptors of the test's choice."""

    def __init__(
        self,
        path: pathlib.Path,
        reader: native.AgentRef,
        frame: native.Map | None,
        descriptors: list[int],
        ids: list[int] | None,
    ) -> None:
        self.ref = native.AgentRef("liar", 1, os.urandom(16))
        self.endpoint = native.Endpoint(self.ref, native.EndpointLimits())
        self.endpoint.set_peer(reader, KEY, native.SessionKind.UNIX)
        self.endpoint.add_pool(native.PoolInfo(3, BLOCKS, BLOCK, b"d" * 32, True))
        self.frame, self.descriptors, self.ids = frame, descriptors, ids
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.settimeout(10)
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve)

    def serve(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            session, effects = self.endpoint.accepted(native.SessionKind.UNIX, os.urandom(32), 1)
            decoder = native.Decoder()
            now = 1
            while True:
                for effect in effects:
                    self.perform(connection, effect)
                effects = []
                while (frame := decoder.next()) is None:
                    try:
                        data = connection.recv(65536)
                    except ConnectionError:
                        return
                    if not data:
                        return
                    decoder.feed(data)
                now += 1
                effects = self.endpoint.on_frame(session, frame, now)

    def perform(self, connection: socket.socket, effect: Any) -> None:
        if isinstance(effect, native.SendFrame):
            frame = effect.frame
            if isinstance(frame, native.Ready) and self.ids is not None:
                told = (frame.id, frame.attempt, frame.seq, frame.blocks, frame.layers, frame.total, frame.complete)
                frame = native.Ready(*told, frame.ttl_ms, frame.pool, frame.ids_first, self.ids)
            connection.sendall(native.encode(frame))
        elif isinstance(effect, native.SendMap) and self.frame is not None:
            data = native.encode(self.frame)
            if self.descriptors:
                socket.send_fds(connection, [data], self.descriptors)
            else:
                connection.sendall(data)

    def close(self) -> None:
        self.listener.close()
        self.thread.join(10)
        for fd in self.descriptors:
            os.close(fd)
