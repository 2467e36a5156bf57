"""The router's ASGI application: control routes, the hot routes' place in the API document, and OpenAI's error shape.

Decides what each control route says. The hot routes are served below ASGI (`front`); under a server that knows only
ASGI they are served here, by the same handler. It must never know how a request is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer import __version__
from kvxfer.errors import ForbiddenError, KvxferError
from kvxfer.openai.errors import INVALID_REQUEST, RequestError, error_body, status_for
from kvxfer.router import document, headers
from kvxfer.router.admin import AdminAccess, add_admin_routes
from kvxfer.router.answer import RETRY_AFTER_STATUS
from kvxfer.router.apis import ROUTES, Api, style_of
from kvxfer.router.auth import ApiKeys
from kvxfer.router.core import RouterCore
from kvxfer.router.cors import ALLOW_ORIGIN, PREFLIGHT, VARY, Cors, is_for_pages
from kvxfer.router.fleet.listed_models import listed_of
from kvxfer.router.front import Door, Front
from kvxfer.router.keyed import RateLimitedError
from kvxfer.router.readiness import RouterReadiness
from kvxfer.router.responses import METHODS, NOT_FOUND
from kvxfer.router.ui.routes import add_ui_routes
from kvxfer.router.view import View
from kvxfer.serving.asgi_exchange import asgi_endpoint
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.exchange import ExchangeHandler
from kvxfer.serving.head_as_get import HeadAsGet
from kvxfer.serving.json_response import JSONResponse
from kvxfer.serving.side_port import SIDE_PORT


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


class CorsHeaders:
    """ASGI middleware: preflights of all routes, and the headers of what the application answers. A hot route has put
    its own there."""

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_for_pages(scope["path"]):
            await self._app(scope, receive, send)
            return
        given = dict(reversed(scope["headers"]))
        origin = given.get(b"origin")
        if scope["method"] == "OPTIONS":
            told = self._cors.preflight_headers(*map(given.get, PREFLIGHT))
            if told is not None:
                await send({"type": "http.response.start", "status": 204, "headers": list(told)})
                await send({"type": "http.response.body", "body": b""})
                return
        more = self._cors.answer_headers(origin)

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent = message.get("headers", ())
                if not any(name in (ALLOW_ORIGIN, VARY) for name, _ in sent):
                    message = {**message, "headers": [*sent, *more]}
            await send(message)

        await self._app(scope, receive, send_with_cors)


class _Served(Response):
    """A hot route under a server that knows only ASGI."""

    def __init__(self, handler: ExchangeHandler, bodies: Bodies) -> None:
        super().__init__()
        self._endpoint = asgi_endpoint(handler, bodies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._endpoint(scope, receive, send)


def error_response(error: Exception, request: Request) -> JSONResponse:
    """The error object of the API that was asked, for an exception, with ``Retry-After`` where waiting helps."""
    status = status_for(error)
    wait_s = error.retry_after_s if isinstance(error, RequestError) and error.retry_after_s else 1
    extra = {headers.RETRY_AFTER: str(wait_s)} if status in RETRY_AFTER_STATUS else {}
    return JSONResponse(_shaped(error_body(error), request), status_code=status, headers=extra)


def _shaped(body: dict[str, Any], request: Request) -> dict[str, Any]:
    return style_of(request.scope["path"]).error_answer(body)


def build_app(
    core: RouterCore,
    keys: ApiKeys,
    door: Door,
    front: Front,
    admin: AdminAccess,
    bodies: Bodies,
    cors: Cors | None = None,
) -> FastAPI:
    """The ASGI application; it owns nothing that must be closed."""
    app = FastAPI(
        title="kvxfer router",
        version=__version__,
        redoc_url=None,
        redirect_slashes=False,
        responses=document.DEFAULT,
    )
    started_unix_s = int(time.time())
    readiness = RouterReadiness(
        core.workers,
        allows_local_prefill=core.options.allows_local_prefill,
        is_draining=lambda: door.is_draining,
    )
    core.metrics.ready.set_function(lambda: float(readiness.verdict().is_ready))
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestIds)
    if cors is not None:
        app.add_middleware(CorsHeaders, cors=cors)

    @app.exception_handler(KvxferError)
    async def on_kvxfer_error(request: Request, error: KvxferError) -> Response:
        return error_response(error, request)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {request.scope['path']}: {error.detail}"
        body = error_body(text, kind=INVALID_REQUEST, code="usage")
        return JSONResponse(_shaped(body, request), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return error_response(RequestError(f"{param or 'the request'}: {first['msg']}", param=param), request)

    for api in ROUTES:
        _add_hot_route(app, api, front, bodies)

    def enter(request: Request) -> View:
        """Count a request of a key. Returns what that key sees."""
        try:
            keyed = keys.enter_shown(request.scope["headers"])
        except RateLimitedError as error:
            core.metrics.key_limited(error.key_name, error.limit.value)
            raise
        keyed.end()
        return View(keyed.models)

    def hides(request: Request) -> bool:
        """Whether something that the router knows is not for every caller of this port."""
        return keys.are_some_restricted and SIDE_PORT not in request.scope.get("extensions", {})

    def check_sees_all(request: Request) -> None:
        """Raise RequestError (401), ForbiddenError unless that is the key of an admin, or for all models."""
        try:
            holder = keys.check_shown(request.scope["headers"])
        except RequestError:
            if not admin.keys.is_required:
                raise
            admin.keys.check(request.headers.get("authorization"))
        else:
            if holder is not None and holder.models is not None:
                raise ForbiddenError("this API key is for some models, and /metrics names every worker")

    def describe_model(model: str, may_use: Callable[[str], bool]) -> dict[str, Any]:
        """An adapter names the model that it belongs to: a key sees it where it may use it."""
        hidden = {name for name in core.workers.models() if not may_use(name)}
        said = listed_of(model, core.workers.entries())
        shown = {name: value for name, value in said.items() if value not in hidden}
        return {"id": model, "object": "model", "created": started_unix_s, "owned_by": "kvxfer", **shown}

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models that some worker serves."""
        may_use = enter(request).shows
        names = filter(may_use, core.workers.models())
        return JSONResponse({"object": "list", "data": [describe_model(name, may_use) for name in names]})

    @app.get("/v1/models/{model:path}")
    async def model_by_name(request: Request, model: str) -> Response:
        """One model."""
        may_use = enter(request).shows
        if not may_use(model) or model not in core.workers.models():
            raise RequestError(
                f"model: {model!r} is not served here", param="model", status=404, error_code="model_not_found"
            )
        return JSONResponse(describe_model(model, may_use))

    @app.get("/v1/workers")
    async def workers(request: Request) -> Response:
        """Every worker that is known, with its state and load; to a key for some models, what serves these."""
        view = enter(request)
        return JSONResponse({"object": "list", "data": view.workers(core.workers.describe())})

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

    @app.get("/ready", responses=document.UNREADY)
    async def ready(request: Request, model: str | None = None) -> Response:
        """Whether a request would be placed now."""
        if model is not None and hides(request):
            holder = keys.check_shown(request.scope["headers"])
            if holder is not None and not holder.may_use(model):
                model = ""  # as one that nobody has heard of
        body = readiness.describe(model, names_models=not keys.is_required)
        if body["status"] == "ready":
            return JSONResponse(body)
        return JSONResponse(body, status_code=503, headers={headers.RETRY_AFTER: "1"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus' text format."""
        if hides(request):
            check_sees_all(request)
        return Response(core.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    _add_response_routes(app, front, bodies)
    add_admin_routes(app, core.workers, admin, bodies)
    add_ui_routes(app, core, door, admin)
    return app


def _add_hot_route(app: FastAPI, api: Api, front: Front, bodies: Bodies) -> None:
    async def serve(request: Request) -> Response:
        handler = front.find("POST", api.path)
        assert handler is not None
        return _Served(handler, bodies)

    app.add_api_route(
        api.path,
        serve,
        methods=["POST"],
        summary=f"As the engines serve it: {api.path}",
        operation_id="post" + api.path.replace("/", "_"),
        openapi_extra={"requestBody": document.request_body(api)},
        responses=document.responses(api),
    )


def _add_response_routes(app: FastAPI, front: Front, bodies: Bodies) -> None:
    async def serve(request: Request, response_id: str) -> Response:
        """As the engine that keeps this response serves it."""
        handler = front.find(request.method, request.scope["path"])
        if handler is None:
            raise RequestError(f"response_id: {response_id!a:.300} is no id", status=404, error_code=NOT_FOUND)
        return _Served(handler, bodies)

    for end, methods in METHODS.items():
        for method in methods:
            app.add_api_route(
                f"/v1/responses/{{response_id}}{end}",
                serve,
                methods=[method],
                operation_id=f"{method.lower()}_response{end.replace('/', '_')}",
                responses=document.ENGINES_OWN,
            )
