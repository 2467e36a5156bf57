"""One client's connection: uvicorn's HTTP/1.1 over h11, with a time limit for each request's head, and closed so that
the client receives the last answer.

Decides when a connection is closed. It must never know a route. uvicorn calls one request and its answer a *cycle*.
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
"""uvicorn warns of every malformed request, so clients could fill the log. Here such a request is logged at debug
level."""

TIMED_OUT = 408


class Connection(H11Protocol):
    """It reports its phase to ``connections``, those of this server."""

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
        self._server_connections = connections
        self._header_timeout_s = header_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused_amid_request = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        lingering = LingeringTransport(transport, may_still_send=self._may_still_send, on_closing=self._note_phase)
        super().connection_made(lingering)  # type: ignore[arg-type]
        self._start_head_timer()
        self._note_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self.transport.lost()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._server_connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(data)
            return
        super().data_received(data)
        self._note_phase()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_phase()

    def eof_received(self) -> None:
        """The client sends nothing more. uvicorn takes that for a closed connection; what was written is still sent."""
        if self.transport.get_write_buffer_size():
            self.transport.watch_writes()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.watch_writes()
        self._note_phase()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.transport.writes_go_on()
        self._note_phase()

    def send_400_response(self, msg: str) -> None:
        """The received bytes are not HTTP: answer with an error where an answer may still be sent, and close. Where
        they were to be a request's body, its handler sees a client that disconnected.
        """
        self._refuse_malformed(*self.conn.refused)

    def abort(self) -> None:
        self.transport.abort()

    def give_up(self) -> None:
        """Close, to make room for a new connection. An unfinished request is answered with an error, because a reset
        would look like a crash."""
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

    def _note_phase(self) -> None:
        """Report the phase and set the head's timer. It is called after everything that may have changed the phase."""
        phase = self._phase()
        if not self._server_connections.move(self, phase):
            return
        if phase is ConnectionPhase.CLOSING:
            self.connections.discard(self)  # uvicorn's own set: it waits for these when it stops
        if phase is ConnectionPhase.HEAD:
            if self._head_timer is None:
                self._start_head_timer()
        elif phase is not ConnectionPhase.IDLE:  # a connection that never sent a byte keeps its timer
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
