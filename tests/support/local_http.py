"""HTTP servers of this host, as tests and demos start them: ports that are free, and whether one answers there."""

from __future__ import annotations

import contextlib
import socket

import httpx


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


async def answers(client: httpx.AsyncClient, url: str) -> bool | None:
    """True where ``url`` is answered with 200; else None, so that it can be looked at again."""
    try:
        return (await client.get(url)).status_code == 200 or None
    except httpx.HTTPError:
        return None
