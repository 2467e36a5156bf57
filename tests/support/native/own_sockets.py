"""The sockets of this process."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def own_sockets(opened: contextlib.ExitStack) -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            yield opened.enter_context(socket.socket(fileno=os.dup(int(name))))


def ports(end: socket.socket) -> set[int]:
    if end.family != socket.AF_INET or end.type != socket.SOCK_STREAM:
        return set()
    with contextlib.suppress(OSError):  # it listens
        return {end.getsockname()[1], end.getpeername()[1]}
    return set()
