"""A relay of packets between two interfaces, which delays and loses some: what a kernel without netem cannot do.

Decides only when a packet passes and whether it does. It must never look into one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import numpy as np

ALL_PROTOCOLS = 0x0003
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
FRAME_BYTES = 65536
AT_ONCE = 256
HELD_MAX = 20_000
"""Packets on their way; what comes beyond is lost, as in a queue that is full."""


class Relay:
    """Passes packets both ways, each ``delay_s`` later, without a share ``loss`` of them. Raises OSError."""

    def __init__(self, near: str, far: str, *, delay_s: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        self.passed = self.lost = 0
        self._delay_s, self._loss = delay_s, loss
        self._random = np.random.Generator(np.random.PCG64(seed))
        self._loop = asyncio.get_running_loop()
        self._held = 0
        self._ends = [_opened(name) for name in (near, far)]
        for source, target in (self._ends, self._ends[::-1]):
            self._loop.add_reader(source, self._take, source, target)

    def _take(self, source: socket.socket, target: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = source.recv(FRAME_BYTES)
            except OSError:
                return
            if self._held >= HELD_MAX or (self._loss and self._random.random() < self._loss):
                self.lost += 1
                continue
            self._held += 1
            if self._delay_s:
                self._loop.call_later(self._delay_s, self._pass_on, target, frame)
            else:
                self._pass_on(target, frame)

    def _pass_on(self, target: socket.socket, frame: bytes) -> None:
        self._held -= 1
        with contextlib.suppress(OSError):  # its queue is full, or the relay is closed: lost
            target.send(frame)
            self.passed += 1

    def close(self) -> None:
        for end in self._ends:
            self._loop.remove_reader(end)
            end.close()


def _opened(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setblocking(False)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.bind((interface, ALL_PROTOCOLS))
    return end
