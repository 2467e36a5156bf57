"""Admin routes: list, add, drain and remove workers.

Decides which callers may: a caller with the admin key, or any caller where the router listens on loopback only and no
key was set. A browser on this machine is such a caller, whatever page it shows: so a request must then name this
machine as its host (a page of another name reaches loopback by answering its own name with 127.0.0.1), and come from no
page of another origin. It must never choose a worker.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from kvxfer.config import is_loopback
from kvxfer.errors import ConfigError
from kvxfer.openai.errors import RequestError
from kvxfer.router import document
from kvxfer.router.auth import ApiKeys
from kvxfer.router.fleet.worker import KEYS, EngineDialect, Worker, WorkerSource, stock_worker
from kvxfer.router.fleet.workers import Workers
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.json_response import JSONResponse
from kvxfer.types import Role

NO_ADMIN = (
    "admin routes need an admin key (--admin-key-file) where the router listens beyond loopback, and this one has none"
)
OTHER_HOST = (
    "the Host header must name this machine as localhost or as a loopback address: admin routes are open without an "
    "admin key (--admin-key-file) to callers on this machine only"
)
OTHER_ORIGIN = "no page of another origin may ask this without an admin key (--admin-key-file)"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]{0,5})?")


@dataclasses.dataclass(frozen=True)
class AdminAccess:
    """``keys`` open the admin routes. Without keys they are open on a loopback listener, and closed elsewhere. There a
    page of another origin is refused, which could make a browser on this machine send what it likes."""

    keys: ApiKeys
    is_loopback: bool

    def check(self, request: Request) -> None:
        """Raise RequestError (401, 403) unless the caller may administer."""
        if self.keys.is_required:
            self.keys.check(request.headers.get("authorization"))
        elif not self.is_loopback:
            raise RequestError(NO_ADMIN, status=403, error_code="admin_closed")
        else:
            _check_caller_is_here(request)


def _check_caller_is_here(request: Request) -> None:
    """Raise RequestError for what a browser sends for a page that this router did not serve, or under a name that is
    not this machine's: a page can have its own name resolve to a loopback address."""
    hosts, origins = request.headers.getlist("host"), request.headers.getlist("origin")
    host = hosts[0].lower() if len(hosts) == 1 else ""
    match = _HOST.fullmatch(host)
    if match is None or not is_loopback(match.group(1)):
        raise RequestError(OTHER_HOST, status=403, error_code="admin_closed")
    is_own = all(origin.lower() in (f"http://{host}", f"https://{host}") for origin in origins)
    if not is_own or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise RequestError(OTHER_ORIGIN, status=403, error_code="admin_closed")


def add_admin_routes(app: FastAPI, workers: Workers, access: AdminAccess, bodies: Bodies) -> None:
    """Put the admin routes into ``app``."""

    def known(agent_id: str) -> None:
        if not any(worker["agent_id"] == agent_id for worker in workers.describe()):
            raise RequestError(
                f"worker: {agent_id!r} is not known here", param="worker", status=404, error_code="worker_not_found"
            )

    @app.get("/workers", tags=["admin"])
    async def list_workers(request: Request) -> Response:
        """Every worker that is known, with its state, load and source."""
        access.check(request)
        return JSONResponse({"object": "list", "data": workers.describe()})

    @app.post("/workers", tags=["admin"], status_code=201, openapi_extra={"requestBody": document.WORKER_BODY})
    async def add_worker(request: Request) -> Response:
        """Add a worker, as the workers file describes one."""
        access.check(request)
        added = _worker(_object(request, await bodies.read(request)))
        workers.add(added)
        return JSONResponse({"agent_id": added.agent_id}, status_code=201)

    @app.post("/workers/{agent_id:path}/drain", tags=["admin"])
    async def drain_worker(request: Request, agent_id: str, on: bool = True) -> Response:
        """Give a worker no new requests (``on=false``: give it new ones again); what runs goes on."""
        access.check(request)
        known(agent_id)
        workers.drain(agent_id, on)
        return JSONResponse({"agent_id": agent_id, "is_draining": on})

    @app.delete("/workers/{agent_id:path}", tags=["admin"])
    async def remove_worker(request: Request, agent_id: str) -> Response:
        """Take a worker off the list: what runs there goes on."""
        access.check(request)
        known(agent_id)
        workers.remove(agent_id)
        return JSONResponse({"agent_id": agent_id})


_KINDS: dict[str, type] = {"url": str, "role": str, "bootstrap_port": int, "dp_rank": int}
_WORDS = {str: "text", int: "a whole number"}


def _object(request: Request, body: bytes) -> dict[str, Any]:
    """Raises RequestError for a body that is no JSON object, or not said to be one."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        value = json.loads(body) if kind == "application/json" else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object, with content-type: application/json")
    return value


def _worker(values: dict[str, Any]) -> Worker:
    """A worker as a client describes it: ``url``, ``role``, and any of KEYS. Raises RequestError, ConfigError."""
    keys = ("url", "role", *KEYS)
    for name, value in values.items():
        if name not in keys:
            raise RequestError(f"{name!r:.80}: a worker has {', '.join(keys)}", param=name[:80])
        kind = _KINDS.get(name, str)
        if type(value) is not kind:
            raise RequestError(f"{name}: must be {_WORDS[kind]}", param=name)
    if "url" not in values:
        raise RequestError("url: field required", param="url")
    more = dict(values)
    dialect = more.pop("dialect", EngineDialect.VLLM.value)
    role = more.pop("role", Role.BOTH.value)
    if role not in tuple(Role):
        raise RequestError(f"role: must be one of {', '.join(Role)}", param="role")
    try:
        return stock_worker(more.pop("url"), Role(role), dialect, WorkerSource.ADMIN, **more)
    except ConfigError as error:
        raise RequestError(str(error)) from None
