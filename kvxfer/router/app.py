"""The router's ASGI application: control routes, the hot routes' place in the API document, and OpenAI's error shape.

Decides what each control route says. The hot routes are served below ASGI (`front`); under a server that knows only
ASGI they are served here, by the same handler. It must never know how a request is served.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer import __version__
from kvxfer.errors import KvxferError
from kvxfer.openai.errors import INVALID_REQUEST, RequestError, error_body, status_for
from kvxfer.router import headers
from kvxfer.router.admin import AdminAccess, add_admin_routes
from kvxfer.router.answer import RETRY_AFTER_STATUS
from kvxfer.router.apis import ROUTES, Api
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.front import Door, Front
from kvxfer.router.readiness import RouterReadiness
from kvxfer.serving.asgi_exchange import asgi_endpoint
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.exchange import ExchangeHandler


class RequestIds:
    """ASGI middleware: the answer of every control route carries the request id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = headers.REQUEST_ID.encode()
        received = next((value for key, value in scope["headers"] if key == name), None)
        request_id = headers.request_id(None if received is None else received.decode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = message.get("headers", ())
                if not any(key == name for key, _ in sent):
                    message = {**message, "headers": [*sent, (name, request_id.encode("latin-1"))]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class _Served(Response):
    """A hot route under a server that knows only ASGI."""

    def __init__(self, handler: ExchangeHandler, bodies: Bodies) -> None:
        super().__init__()
        self._endpoint = asgi_endpoint(handler, bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def error_response(error: Exception) -> JSONResponse:
    """OpenAI's error object for an exception, with ``Retry-After`` where waiting helps."""
    status = status_for(error)
    extra = {headers.RETRY_AFTER: "1"} if status in RETRY_AFTER_STATUS else {}
    return JSONResponse(error_body(error), status_code=status, headers=extra)


def build_app(core: RouterCore, keys: ApiKeys, door: Door, front: Front, admin: AdminAccess, bodies: Bodies) -> FastAPI:
    """The ASGI application; it owns nothing that must be closed."""
    app = FastAPI(title="kvxfer router", version=__version__, redoc_url=None)
    started_unix_s = int(time.time())
    readiness = RouterReadiness(
        core.workers,
        allows_local_prefill=core.options.allows_local_prefill,
        is_draining=lambda: door.is_draining,
    )
    core.metrics.ready.set_function(lambda: float(readiness.verdict().is_ready))
    app.add_middleware(RequestIds)

    @app.exception_handler(KvxferError)
    async def on_kvxfer_error(request: Request, error: KvxferError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        body = error_body(f"{request.method} {request.url.path}: {error.detail}", kind=INVALID_REQUEST, code="usage")
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(RequestError(f"{param or 'the request'}: {first['msg']}", param=param))

    for api in ROUTES:
        _add_hot_route(app, api, front, bodies)

    def check(request: Request) -> None:
        keys.check(request.headers.get("authorization"))

    def describe_model(model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": started_unix_s, "owned_by": "kvxfer"}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models that some worker serves."""
        check(request)
        return JSONResponse({"object": "list", "data": [describe_model(name) for name in core.workers.models()]})

    @app.get("/v1/models/{model:path}")
    async def model_by_name(request: Request, model: str) -> Response:
        """One model."""
        check(request)
        if model not in core.workers.models():
            raise RequestError(
                f"model: {model!r} is not served here", param="model", status=404, error_code="model_not_found"
            )
        return JSONResponse(describe_model(model))

    @app.get("/v1/workers")
    async def workers(request: Request) -> Response:
        """Every worker that is known, with its state and load."""
        check(request)
        return JSONResponse({"object": "list", "data": core.workers.describe()})

    @app.get("/live")
    @app.get("/health")
    async def live() -> Response:
        """Whether this process serves."""
        body: dict[str, Any] = {
            "status": "draining" if door.is_draining else "ok",
            "coordinator_connected": core.workers.is_connected,
            "inflight": door.inflight,
            **core.describe_process(),
        }
        return JSONResponse(body)

    @app.get("/ready")
    async def ready(model: str | None = None) -> Response:
        """Whether a request would be placed now."""
        body = readiness.describe(model, names_models=not keys.is_required)
        if body["status"] == "ready":
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={headers.RETRY_AFTER: "1"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(core.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    add_admin_routes(app, core.workers, admin)
    return app


def _add_hot_route(app: FastAPI, api: Api, front: Front, bodies: Bodies) -> None:
    async def serve(request: Request) -> Response:
        handler = front.find("POST", api.path)
        assert handler is not None
        return _Served(handler, bodies)

    body = {"content": {"application/json": {"schema": {"type": "object"}}}, "required": True}
    app.add_api_route(
        api.path,
        serve,
        methods=["POST"],
        summary=f"As the engines serve it: {api.path}",
        operation_id="post" + api.path.replace("/", "_"),
        openapi_extra={"requestBody": body},
        responses={400: {"description": "OpenAI's error object"}, 503: {"description": "no worker takes it now"}},
    )
