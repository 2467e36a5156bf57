"""One client's connection: HTTP/1.1, one request at a time, with a limit on each wait, and closed so that the client
receives the last answer.

Decides when bytes are read, when a request is handed on, and when the connection is closed. It must never know a route,
nor what is in a request: a *turn*, one request and its answer, is either an exchange on this socket (``direct``) or
uvicorn's over ASGI (``cycle``). A request behind another one waits as bytes, so that a client that sends many ahead
costs no more than a buffer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from kvxfer.errors import OverloadedError, ProtocolError
from kvxfer.openai.errors import INVALID_REQUEST, error_body, status_for
from kvxfer.serving.answers import whole_error
from kvxfer.serving.bodies import Bodies
from kvxfer.serving.connections import ConnectionPhase, Connections
from kvxfer.serving.cycle import ABORT, TLS, AsgiCycle
from kvxfer.serving.direct import DirectExchange
from kvxfer.serving.exchange import ExchangeHandler, FindHandler
from kvxfer.serving.half_closed import HalfClosed
from kvxfer.serving.handling import run_handler
from kvxfer.serving.heads import (
    HEAD_BYTES_MAX,
    HEAD_END,
    TIMED_OUT,
    MalformedRequestError,
    RequestHead,
    check_partial_head,
    read_head,
)
from kvxfer.serving.incoming import ChunkReader, LengthReader
from kvxfer.serving.transport import LingeringTransport

log = logging.getLogger("kvxfer.serving")

AHEAD_BYTES_MAX = 64 << 10
"""Of requests that a client sends before it has its answer: beyond it, it has to wait."""
NEVER = math.inf


@dataclasses.dataclass(eq=False)
class ConnectionContext:
    """What the connections of one server share."""

    app: ASGIApp
    state: ServerState
    connections: Connections
    bodies: Bodies
    header_timeout_s: float
    keepalive_s: float
    find_handler: FindHandler | None = None
    _fields: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    _common: bytes = b""

    def common_fields(self) -> bytes:
        """What uvicorn puts into each answer (the date), as lines; it makes a new list each second."""
        fields = self.state.default_headers
        if fields is not self._fields:
            self._fields = fields
            self._common = b"".join(b"%b: %b\r\n" % field for field in fields)
        return self._common


class Connection(asyncio.Protocol):
    """It reports its phase to the ``connections`` of its context."""

    transport: Any

    def __init__(self, context: ConnectionContext) -> None:
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._flow: FlowControl
        self._turn: DirectExchange | AsgiCycle | None = None
        """Its answer is not whole yet."""
        self._body: LengthReader | ChunkReader | None = None
        """Where the body of the last request is not whole yet."""
        self._buffer = b""
        """Of the next requests."""
        self._is_refused = False
        """Amid a request, of which more may be coming."""
        self._has_served = False
        self._due = NEVER
        """When the time of this phase is over."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = NEVER
        self._half_closed: HalfClosed | None = None
        """Where the client sends nothing more, and is given what it asked for."""
        self._writers: set[asyncio.Future[None]] = set()
        self.bodies = context.bodies
        self.client_name = ""
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int | None] | None = None
        self._tls: Any = None

    # What the loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = LingeringTransport(
            cast(asyncio.Transport, transport), may_still_send=self._may_still_send, on_closing=self._note_phase
        )
        self._flow = FlowControl(self.transport)
        peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        if isinstance(peer, tuple):
            self._client = (str(peer[0]), int(peer[1]))
            self.client_name = "{}:{}".format(*self._client)
        if isinstance(own, tuple):
            self._server = (str(own[0]), int(own[1]))
        self._tls = transport.get_extra_info("ssl_object")
        self._context.state.connections.add(self)  # type: ignore[arg-type]
        self._note_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._half_closed is not None:
            self._half_closed.stop()
        self.transport.lost()
        self._context.state.connections.discard(self)
        self._disconnect_turn()
        self._turn = None
        self._buffer = b""
        self._flow.resume_writing()
        self.wake_writers()
        self._context.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self.transport.discard(data)
            return
        try:
            self._receive(data)
        except MalformedRequestError as error:
            self._refuse_malformed(error)
        self._note_phase()

    def eof_received(self) -> bool:
        """The client sends nothing more. It is given what it asked for by then, as long as it takes it; one whose
        request is not whole has left. So has one that ends TLS: the loop closes such a connection in any case."""
        if self.transport.get_write_buffer_size():
            self.transport.watch_writes()
        if self._half_closed is not None and not self.transport.is_closing():
            return True  # told again, where reading was paused meanwhile
        sock = self.transport.get_extra_info("socket")
        if self._tls is not None or self.transport.is_closing() or sock is None or not self._answers_on():
            self._disconnect_turn()
            return False
        self._half_closed = HalfClosed(sock, probe=self._probe, left=self.transport.abort)
        return True

    def _answers_on(self) -> bool:
        """Of a client that sends nothing more: whether some whole request of it has no answer yet."""
        if self._turn is None or self._body is not None:
            return False
        if not self._buffer:
            self._turn.keeps_alive = False
        return True

    def _probe(self) -> None:
        if self._turn is not None and not self._flow.write_paused:
            harmless = self._turn.harmless()
            if harmless:
                self.transport.write(harmless)

    def pause_writing(self) -> None:
        self._flow.pause_writing()
        self.transport.watch_writes()
        if self._turn is not None:
            self._turn.pause_if_paused()
        self._note_phase()

    def resume_writing(self) -> None:
        self._flow.resume_writing()
        if not self.transport.is_closing():
            self.transport.writes_go_on()
        self.wake_writers()
        if self._turn is not None:
            self._turn.resume()
        self._note_phase()

    # What a turn asks and tells.

    @property
    def common_fields(self) -> bytes:
        return self._context.common_fields()

    @property
    def is_write_paused(self) -> bool:
        return self._flow.write_paused

    async def wait_writable(self, timeout_s: float) -> bool:
        waiter = self._loop.create_future()
        self._writers.add(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._writers.discard(waiter)
        return True

    def wake_writers(self) -> None:
        for waiter in self._writers:
            if not waiter.done():
                waiter.set_result(None)

    def on_body_taken(self) -> None:
        self._flow.resume_reading()

    def on_answered(self) -> None:
        """The answer of this turn is whole."""
        turn = self._turn
        self._turn = None
        self._has_served = True
        self._context.state.total_requests += 1
        if not self.transport.is_closing():
            if self._body is not None or (turn is not None and not turn.keeps_alive):
                self.transport.close()
            else:
                self._flow.resume_reading()
                self._go_on()
                if self._half_closed is not None and not self._answers_on():
                    self._disconnect_turn()
                    self.transport.close()
        self._note_phase()

    # What the server asks.

    def shutdown(self) -> None:
        """The server stops: close now, or after the answer that is being made."""
        if self._turn is None:
            self.transport.close()
        else:
            self._turn.keeps_alive = False

    def abort(self) -> None:
        self.transport.abort()

    def give_up(self) -> None:
        """Close, to make room for a new connection. An unfinished request is answered with an error, because a reset
        would look like a crash."""
        phase = self._phase()
        if phase is ConnectionPhase.IDLE:
            self.transport.close()
        elif phase in (ConnectionPhase.HEAD, ConnectionPhase.BODY):
            busy = OverloadedError("the server has too many connections, and this request was not whole yet")
            self._refuse(status_for(busy), error_body(busy))
        else:
            self.transport.abort()

    # Bytes to turns.

    def _receive(self, data: bytes) -> None:
        if self._body is not None:
            data = self._read_body(self._body, data)
        if not data:
            return
        if self._turn is not None:
            self._buffer += data
            if len(self._buffer) > AHEAD_BYTES_MAX:
                self._flow.pause_reading()
            return
        self._begin(data)

    def _go_on(self) -> None:
        """With what came behind the last request."""
        if self._buffer:
            data, self._buffer = self._buffer, b""
            try:
                self._begin(data)
            except MalformedRequestError as error:
                self._refuse_malformed(error)

    def _begin(self, data: bytes) -> None:
        """Read a request from its first byte; raises MalformedRequestError."""
        seen = len(self._buffer)
        if seen:
            data, self._buffer = self._buffer + data, b""
        end = data.find(HEAD_END, max(0, seen - len(HEAD_END)), HEAD_BYTES_MAX)
        if end < 0:
            check_partial_head(data, seen)
            self._buffer = data
            return
        end += len(HEAD_END)
        request = read_head(data[:end] if end < len(data) else data)
        self._serve(request)
        rest = data[end:]
        if self._body is not None and rest:
            rest = self._read_body(self._body, rest)
        self._buffer = rest
        if len(rest) > AHEAD_BYTES_MAX:
            self._flow.pause_reading()

    def _read_body(self, body: LengthReader | ChunkReader, data: bytes) -> bytes:
        """Returns what is behind the body; raises MalformedRequestError."""
        turn = self._turn
        assert turn is not None
        rest = body.feed(data, turn.push)
        if body.is_over:
            self._body = None
            turn.finish()
        elif turn.is_full:
            self._flow.pause_reading()
        return rest

    def _serve(self, request: RequestHead) -> None:
        """Hand a request on whose head is here."""
        find = self._context.find_handler
        handler = None if find is None else find(request.method, request.path)
        turn = self._serve_asgi(request) if handler is None else self._serve_direct(request, handler)
        if request.is_chunked:
            self._body = ChunkReader()
        elif request.length:
            self._body = LengthReader(request.length)
        else:
            turn.finish()

    def _serve_direct(self, request: RequestHead, handler: ExchangeHandler) -> DirectExchange:
        self._turn = exchange = DirectExchange(self, request)
        self._spawn(run_handler(handler, exchange))
        return exchange

    def _serve_asgi(self, request: RequestHead) -> AsgiCycle:
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.version,
            "server": self._server,
            "client": self._client,
            "scheme": "http" if self._tls is None else "https",
            "method": request.method,
            "root_path": "",
            "path": request.path,
            "raw_path": request.raw_path,
            "query_string": request.query,
            "headers": request.headers,
            "state": {},
            "extensions": {ABORT: {"call": self.transport.abort}, **({} if self._tls is None else {TLS: self._tls})},
        }
        self._turn = cycle = AsgiCycle(
            request,
            scope,
            transport=self.transport,
            flow=self._flow,
            default_headers=self._context.state.default_headers,
            on_response=self.on_answered,
        )
        self._spawn(cycle.run_asgi(self._context.app))  # type: ignore[arg-type]
        return cycle

    def _spawn(self, work: Any) -> None:
        tasks = self._context.state.tasks
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    # Endings.

    def _disconnect_turn(self) -> None:
        if self._turn is not None:
            self._turn.disconnect()

    def _may_still_send(self) -> bool:
        if self._half_closed is not None:
            return False
        return self._body is not None or self._is_refused or bool(self._buffer) or self._flow.read_paused

    def _refuse_malformed(self, error: MalformedRequestError) -> None:
        """The received bytes are no request: answer with an error where an answer may still be sent, and close. Where
        they were to be a request's body, its handler sees a client that left.
        """
        log.debug("malformed request from %s: %s", self.client_name, error)
        self._refuse(error.status, error_body(str(error), kind=INVALID_REQUEST, code=ProtocolError.code))

    def _refuse(self, status: int, body: dict[str, Any]) -> None:
        self._is_refused = True
        turn = self._turn
        self._disconnect_turn()
        if turn is None or not turn.is_started:
            self.transport.write(whole_error(status, body))
        self.transport.close()

    # Phases and time.

    def _phase(self) -> ConnectionPhase:
        if self._flow.write_paused:  # an answer is going out
            return ConnectionPhase.WORK
        if self.transport.is_closing():
            return ConnectionPhase.CLOSING
        if self._turn is None:
            return ConnectionPhase.HEAD if self._buffer else ConnectionPhase.IDLE
        return ConnectionPhase.WORK if self._body is None else ConnectionPhase.BODY

    def _note_phase(self) -> None:
        """Report the phase and set its deadline. It is called after everything that may have changed the phase."""
        phase = self._phase()
        if not self._context.connections.move(self, phase):
            return
        if phase is ConnectionPhase.CLOSING:
            self._context.state.connections.discard(self)  # uvicorn waits for these
        if phase is ConnectionPhase.IDLE:
            wait_s = self._context.keepalive_s if self._has_served else self._context.header_timeout_s
            self._set_due(self._loop.time() + wait_s)
        elif phase is not ConnectionPhase.HEAD:
            self._due = NEVER
        elif self._has_served or self._due == NEVER:  # the first request's time runs from the connection's beginning
            self._set_due(self._loop.time() + self._context.header_timeout_s)

    def _set_due(self, due: float) -> None:
        """One timer serves all deadlines: it is set anew only where it would ring too late, and looks when it rings."""
        self._due = due
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, NEVER
        if self._due == NEVER:
            return
        if self._loop.time() < self._due - 0.001:
            self._set_due(self._due)
            return
        if self._phase() is ConnectionPhase.HEAD:
            timeout_s = self._context.header_timeout_s
            reason = f"the request's head did not arrive within header_timeout_s {timeout_s:g}"
            self._refuse_malformed(MalformedRequestError(reason, TIMED_OUT))
        else:
            self.transport.close()
