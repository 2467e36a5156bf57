"""One client's connection: uvicorn's HTTP/1.1 over h11, with a clock for each head and an end that the client sees.

Decides when a connection is hung up on. It must never know a route; what uvicorn calls a cycle is one request and its
answer.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvxfer.errors import OverloadedError, ProtocolError
from kvxfer.openai.errors import INVALID_REQUEST, error_body, status_for
from kvxfer.openai.sse import encode_object
from kvxfer.serving.connections import ConnectionPhase, Connections
from kvxfer.serving.transport import LingeringTransport
from kvxfer.serving.wire import Wire

log = logging.getLogger("kvxfer.serving")
_uvicorn_log = logging.getLogger("kvxfer.serving.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)
"""Its warnings are of malformed requests, as many as clients like: they are said at debug level here."""

TIMED_OUT = 408


class Connection(H11Protocol):
    """``connections`` is told what this one does."""

    transport: Any

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        *,
        connections: Connections,
        header_timeout_s: float,
    ) -> None:
        super().__init__(config, state, {})
        self.logger = _uvicorn_log
        self.conn: Wire = Wire()
        self._roster = connections
        self._header_timeout_s = header_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused_amid_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        lingering = LingeringTransport(transport, may_still_send=self._may_still_send, on_closing=self._settle)
        super().connection_made(lingering)  # type: ignore[arg-type]
        self._start_head_timer()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.transport.lost()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._roster.remove(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(data)
            return
        super().data_received(data)
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def eof_received(self) -> None:
        """The client sends nothing more; uvicorn takes that for its leaving, and what is still going out is sent."""
        if self.transport.get_write_buffer_size():
            self.transport.watch_writes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.watch_writes()
        self._settle()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.transport.writes_go_on()
        self._settle()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP: say so where an answer may still be sent, and close. A request whose body it was is
        over for its handler, as if the client had left.
        """
        self._refuse_malformed(*self.conn.refused)

    def abort(self) -> None:
        self.transport.abort()

    def give_up(self) -> None:
        """Close for a new connection's sake. An unfinished request is told so: a reset would look like a crash."""
        phase = self._phase()
        if phase is ConnectionPhase.IDLE:
            self.transport.close()
        elif phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
            self._is_refused_amid_request = True
            busy = OverloadedError("the server has too many connections, and this request was not whole yet")
            self._refuse(status_for(busy), error_body(busy))
        else:
            self.transport.abort()

    def _may_still_send(self) -> bool:
        return self.conn.awaits_body or self._is_refused_amid_request

    def _refuse_malformed(self, status: int, reason: str) -> None:
        log.debug("malformed request from %s: %s", self.client, reason)
        self._refuse(status, error_body(reason, kind=INVALID_REQUEST, code=ProtocolError.code))

    def _refuse(self, status: int, body: dict[str, Any]) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.can_answer:
            content = encode_object(body)
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
                (b"connection", b"close"),
            ]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.close()

    def _phase(self) -> ConnectionPhase:
        if self.flow.write_paused:  # an answer is going out
            return ConnectionPhase.WORK
        if self.transport.is_closing():
            return ConnectionPhase.CLOSING
        if self.cycle is None or self.cycle.response_complete:
            return ConnectionPhase.HEAD if self.conn.has_partial_head else ConnectionPhase.IDLE
        return ConnectionPhase.BODY if self.cycle.more_body else ConnectionPhase.WORK

    def _settle(self) -> None:
        """Take note of what this connection does now; called after everything that may have changed it."""
        phase = self._phase()
        if not self._roster.move(self, phase):
            return
        if phase is ConnectionPhase.CLOSING:
            self.connections.discard(self)  # uvicorn's, which it waits for when it stops
        if phase is ConnectionPhase.HEAD:
            if self._head_timer is None:
                self._start_head_timer()
        elif phase is not ConnectionPhase.IDLE:  # a connection that never sent a byte keeps its clock
            self._stop_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._header_timeout_s, self._on_head_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self._phase() is ConnectionPhase.HEAD:
            self._refuse_malformed(
                TIMED_OUT, f"the request's head did not arrive within header_timeout_s {self._header_timeout_s:g}"
            )
        else:
            self.transport.close()
