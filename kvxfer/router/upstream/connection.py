"""One kept connection to an engine: an ``asyncio`` protocol that carries one request after the other.

It decides which phase its request is in, when the socket is read, and what a lost connection says about the request.
It must never know other connections: the pool is told when this one is free or lost.

A chunk of a piped body goes from ``data_received`` to the consumer's ``write`` without a future, a timer or a task.
Deadlines are looked at by the pool's one timer (``check``). A body of several slices is sent from ``resume_writing``,
so that an answer is heard while it is sent. An early answer of 400 or more ends the sending.
"""

from __future__ import annotations

import asyncio
import collections
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.errors import ProtocolError
from kvxfer.router.upstream.errors import (
    UpstreamAbortedError,
    UpstreamClosedError,
    UpstreamError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
    UpstreamUnprocessedError,
)
from kvxfer.router.upstream.limits import (
    Patience,
    UpstreamCounters,
    UpstreamDeadlines,
    UpstreamLimits,
    UpstreamPhase,
)
from kvxfer.router.upstream.parser import BODY, COMPLETE, HEAD, AnswerParser, Emit, discard
from kvxfer.router.upstream.response import LateAnswer, UpstreamResponse

_BYTES_ACKED = struct.Struct("=120xQ")
"""``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""

LEAVE_S = 2.0
"""How long an engine is heard whose request was given up."""

Part = bytes | bytearray | memoryview


class UpstreamConnection(asyncio.Protocol):
    def __init__(
        self,
        address: str,
        limits: UpstreamLimits,
        counters: UpstreamCounters,
        *,
        on_free: Callable[[UpstreamConnection, bool], None],
        on_lost: Callable[[UpstreamConnection], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``tls`` is the context with which it speaks TLS."""
        self.tls = tls
        self._address = address
        self._limits = limits
        self._counters = counters
        self._on_free = on_free
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = AnswerParser(limits)
        self._transport: Any = None
        self._poll = select.poll()
        self._response: UpstreamResponse | None = None
        self._pending: collections.deque[memoryview] = collections.deque()
        self._is_cut = False
        self._is_plain = True
        self._is_write_paused = False
        self._is_read_paused = False
        self._is_reused = False
        self._written = 0
        self._phase = UpstreamPhase.SEND
        self._deadlines = UpstreamDeadlines()
        self._due = self._whole_due = 0.0
        self._seen = 0
        self._heard = 0.0
        self._patience: Patience | None = None
        self.idle_since = 0.0
        self.is_lost = False

    # What the pool asks.

    @property
    def is_usable(self) -> bool:
        """Whether an idle connection is open and silent, also by what the kernel heard since the loop's last turn."""
        return not self.is_lost and not self._transport.is_closing() and not self._poll.poll(0)

    def start(
        self,
        head: bytes,
        parts: Sequence[Part],
        length: int,
        *,
        to_head: bool,
        deadlines: UpstreamDeadlines,
        whole_due: float,
        patience: Patience | None = None,
    ) -> UpstreamResponse:
        self._patience = patience
        self._response = response = UpstreamResponse(self, self._address)
        self._parser.begin(response.receive(), to_head=to_head)
        self._counters.in_flight += 1
        self._phase = UpstreamPhase.SEND
        self._deadlines = deadlines
        self._due = self._loop.time() + deadlines.send_s
        self._whole_due = whole_due
        self._seen = 0
        size = len(head) + length
        self._written += size
        if size <= self._limits.send_slice_bytes:
            self._transport.writelines([head, *parts])
        else:
            self._pending.append(memoryview(head))
            step = self._limits.send_slice_bytes
            for part in parts:
                view = memoryview(part).cast("B")
                self._pending.extend(view[at : at + step] for at in range(0, len(view), step))
        self._send()
        return response

    def check(self, now: float) -> None:
        """The pool's timer: ends a request whose deadline has passed."""
        if self._response is None:
            return
        if now >= self._whole_due:
            self._time_out(UpstreamPhase.WHOLE, self._deadlines.whole_s)
        elif self._phase is UpstreamPhase.BODY:
            heard = self._response.heard
            seen = self._parser.body_bytes if heard is None else heard()
            if seen != self._seen or self._is_read_paused:
                if seen != self._seen:
                    self._counters.heard_s = now
                self._seen = seen
                self._hear(now)
            elif now >= self._due:
                more_s = 0.0 if self._patience is None else self._patience(now - self._heard)
                if more_s:
                    self._due = now + more_s
                else:
                    self._time_out(self._phase, self._deadlines.between_chunks_s)
        elif now >= self._due:
            is_sending = self._phase is UpstreamPhase.SEND
            self._time_out(self._phase, self._deadlines.send_s if is_sending else self._deadlines.first_byte_s)

    def _hear(self, now: float) -> None:
        """The body is not silent at this moment."""
        self._heard = now
        wait_s = self._deadlines.between_chunks_s
        self._due = now + (wait_s if self._patience is None else wait_s / 2)

    def close(self) -> None:
        """At once: what the transport still has is dropped. A request that runs is given up."""
        if self._response is not None:
            self.give_up()
        else:
            self._transport.abort()

    # What the answer asks.

    def pause(self) -> None:
        if not self._is_read_paused:
            self._is_read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_read_paused and self._backlog() <= self._limits.buffer_bytes_max // 2:
            self._is_read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def redirect(self, emit: Emit) -> None:
        self._parser.emit = emit

    def give_up(self) -> None:
        if self._response is not None:
            self._counters.aborted += 1
            error = UpstreamAbortedError("the router gave the request up", address=self._address, phase=self._phase)
            self._finish(error)

    def leave(self, late: LateAnswer) -> None:
        """Give the request up as a client that ends its side does, and let ``late`` have what the engine had said by
        then: it is heard until the engine closes, LEAVE_S at most."""
        left = self._response
        assert left is not None
        if self._pending or self._is_write_paused or self._is_read_paused or not self._transport.can_write_eof():
            self.give_up()
            return
        self._counters.aborted += 1
        self._is_cut = True
        self._response, self._patience = late, None
        self._parser.emit = late.receive()
        self._due = self._whole_due = self._loop.time() + LEAVE_S
        self._transport.write_eof()
        error = UpstreamAbortedError("the router gave the request up", address=self._address, phase=self._phase)
        left.end(error)

    # What the loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._is_plain = transport.get_extra_info("ssl_object") is None
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll.register(sock.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self._transport.abort()  # bytes without a request, or after one that was given up
            return
        parser = self._parser
        try:
            if parser.is_between_chunks and response.take is not None and (size := response.take(data)):
                parser.passed(size)
                return
            parser.feed(data)
        except ProtocolError as error:
            if self._response is response:
                self._fail(UpstreamProtocolError(str(error), address=self._address, phase=self._phase))
            return
        except Exception as error:  # the consumer's write
            if self._response is response:
                self._counters.aborted += 1
                self._finish(error)
            return
        if parser.stage != BODY or not response.is_piped:
            self._advance(response)

    def eof_received(self) -> None:
        if self._response is None:
            self._transport.abort()
        elif self._parser.eof():
            self._finish(None)
        else:
            self._fail(self._closed("the engine closed the connection", by_engine=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._response is not None:
            text = "the connection was lost" if exc is None else f"the connection was lost: {exc}"
            self._fail(self._closed(text, by_engine=isinstance(exc, BrokenPipeError)))
        self._parser.end()
        self._pending.clear()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._send()

    def _send(self) -> None:
        while self._pending and not self._is_write_paused:
            self._transport.write(self._pending.popleft())
        if not self._pending and not self._is_write_paused and self._phase is UpstreamPhase.SEND:
            self._phase = UpstreamPhase.FIRST_BYTE
            self._due = self._loop.time() + self._deadlines.first_byte_s

    def _advance(self, response: UpstreamResponse) -> None:
        """After bytes that may have brought the head or the end, or that a reader waits for."""
        if self._response is not response:
            return  # given up by the consumer's write
        parser = self._parser
        if parser.stage == HEAD:
            return
        if not response.has_head:
            self._phase = UpstreamPhase.BODY
            self._hear(self._loop.time())
            if parser.status >= 400 and self._pending:
                self._pending.clear()
                self._is_cut = True
            response.begin(parser.status, parser.headers)
        if parser.stage == COMPLETE:
            self._finish(None)
            return
        response.wake()
        if self._backlog() > self._limits.buffer_bytes_max:
            self.pause()

    def _backlog(self) -> float:
        return 0 if self._response is None else self._parser.body_bytes - self._response.taken

    def _finish(self, error: BaseException | None) -> None:
        """The request is over; the connection is kept where the answer was clean and the request was sent whole."""
        response, self._response = self._response, None
        assert response is not None
        self._counters.in_flight -= 1
        parser, transport = self._parser, self._transport
        parser.emit = discard
        is_clean = error is None and parser.is_clean and parser.keeps_alive and not self._is_cut
        is_sent = not self._pending and not self._is_write_paused and not transport.get_write_buffer_size()
        is_kept = is_clean and is_sent and not transport.is_closing()
        self._patience = None
        if error is None:
            self._counters.completed += 1
            self._counters.heard_s = self._loop.time()
        if is_kept:
            if self._is_read_paused:
                self._is_read_paused = False
                transport.resume_reading()
            self._is_reused = True
        else:
            self._pending.clear()
            transport.abort()
        self._on_free(self, is_kept)
        response.end(error)

    def _fail(self, error: UpstreamError) -> None:
        if not isinstance(self._response, LateAnswer):
            self._counters.failed[error.phase] += 1
        self._finish(error)

    def _time_out(self, phase: UpstreamPhase, seconds: float) -> None:
        self._fail(UpstreamTimeoutError(f"over its deadline of {seconds:g} s", address=self._address, phase=phase))

    def _closed(self, text: str, *, by_engine: bool) -> UpstreamClosedError:
        is_cut_short = bool(self._pending) or self._is_write_paused
        is_untouched = self._is_reused and not self._parser.has_begun
        if is_untouched and (is_cut_short or (by_engine and self._is_unacknowledged())):
            return UpstreamUnprocessedError(
                f"{text} before it took the request", address=self._address, phase=self._phase
            )
        return UpstreamClosedError(text, address=self._address, phase=self._phase)

    def _is_unacknowledged(self) -> bool:
        """Whether the engine's kernel closed the connection without the last bytes of the request.

        The FIN acknowledges all that the kernel had, so that what it leaves out was never read. A reset acknowledges
        nothing; one that follows a FIN shows as EPIPE or as the end of the stream, any other proves nothing.
        """
        if not self._is_plain or not hasattr(socket, "TCP_INFO"):
            return False
        try:
            sock = self._transport.get_extra_info("socket")
            (acknowledged,) = _BYTES_ACKED.unpack(
                sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
            )
        except (OSError, ValueError, struct.error):
            return False
        return bool(acknowledged < self._written)
