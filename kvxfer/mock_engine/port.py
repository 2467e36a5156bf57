"""One port: the routes of one engine, the faults that meet a request, and the connections that are open.

Decides which function answers a path. It must never know how an answer is made.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import socket
from collections.abc import Callable

from kvxfer.errors import KvxferError
from kvxfer.mock_engine import admin, asked, plain_routes
from kvxfer.mock_engine.asked import AskedAnswer
from kvxfer.mock_engine.claims import CLAIM_PATH, RELEASE_PATH
from kvxfer.mock_engine.engine import MockEngine
from kvxfer.mock_engine.exchange import MockExchange
from kvxfer.mock_engine.faults import FaultKind, MockFault
from kvxfer.mock_engine.http_protocol import MockConnection, MockRequest
from kvxfer.mock_engine.legs import WHOLE_LEG, LegPart, read_leg
from kvxfer.mock_engine.options import EngineKind, MockEngineOptions
from kvxfer.mock_engine.responder import FaultyResponder, Responder, encoded_headers
from kvxfer.mock_engine.shape import to_json
from kvxfer.openai.errors import RequestError, error_body, status_for

log = logging.getLogger("kvxfer.mock_engine")

Reader = Callable[[dict[str, object], MockEngineOptions], AskedAnswer]
Route = Callable[[MockEngine, MockRequest, Responder], None]
ErrorShape = Callable[[BaseException], tuple[int, bytes]]
"""Status and body of an error."""

BACKLOG = 4096
RECORDED_BYTES_MAX = 1 << 18
_VLLM = frozenset({EngineKind.ANY, EngineKind.VLLM})
_SGLANG = frozenset({EngineKind.ANY, EngineKind.SGLANG})
_ALL = frozenset(EngineKind)

ANSWERS: dict[str, tuple[Reader, frozenset[EngineKind]]] = {
    "/v1/completions": (asked.read_completion, _ALL),
    "/v1/chat/completions": (asked.read_chat, _ALL),
    "/v1/responses": (asked.read_responses, _VLLM | _SGLANG),
    "/v1/messages": (asked.read_messages, _VLLM | _SGLANG),
    "/generate": (asked.read_generate, _SGLANG),
}
"""Paths that are answered with text."""

COMPUTED: dict[str, tuple[Route, frozenset[EngineKind]]] = {
    "/v1/embeddings": (plain_routes.embeddings, _VLLM | _SGLANG),
    "/v1/rerank": (plain_routes.rerank, _VLLM | _SGLANG),
    "/rerank": (plain_routes.rerank, _VLLM),
    "/v1/messages/count_tokens": (plain_routes.count_tokens, _VLLM | _SGLANG),
    "/tokenize": (plain_routes.tokenize, _VLLM | _SGLANG),
    "/v1/tokenize": (plain_routes.tokenize, _SGLANG),
    "/detokenize": (plain_routes.detokenize, _VLLM | _SGLANG),
}
"""Other paths of POST that compute something."""

SHOWN: dict[str, tuple[Route, frozenset[EngineKind]]] = {
    "/health": (plain_routes.healthy, _ALL),
    "/live": (plain_routes.healthy, frozenset({EngineKind.ANY, EngineKind.KVXFER})),
    "/ready": (plain_routes.healthy, frozenset({EngineKind.ANY, EngineKind.KVXFER})),
    "/ping": (plain_routes.healthy, _VLLM | _SGLANG),
    "/health_generate": (plain_routes.healthy, _SGLANG),
    "/metrics": (plain_routes.metrics, _ALL),
    "/version": (plain_routes.version, _VLLM),
    "/v1/models": (plain_routes.models, _ALL),
    "/server_info": (plain_routes.about_server, _SGLANG),
    "/get_server_info": (plain_routes.about_server, _SGLANG),
    "/model_info": (plain_routes.about_model, _SGLANG),
    "/get_model_info": (plain_routes.about_model, _SGLANG),
    "/get_load": (plain_routes.load, _SGLANG),
    "/v1/loads": (plain_routes.loads, _SGLANG),
    "/query": (plain_routes.bootstrap_query, _VLLM),
    "/flush_cache": (plain_routes.flush, _SGLANG),
    "/reset_prefix_cache": (plain_routes.flush, _VLLM),
}
"""Paths of GET and POST that show or reset something."""

_ADMIN = {"/mock/faults": admin.faults, "/mock/statistics": admin.statistics, "/mock/requests": admin.requests}
_BETWEEN_ENGINES = {CLAIM_PATH: admin.claim, RELEASE_PATH: admin.release}
_AT_DISPATCH = frozenset(FaultKind) - {FaultKind.SLOW_READ}


class EnginePort:
    """``engines`` has every engine of the process by its port, this one too."""

    def __init__(self, engine: MockEngine, engines: dict[int, MockEngine], listener: socket.socket) -> None:
        self.engine = engine
        self.faults = engine.faults
        self.max_body_bytes = engine.options.max_body_bytes
        self._engines = engines
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._connections: set[MockConnection] = set()
        self._loop = asyncio.get_running_loop()
        self._up: asyncio.Task[None] | None = None
        engine.on_down.append(self.down)

    async def listen(self) -> None:
        self._server = await self._loop.create_server(
            lambda: MockConnection(self), sock=self._listener, backlog=BACKLOG
        )

    def down(self, fault: MockFault) -> None:
        """Close the port and every connection, for ``delay_s`` or for good."""
        self.close()
        if fault.delay_s:
            self._up = self._loop.create_task(self._come_up(fault.delay_s))

    async def _come_up(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._listener = listening(self.engine.options.host, self._port)
        await self.listen()

    def close(self) -> None:
        if self._up is not None:
            self._up.cancel()
        if self._server is not None:
            self._server.close()
        self._listener.close()
        for connection in list(self._connections):
            connection.transport.abort()

    def opened(self, connection: MockConnection) -> None:
        self._connections.add(connection)
        self.engine.connections += 1

    def closed(self, connection: MockConnection, *, left: bool) -> None:
        self._connections.discard(connection)
        self.engine.connections -= 1
        if left:
            self.engine.counts.clients_left += 1

    def computes(self, path: str) -> bool:
        return path in ANSWERS or path in COMPUTED

    def serve(self, request: MockRequest, responder: Responder, connection: MockConnection) -> None:
        path, engine = request.path, self.engine
        if path.startswith("/mock/"):
            self._guarded(lambda: self._serve_admin(request, responder), responder, own_error)
            return
        if self.computes(path):
            engine.counts.requests += 1
            if engine.options.record and len(request.body) <= RECORDED_BYTES_MAX:
                engine.recorded.append({"port": engine.port, "request": request})
        if len(self.faults):
            leg = self._leg_part(request)
            fault = self.faults.take(path, leg, computes=self.computes(path), kinds=_AT_DISPATCH)
            if fault is not None:
                self._serve_with(fault, request, responder, connection)
                return
        self._dispatch(request, responder, None)

    def _leg_part(self, request: MockRequest) -> LegPart | None:
        if request.path not in ANSWERS:
            return None
        try:
            return read_leg(request.json(), self.engine.role, self.engine.options.kind, "").part
        except RequestError:
            return None

    def _serve_with(
        self, fault: MockFault, request: MockRequest, responder: Responder, connection: MockConnection
    ) -> None:
        log.info("a request meets a fault", extra={"fault": fault.kind, "path": request.path})
        if fault.kind is FaultKind.STATUS:
            body = {"message": fault.message, "type": "InternalServerError", "param": None, "code": fault.status}
            responder.answer(fault.status, to_json({"error": body}), headers=encoded_headers(fault.headers))
        elif fault.kind in (FaultKind.HANG, FaultKind.LATE):
            if fault.delay_s:
                timer = self._loop.call_later(fault.delay_s, self._dispatch, request, responder, None)
                request.on_gone = timer.cancel
        elif fault.kind in (FaultKind.LOAD, FaultKind.KEEP, FaultKind.LIE):
            self._dispatch(request, responder, fault)
        else:
            faulty = FaultyResponder(connection, request.keep_alive, fault, self.engine.down)
            connection.use(faulty)
            self._dispatch(request, faulty, None)

    def _dispatch(self, request: MockRequest, responder: Responder, fault: MockFault | None) -> None:
        path, kind = request.path, self.engine.options.kind
        if request.method == "POST" and path in ANSWERS and kind in ANSWERS[path][1]:
            self._guarded(lambda: self._serve_answer(request, responder, fault), responder, self._error)
            return
        entry = COMPUTED.get(path) if request.method == "POST" else None
        entry = entry or SHOWN.get(path)
        if entry is None and path.startswith("/v1/models/"):
            entry = SHOWN["/v1/models"]
        if entry is None or kind not in entry[1]:
            status = 405 if path in ANSWERS or path in COMPUTED else 404
            responder.answer(status, to_json({"detail": "Not Found" if status == 404 else "Method Not Allowed"}))
            return
        self._guarded(lambda: entry[0](self.engine, request, responder), responder, self._error)

    def _serve_answer(self, request: MockRequest, responder: Responder, fault: MockFault | None) -> None:
        engine = self.engine
        body = request.json()
        request_id = request.header(b"x-request-id") or str(body.get("rid") or body.get("request_id") or "")
        request_id = request_id[:128] or secrets.token_hex(16)
        # An engine's own id is never used twice, whatever its clients say.
        own_id = f"{request_id}-{self._port}-{next(self._numbers)}"
        leg = read_leg(body, engine.role, engine.options.kind, own_id)
        wanted = ANSWERS[request.path][0](body, engine.options)
        wanted.model = plain_routes.check_model(engine, wanted.model)
        exchange = MockExchange(engine, responder, wanted, leg, request_id, fault)
        engine.exchanges.add(exchange)
        request.on_gone = exchange.client_left
        exchange.start()

    def _serve_admin(self, request: MockRequest, responder: Responder) -> None:
        admin.check_allowed(request)
        if request.path in _ADMIN:
            _ADMIN[request.path](self._engines, self.engine, request, responder)
        elif request.path in _BETWEEN_ENGINES and request.method == "POST":
            _BETWEEN_ENGINES[request.path](self.engine, request, responder)
        else:
            raise RequestError(f"{request.method} {request.path} is not a route", status=404)

    def _error(self, error: BaseException) -> tuple[int, bytes]:
        return self.engine.error_bytes(error, WHOLE_LEG)

    def _guarded(self, work: Callable[[], None], responder: Responder, shape: ErrorShape) -> None:
        """Run ``work``; an error becomes the answer, as ``shape`` writes it."""
        try:
            work()
        except Exception as error:
            if isinstance(error, RequestError):
                self.engine.counts.refused += 1
            elif not isinstance(error, KvxferError):
                log.exception("a request failed")
            status, body = shape(error)
            if responder.begun:
                responder.end(b"")
            else:
                responder.answer(status, body)


def own_error(error: BaseException) -> tuple[int, bytes]:
    """An error of the mock engine's own routes."""
    return status_for(error), to_json(error_body(error))


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises OSError, which names the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setblocking(False)
        made.bind((host.strip("[]"), port))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise OSError(error.errno, error.strerror, f"{host}:{port}") from None
    return made
