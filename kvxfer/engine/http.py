"""The worker's HTTP server: OpenAI's routes, the prefill leg, and routes for operators.

It decides statuses and what a broken stream looks like. It must never know how an answer is computed; the engine's
thread does that, and tokenising runs on a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvxfer.engine.completion_parser import CompletionParser, ParsedCompletion
from kvxfer.engine.completion_writer import CompletionWriter
from kvxfer.engine.connection import ClientGone, EventStream, while_connected
from kvxfer.engine.engine import Engine
from kvxfer.engine.generation import Generation
from kvxfer.engine.readiness import Readiness
from kvxfer.engine.request import Delta, Leg
from kvxfer.errors import InvalidArgumentError, KvxferError
from kvxfer.openai.errors import INVALID_REQUEST, RequestError, error_body, status_for
from kvxfer.openai.sse import DONE, encode_event
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.head_as_get import HeadAsGet
from kvxfer.serving.json_response import JSONResponse
from kvxfer.types import TransferId

_log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
CLIENT_GONE_STATUS = 499
RETRY_AFTER_STATUS = frozenset({503})
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class WorkerHttp:
    """Serves one engine. ``statistics`` and ``render_metrics`` are what the two operator routes show."""

    def __init__(
        self,
        engine: Engine,
        parser: CompletionParser,
        readiness: Readiness,
        *,
        bodies: Bodies,
        statistics: Callable[[], dict[str, Any]],
        render_metrics: Callable[[], bytes],
    ) -> None:
        self._engine = engine
        self._parser = parser
        self._readiness = readiness
        self._bodies = bodies
        self._statistics = statistics
        self._render_metrics = render_metrics
        self._tokenising = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="kvxfer-tokenise")
        self._started_unix_s = int(time.time())

    def close(self) -> None:
        """Let go of the tokenising thread."""
        self._tokenising.shutdown(wait=False, cancel_futures=True)

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(
            title="kvxfer worker",
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            default_response_class=JSONResponse,
        )
        app.add_middleware(HeadAsGet)

        @app.exception_handler(KvxferError)
        async def on_kvxfer_error(request: Request, error: KvxferError) -> Response:
            return _error_response(error)

        @app.exception_handler(HTTPException)
        async def on_http_error(request: Request, error: HTTPException) -> Response:
            text = f"{request.method} {request.scope['path']}: {error.detail}"
            body = error_body(text, kind=INVALID_REQUEST, code="usage")
            return JSONResponse(body, status_code=error.status_code, headers=error.headers)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            return await self._serve(request, self._parser.completion)

        @app.post("/v1/chat/completions")
        async def chat_completions(request: Request) -> Response:
            return await self._serve(request, self._parser.chat)

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            model = self._engine.executor.model
            entry = {"id": model.name, "object": "model", "created": self._started_unix_s, "owned_by": "kvxfer"}
            return {"object": "list", "data": [{**entry, "max_model_len": model.context_tokens}]}

        @app.get("/live")
        @app.get("/health")
        async def live() -> Response:
            is_live = self._readiness.is_live
            return JSONResponse({"status": "ok" if is_live else "failed"}, status_code=200 if is_live else 503)

        @app.get("/ready")
        async def ready() -> Response:
            reason = self._readiness.reason
            if reason is None:
                return JSONResponse({"status": "ready"})
            body = {"status": "not_ready", "reason": reason.value}
            return JSONResponse(body, status_code=503, headers={"retry-after": "1"})

        @app.get("/metrics")
        async def metrics() -> Response:
            return PlainTextResponse(self._render_metrics(), media_type=CONTENT_TYPE_LATEST)

        @app.get("/statistics")
        async def statistics() -> dict[str, Any]:
            return self._statistics()

        @app.get("/held")
        async def held() -> dict[str, Any]:
            return {"data": await self._engine.ask(self._engine.executor.held)}

        @app.delete("/held/{transfer_id}")
        async def release(transfer_id: str) -> Response:
            try:
                identity = TransferId.from_hex(transfer_id)
            except InvalidArgumentError as error:
                raise RequestError(str(error), param="transfer_id") from None
            if await self._engine.ask(lambda: self._engine.executor.release(identity)):
                return JSONResponse({"released": transfer_id})
            text = f"no prompt is held here under transfer id {transfer_id}"
            return JSONResponse(error_body(text, kind=INVALID_REQUEST, code="grant_unknown"), status_code=404)

        digests = self._engine.executor.digests
        if digests is not None:

            @app.get("/debug/block-digests")
            async def block_digests() -> dict[str, Any]:
                return digests.as_dict()

        return app

    async def _serve(self, request: Request, read: Callable[[bytes, str], ParsedCompletion]) -> Response:
        received = request.headers.get(REQUEST_ID, "")
        request_id = received if _REQUEST_ID.fullmatch(received) else f"req-{secrets.token_hex(16)}"
        try:
            body = await self._bodies.read(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_GONE_STATUS)
        with self._engine.arriving():
            parsed = await asyncio.get_running_loop().run_in_executor(self._tokenising, read, body, request_id)
            generation = self._engine.submit(parsed.request)
        writer = CompletionWriter(parsed, self._engine.executor.model.name)
        headers = {REQUEST_ID: request_id}
        try:
            if parsed.request.leg is Leg.PREFILL:
                work = self._prefill(generation, parsed, writer)
                return JSONResponse(await while_connected(request.receive, work), headers=headers)
            if not parsed.is_stream:
                answer = await while_connected(request.receive, _collect(generation, writer))
                return JSONResponse(answer, headers=headers)
            first = await while_connected(request.receive, _next(generation))
        except ClientGone:
            generation.abort()
            _log.info("the client left", extra={"request_id": request_id})
            return Response(status_code=CLIENT_GONE_STATUS)
        except BaseException:
            generation.abort()
            raise
        return EventStream(_events(generation, first, writer), on_end=generation.abort, headers=headers)

    async def _prefill(
        self, generation: Generation, parsed: ParsedCompletion, writer: CompletionWriter
    ) -> dict[str, Any]:
        outcome = await generation.wait_prefilled()
        remote = parsed.request.remote
        return writer.prefilled(outcome, "" if remote is None else str(remote.transfer_id))


async def _next(generation: Generation) -> Delta:
    return await anext(generation)


async def _collect(generation: Generation, writer: CompletionWriter) -> dict[str, Any]:
    texts: list[str] = []
    token_ids: list[int] = []
    finish_reason = ""
    async for delta in generation:
        texts.append(delta.text)
        token_ids += delta.token_ids
        finish_reason = delta.finish_reason or finish_reason
    return writer.whole("".join(texts), token_ids, finish_reason, generation.outcome)


async def _events(generation: Generation, first: Delta, writer: CompletionWriter) -> AsyncGenerator[bytes, None]:
    """The stream after its first delta came; an error in it is its last event, without an end mark."""
    try:
        for chunk in (*writer.first(), *writer.piece(first)):
            yield encode_event(chunk)
        finish_reason = first.finish_reason
        async for delta in generation:
            for chunk in writer.piece(delta):
                yield encode_event(chunk)
            finish_reason = delta.finish_reason or finish_reason
        for chunk in writer.last(finish_reason or "stop", generation.outcome):
            yield encode_event(chunk)
        yield DONE
    except KvxferError as error:
        yield encode_event(error_body(error))


def _error_response(error: KvxferError) -> Response:
    status = status_for(error)
    headers = {"retry-after": "1"} if status in RETRY_AFTER_STATUS else {}
    return JSONResponse(error_body(error), status_code=status, headers=headers)
