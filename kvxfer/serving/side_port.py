"""Ports that serve one thing beside a server's own: probes, or metrics.

Decides which paths such a port has. It must never know what their answers mean: they are the application's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.types import ASGIApp, Receive, Scope, Send

from kvxfer.openai.errors import INVALID_REQUEST, error_body
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.json_response import JSONResponse
from kvxfer.serving.limits import ServingLimits
from kvxfer.serving.server import in_url, listening, serving

PROBES = frozenset({"/live", "/ready"})
METRICS = frozenset({"/metrics"})
CONNECTIONS_MAX = 64
SIDE_PORT = "kvxfer.side_port"
"""In an ASGI scope's extensions: the request came by such a port, which is for the operator's own."""
METHODS = frozenset({"GET", "HEAD"})


class OnlyPaths:
    """ASGI: ``app`` answers GET of these paths, and every other request gets a 404."""

    def __init__(self, app: ASGIApp, paths: frozenset[str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["path"] in self._paths and scope["method"] in METHODS):
            extensions = {**(scope.get("extensions") or {}), SIDE_PORT: {}}
            await self._app({**scope, "extensions": extensions}, receive, send)
            return
        text = f"{scope['method']} {scope['path']}: this port has {', '.join(sorted(self._paths))} only"
        body = error_body(text, kind=INVALID_REQUEST, code="usage")
        await JSONResponse(body, status_code=404)(scope, receive, send)


@contextlib.asynccontextmanager
async def side_ports(app: ASGIApp, host: str, limits: ServingLimits) -> AsyncIterator[dict[str, str]]:
    """Within the block ``app`` answers probes and metrics on the ports that ``limits`` name, without TLS. Yields what
    the ready line says of them. Raises ConfigError for a port that is taken."""
    said: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, port, paths in (
            ("probe", limits.probe_port, PROBES),
            ("metrics", limits.metrics_port, METRICS),
        ):
            if port is None:
                continue
            listener = stack.enter_context(listening(host, port))
            await stack.enter_async_context(
                serving(
                    OnlyPaths(app, paths),
                    listener,
                    limits,
                    Bodies(limits),
                    connections_max=CONNECTIONS_MAX,
                    name=f"kvxfer {name} port",
                )
            )
            said[f"{name}_url"] = f"http://{in_url(host)}:{listener.getsockname()[1]}"
        yield said
