"""The operators' page at ``/ui`` and its feed at ``/ui/state``.

Decides what a browser may do with the page: run its one script, ask this router, and nothing else. The page itself says
nothing about the fleet, so that it is served to every caller; its feed is as closed as the admin routes.
"""

from __future__ import annotations

import pathlib

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvxfer.router.admin import AdminAccess
from kvxfer.router.core import RouterCore
from kvxfer.router.front import Door
from kvxfer.router.ui.state import StateFeed

FOLDER = pathlib.Path(__file__).parent
FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/ui/table.js": ("table.js", "text/javascript; charset=utf-8"),
    "/ui/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/ui/format.js": ("format.js", "text/javascript; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    "/ui/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""By path: nothing else of the folder is served."""
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def add_ui_routes(app: FastAPI, core: RouterCore, door: Door, access: AdminAccess) -> None:
    """Put the page and its feed into ``app``."""
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (FOLDER / name).read_bytes(), media_type)
    feed = StateFeed(core, door)

    @app.get("/ui/state", tags=["admin"])
    async def ui_state(request: Request) -> Response:
        """What the page at ``/ui`` shows. With ``If-None-Match``: 304 while nothing has changed."""
        access.check(request)
        rendered = feed.rendered()
        more = {**HEADERS, "cache-control": "no-store", "etag": rendered.etag}
        if request.headers.get("if-none-match") == rendered.etag:
            return Response(status_code=304, headers=more)
        return Response(rendered.content, media_type="application/json", headers=more)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def serve() -> Response:
        return Response(content, media_type=media_type, headers={**HEADERS, "cache-control": "no-cache"})

    app.add_api_route(path, serve, methods=["GET"], include_in_schema=False)
