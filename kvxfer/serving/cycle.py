"""One request and its answer over ASGI: uvicorn's, as our connections need it.

Decides nothing but what an answer before the end of its request's body means for the connection. It must never know a
route. uvicorn calls one request and its answer a *cycle*.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvxfer.serving.answers import CONTINUE, LEADING_ZERO
from kvxfer.serving.heads import RequestHead

_log = logging.getLogger("kvxfer.serving.uvicorn")
_log.setLevel(logging.ERROR)
"""What uvicorn says of clients, at lower levels, would let them fill the log."""

ABORT = "kvxfer.abort"
TLS = "kvxfer.tls"
"""Extension of ASGI's scope: the TLS object of the connection, where it speaks TLS."""
"""In an ASGI scope's extensions: ``{"call": ...}`` with a function that cuts the connection. ASGI itself has none."""


class AsgiCycle(RequestResponseCycle):
    def __init__(
        self,
        request: RequestHead,
        scope: dict[str, Any],
        *,
        transport: Any,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        on_response: Callable[[], None],
    ) -> None:
        super().__init__(
            scope=scope,  # type: ignore[arg-type]
            transport=transport,
            flow=flow,
            logger=_log,
            access_logger=_log,
            access_log=False,
            default_headers=default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=request.expects_continue,
            keep_alive=request.keeps_alive,
            on_response=on_response,
        )
        self._is_old = request.version == "1.0"
        self._is_until_close = False

    @property
    def is_started(self) -> bool:
        return self.response_started

    @property
    def keeps_alive(self) -> bool:
        return self.keep_alive

    @keeps_alive.setter
    def keeps_alive(self, value: bool) -> None:
        self.keep_alive = value

    @property
    def is_full(self) -> bool:
        return len(self.body) > HIGH_WATER_LIMIT

    def push(self, piece: bytes) -> None:
        self.body += piece
        self.message_event.set()

    def finish(self) -> None:
        """The request is whole."""
        self.more_body = False
        self.message_event.set()

    def harmless(self) -> bytes:
        """As a direct exchange's."""
        if not self.response_started:
            return b"" if self._is_old else CONTINUE
        return LEADING_ZERO if self.chunked_encoding and self.scope["method"] != "HEAD" else b""

    def disconnect(self) -> None:
        if not self.response_complete:
            self.disconnected = True
        self.message_event.set()

    def pause_if_paused(self) -> None:
        """uvicorn waits for the flow control itself."""

    def resume(self) -> None:
        pass

    async def send(self, message: Any) -> None:
        """As uvicorn's. An answer before the end of the request's body says that the connection ends with it: what
        follows would have to be read to its end before the next request can be found. A client of HTTP/1.0 gets no
        chunks: an answer of unknown length ends with the connection.
        """
        if not self.response_started:
            if self.more_body:
                self.keep_alive = False
            if self._is_old and not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self._is_until_close = True
                self.chunked_encoding = False
        elif self._is_until_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
