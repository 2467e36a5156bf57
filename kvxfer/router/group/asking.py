"""Control routes under several processes: a member passes them on as they came, and the leader's application answers.

So every answer is of the one view that the leader has, whichever process took the connection. ``/live`` and ``/health``
are of the process itself, and so is what is asked of one Response: all processes know who keeps it.

Decides which routes are passed on, and how large they may be; it must never know what they mean.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.errors import KvxferError, OverloadedError
from kvxfer.openai.errors import RequestError
from kvxfer.router.app import error_response
from kvxfer.router.group.channel import Channel
from kvxfer.router.responses import PATH
from kvxfer.serving.bodies import Bodies

OWN = frozenset({"/live", "/health"})
BODY_BYTES_MAX = 1 << 20
ANSWER_S = 10.0
WITHOUT_CONTENT = frozenset({204, 304})
HEADERS_OWN = frozenset({b"content-length", b"transfer-encoding", b"connection", b"date"})

Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


class Questions:
    """Those of one member that are not answered yet."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def ask(
        self, method: str, target: tuple[str, str], headers: list[tuple[bytes, bytes]], body: bytes
    ) -> Answer:
        """Raises OverloadedError where the leader does not answer in time."""
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        sent = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
        self._channel.send("ask", number, method, *target, sent, body.decode("latin-1"))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise OverloadedError("the process that leads this router does not answer") from None
        finally:
            del self._waiting[number]

    def answered(self, number: int, status: int, headers: list[list[str]], body: str) -> None:
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            waiting.set_result((status, encoded, body.encode("latin-1")))


class PassingOn:
    """ASGI: ``own`` answers what is of this process, and the leader the rest."""

    def __init__(self, own: ASGIApp, questions: Questions, bodies: Bodies) -> None:
        self._own = own
        self._questions = questions
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OWN or PATH.fullmatch(scope["path"]):
            await self._own(scope, receive, send)
            return
        response = await self._answer(Request(scope, receive))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        scope = request.scope
        try:
            body = await self._bodies.read(request)
            if len(body) > BODY_BYTES_MAX:
                raise RequestError(f"a body of a control route has at most {BODY_BYTES_MAX} bytes", status=413)
            target = (scope["path"], scope.get("query_string", b"").decode("latin-1"))
            status, headers, content = await self._questions.ask(scope["method"], target, scope["headers"], body)
        except KvxferError as error:
            return error_response(error, request)
        response = Response(content, status_code=status)
        kept = [(name, value) for name, value in headers if name not in HEADERS_OWN]
        if status not in WITHOUT_CONTENT:
            kept.append((b"content-length", b"%d" % len(content)))
        response.raw_headers = kept
        return response


async def answer(app: ASGIApp, method: str, path: str, query: str, headers: list[list[str]], body: str) -> list[Any]:
    """What ``app`` says, as a message carries it: status, headers, body. Raises TimeoutError after ANSWER_S: then no
    one waits for it any more, and what ``app`` does is ended."""
    said: dict[str, Any] = {"status": 500, "headers": []}
    parts: list[bytes] = []
    is_read = False
    forever = asyncio.Event()

    async def receive() -> Message:
        nonlocal is_read
        if is_read:
            await forever.wait()
        is_read = True
        return {"type": "http.request", "body": body.encode("latin-1"), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            said.update(status=message["status"], headers=message.get("headers", []))
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers],
        "client": None,
        "server": None,
    }
    async with asyncio.timeout(ANSWER_S):
        await app(scope, receive, send)
    shown = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in said["headers"]]
    return [said["status"], shown, b"".join(parts).decode("latin-1")]
