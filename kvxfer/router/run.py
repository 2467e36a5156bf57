"""What ``kvxfer router`` runs: one process, or several. Decides only that."""

from __future__ import annotations

import asyncio
import socket

from kvxfer.router import server
from kvxfer.router.auth import ApiKeys
from kvxfer.router.options import RouterOptions


async def serve(options: RouterOptions, *, on_ready: server.Ready, stop: asyncio.Event) -> None:
    """As `server.serve`."""
    await server.serve(options, on_ready=on_ready, stop=stop, several=_serve_several)


async def _serve_several(
    options: RouterOptions,
    keys: ApiKeys,
    token: bytes,
    listener: socket.socket,
    *,
    on_ready: server.Ready,
    stop: asyncio.Event,
) -> None:
    from kvxfer.router.group.parent import serve_group  # only where there are several

    await serve_group(options, keys, token, listener, on_ready=on_ready, stop=stop)
