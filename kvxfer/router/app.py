"""The router's HTTP surface: its routes, the checks at the door, and OpenAI's error shape for everything that fails.

Decides who comes in (key, size, admission) and turns a body into an `Inbound`; it must never know how a request is
served, nor where the workers come from.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.errors import KvxferError
from kvxfer.openai.errors import INVALID_REQUEST, error_body, status_for
from kvxfer.openai.schemas import load_object, parse_chat, parse_completion
from kvxfer.policy.admit import Admission, AdmitOptions, admit, refusal
from kvxfer.router import headers
from kvxfer.router.answer import RETRY_AFTER_STATUS, Answer
from kvxfer.router.attempt import Room
from kvxfer.router.auth import ApiKeys
from kvxfer.router.dispatch import Dispatcher
from kvxfer.router.inbound import Inbound
from kvxfer.router.metrics import Outcome
from kvxfer.router.readiness import Readiness
from kvxfer.router.relay import Relay
from kvxfer.serving.bodies import Bodies

log = logging.getLogger("kvxfer.router")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Door:
    """Counts the requests inside; ``close`` lets no more in, ``stop`` ends those that are left."""

    def __init__(self, options: AdmitOptions) -> None:
        self._options = options
        self._idle = asyncio.Event()
        self._idle.set()
        self.inflight = 0
        self.is_draining = False
        self.stop = asyncio.Event()

    def check_open(self) -> None:
        """Raise OverloadedError where no request comes in any more, however few are inside."""
        if self.is_draining:
            raise refusal(Admission.DRAINING, self._options)

    def enter(self) -> None:
        """Count one more request, with its body. Raises OverloadedError unless it may come in."""
        verdict = admit(self.inflight, is_draining=self.is_draining, options=self._options)
        if verdict is not Admission.ADMITTED:
            raise refusal(verdict, self._options)
        self.inflight += 1
        self._idle.clear()

    def leave(self) -> None:
        self.inflight -= 1
        if not self.inflight:
            self._idle.set()

    async def drain(self, grace_s: float) -> None:
        """Let nobody in, wait up to ``grace_s`` for those inside, then end them."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("ending requests that outlived the shutdown grace", extra={"requests": self.inflight})
        self.stop.set()


class RequestIds:
    """ASGI middleware: every answer carries the request id, whoever wrote the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = headers.REQUEST_ID.encode()
        received = next((value for key, value in scope["headers"] if key == name), None)
        request_id = headers.request_id(None if received is None else received.decode("latin-1"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (name, request_id.encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_with_id)


def error_response(error: Exception) -> JSONResponse:
    """OpenAI's error object for an exception, with ``Retry-After`` where waiting helps."""
    status = status_for(error)
    extra = {headers.RETRY_AFTER: "1"} if status in RETRY_AFTER_STATUS else {}
    return JSONResponse(error_body(error), status_code=status, headers=extra)


def build_app(room: Room, keys: ApiKeys, door: Door, bodies: Bodies) -> FastAPI:
    """The ASGI application; it owns nothing that must be closed."""
    app = FastAPI(title="kvxfer router", openapi_url=None, docs_url=None, redoc_url=None)
    dispatcher = Dispatcher(room)
    started_unix_s = int(time.time())
    readiness = Readiness(
        room.workers,
        allows_local_prefill=room.options.allows_local_prefill,
        is_draining=lambda: door.is_draining,
    )
    room.metrics.ready.set_function(lambda: float(readiness.verdict().is_ready))
    app.add_middleware(RequestIds)

    @app.exception_handler(KvxferError)
    async def on_kvxfer_error(request: Request, error: KvxferError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        body = error_body(f"{request.method} {request.url.path}: {error.detail}", kind=INVALID_REQUEST, code="usage")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    async def serve(request: Request, path: str) -> Response:
        arrived_s = room.now()
        ended = _Ended(room, path, arrived_s)
        try:
            keys.check(request.headers.get("authorization"))
            door.check_open()
            body = await bodies.read(request)
            door.enter()  # before the body is parsed
            try:
                inbound = _inbound(request, path, body, room, arrived_s)
            except BaseException:
                door.leave()
                raise
        except ClientDisconnect:
            ended(Outcome.DISCONNECTED)
            return Response(status_code=400)
        except BaseException as error:
            ended(_outcome(error))
            raise

        async def work(answer: Answer) -> Outcome:
            return await dispatcher.serve(inbound, answer)

        def leave(outcome: Outcome) -> None:
            door.leave()
            ended(outcome)

        return Relay(work, stop=door.stop, ended=leave)

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await serve(request, COMPLETIONS)

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        return await serve(request, CHAT)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        data = [
            {"id": model, "object": "model", "created": started_unix_s, "owned_by": "kvxfer"}
            for model in room.workers.models()
        ]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/workers")
    async def workers(request: Request) -> Response:
        keys.check(request.headers.get("authorization"))
        return JSONResponse({"object": "list", "data": room.workers.describe()})

    @app.get("/live")
    @app.get("/health")
    async def live() -> Response:
        body: dict[str, Any] = {
            "status": "draining" if door.is_draining else "ok",
            "coordinator_connected": room.workers.is_connected,
            "inflight": door.inflight,
        }
        return JSONResponse(body)

    @app.get("/ready")
    async def ready(model: str | None = None) -> Response:
        body = readiness.describe(model, names_models=not keys.is_required)
        if body["status"] == "ready":
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={headers.RETRY_AFTER: "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(room.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return app


class _Ended:
    def __init__(self, room: Room, path: str, arrived_s: float) -> None:
        self._room = room
        self._path = path
        self._arrived_s = arrived_s

    def __call__(self, outcome: Outcome) -> None:
        self._room.metrics.requests.labels(self._path, outcome.value).inc()
        self._room.metrics.duration.labels(self._path).observe(self._room.now() - self._arrived_s)


def _outcome(error: BaseException) -> Outcome:
    status = status_for(error)
    if 400 <= status < 500:
        return Outcome.CLIENT_ERROR
    return Outcome.UNAVAILABLE if status == 503 else Outcome.FAILED


def _inbound(request: Request, path: str, body: bytes, room: Room, arrived_s: float) -> Inbound:
    """Raises RequestError for a body that is no request."""
    values = load_object(body)
    parsed = parse_chat(values) if path == CHAT else parse_completion(values)
    request_id: str = request.state.request_id
    return Inbound(
        path=path,
        body=body,
        names=frozenset(values),
        parsed=parsed,
        leg_headers=headers.leg_headers(
            request.headers,
            request_id=request_id,
            forwards_authorization=room.options.forward_authorization,
        ),
        request_id=request_id,
        arrived_s=arrived_s,
    )
