"""Reads the bodies of requests, all of them under one budget of bytes and each against the clock.

Decides which body is refused where they do not all fit: the one that is being read for longest. A client that sends at
the speed of its network has finished before its body becomes that one. It must never know what a body means.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterable, Iterable

from starlette.requests import Request

from kvxfer.errors import ClosedError, KvxferError, OverloadedError
from kvxfer.openai.errors import RequestError
from kvxfer.serving.limits import BODY_STEP_BYTES, ServingLimits

SHOWN_BYTES = 80
"""Of a header that is refused, in the text of its error."""
LENGTH_DIGITS_MAX = 18
"""Of a content-length that is read as a number; what is longer is too long."""


def check_encoding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise RequestError (415) for a body that is compressed. ``headers`` have names in lower case."""
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:SHOWN_BYTES].decode("latin-1")
            what = f"content-encoding: {shown!a} is not supported: send the body as it is, without that header"
            raise RequestError(what, status=415, param="content-encoding")


@dataclasses.dataclass(eq=False)
class _ReceivedBody:
    """One body that is being read."""

    clock: asyncio.Timeout
    end_s: float
    parts: list[bytes] = dataclasses.field(default_factory=list)
    size: int = 0
    step: int = 0
    """Bytes since the clock was last set."""
    refusal: KvxferError | None = None


class Bodies:
    """All bodies of one server; on one event loop."""

    def __init__(self, limits: ServingLimits) -> None:
        self._limits = limits
        self._reading: dict[_ReceivedBody, None] = {}
        """Oldest first."""
        self._held = 0
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """What the bodies that are being read hold now."""
        return self._held

    async def read(self, request: Request) -> bytes:
        """The whole body of an ASGI request, as :meth:`read_chunks` reads it."""
        check_encoding(request.scope["headers"])
        self.check_declared(request.headers.get("content-length", "0"))
        return await self.read_chunks(request.stream())

    def check_declared(self, length: str) -> None:
        """Raise RequestError where a body of that content-length is not read, ClosedError after :meth:`close`."""
        if self._is_closed:
            raise _stopping()
        bytes_max = self._limits.max_body_bytes
        if length.isdecimal() and (len(length) > LENGTH_DIGITS_MAX or int(length) > bytes_max):
            raise self._too_long()

    def whole(self, body: bytes) -> bytes:
        """A body that has come already. It waits for no client, so it needs no budget and no clock."""
        if self._is_closed:
            raise _stopping()
        if len(body) > self._limits.max_body_bytes:
            raise self._too_long()
        return body

    async def read_chunks(self, chunks: AsyncIterable[bytes]) -> bytes:
        """The whole body whose bytes ``chunks`` gives.

        Raises RequestError (408, 413), OverloadedError where the budget is used up and this body is being read for
        longest, ClosedError after :meth:`close`, and what ``chunks`` raises where the client left amid it.
        """
        if self._is_closed:
            raise _stopping()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._limits.body_timeout_s
        clock = asyncio.timeout_at(min(end_s, loop.time() + self._limits.body_stall_s))
        body = _ReceivedBody(clock, end_s)
        self._reading[body] = None
        try:
            async with clock:
                async for chunk in chunks:
                    self._take(body, chunk, loop.time())
        except TimeoutError:
            raise (body.refusal or self._late(body)) from None
        finally:
            self._let_go(body)
        if body.refusal is not None:
            raise body.refusal
        return b"".join(body.parts)

    def close(self) -> None:
        """Refuse every body that is not whole yet, and all later ones: the server stops."""
        self._is_closed = True
        for body in tuple(self._reading):
            self._refuse(body, _stopping())

    def _too_long(self) -> RequestError:
        return RequestError(f"the body is longer than max_body_bytes {self._limits.max_body_bytes}", status=413)

    def _take(self, body: _ReceivedBody, chunk: bytes, now_s: float) -> None:
        if body.refusal is not None:
            raise body.refusal
        body.size += len(chunk)
        if body.size > self._limits.max_body_bytes:
            raise self._too_long()
        body.parts.append(chunk)
        self._held += len(chunk)
        while self._held > self._limits.body_budget_bytes:
            budget = self._limits.body_budget_bytes
            self._refuse(
                next(iter(self._reading)),
                OverloadedError(f"requests that are being read hold all of body_budget_bytes {budget}"),
            )
        if body.refusal is not None:
            raise body.refusal
        body.step += len(chunk)
        if body.step >= BODY_STEP_BYTES:
            body.step = 0
            body.clock.reschedule(min(body.end_s, now_s + self._limits.body_stall_s))

    def _refuse(self, body: _ReceivedBody, refusal: KvxferError) -> None:
        """Give its bytes back now, and wake its reader."""
        body.refusal = refusal
        self._let_go(body)
        if not body.clock.expired():  # otherwise it is being woken already
            body.clock.reschedule(0.0)

    def _let_go(self, body: _ReceivedBody) -> None:
        if body in self._reading:
            del self._reading[body]
            self._held -= sum(map(len, body.parts))
            if body.refusal is not None:
                body.parts.clear()

    def _late(self, body: _ReceivedBody) -> RequestError:
        """Names the limit that the clock was set to. The time cannot tell which: a timer may fire a tick early."""
        limits = self._limits
        if body.clock.when() == body.end_s:
            return RequestError(f"the body did not arrive within body_timeout_s {limits.body_timeout_s:g}", status=408)
        return RequestError(
            f"the body came slower than {BODY_STEP_BYTES} bytes in body_stall_s {limits.body_stall_s:g}", status=408
        )

    def __repr__(self) -> str:
        return f"Bodies(reading={len(self._reading)}, held_bytes={self._held})"


def _stopping() -> ClosedError:
    return ClosedError("this server is stopping")
